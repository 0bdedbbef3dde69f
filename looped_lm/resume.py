"""Going on from a checkpoint with other processes than before."""

from __future__ import annotations

from typing import Any

import lightning as L

CHECKPOINT_KEY = "micro_batches_per_step"


def realign(checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
    """Count a checkpoint's micro-batches anew where a step has more or fewer of them than before.

    With another number of processes or rows per device a step consists of another number of micro-batches. Lightning
    takes the end of a step, and the time of a validation, from how many there were since the beginning of training.

    Args:
        checkpoint: as loaded; its counters are changed in place before Lightning and the data module read them.
        trainer: the trainer with the accumulation that this run uses.
    """
    then, now = checkpoint.get(CHECKPOINT_KEY), trainer.accumulate_grad_batches
    if then in (None, now):
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    before = progress["total"]["processed"]
    after = before // then * now
    for counts in (progress["total"], progress["current"]):
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += after - before
    data = trainer.datamodule  # type: ignore[attr-defined]
    position = checkpoint.get(type(data).__qualname__, {})
    if "batches_processed" in position:
        # Rows are counted from there; how many were read is not changed by how they are counted.
        position["batches_processed"] += after - before
