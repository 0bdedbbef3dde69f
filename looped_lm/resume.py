"""Going on from a checkpoint: in the run's own folder, with other processes, and with every difference named."""

from __future__ import annotations

from typing import Any

import lightning as L


def realign(checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
    """Count a checkpoint's micro-batches anew where a step has more or fewer of them than before.

    With another number of processes or rows per device a step consists of another number of micro-batches. Lightning
    takes the end of a step, and the time of a validation, from how many there were since the beginning of training.

    Args:
        checkpoint: as loaded; its counters are changed in place before Lightning and the data module read them.
        trainer: the trainer with the accumulation that this run uses.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is None:
        return
    progress = loops["epoch_loop.batch_progress"]
    before = progress["total"]["processed"]
    after = checkpoint["global_step"] * trainer.accumulate_grad_batches
    for counts in (progress["total"], progress["current"]):
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += after - before
    data = trainer.datamodule  # type: ignore[attr-defined]
    position = checkpoint.get(type(data).__qualname__, {})
    if "batches_processed" in position:
        position["batches_processed"] += after - before
