"""When the run's state is written, and what is on the disk by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import Checkpoints
from looped_lm import Steps
from tests.support.tiny import TinyData, tiny_lm, tiny_trainer


def test_logged_rows_are_on_the_disk_before_a_checkpoint_is(tmp_path: Path) -> None:
    """A killed run goes on from its checkpoint and logs no step before it again: none may still be in a queue."""
    logger = TensorBoardLogger(tmp_path, max_queue=1000, flush_secs=10_000)
    save = Checkpoints(dirpath=str(tmp_path / "checkpoints"), every_n_steps=2)
    trainer = tiny_trainer(tmp_path, [save], logger=logger, enable_checkpointing=True)
    seen: dict[int, list[int]] = {}
    write = trainer.strategy.save_checkpoint

    def look_first(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        scalars = EventAccumulator(str(logger.log_dir)).Reload().Scalars("train/loss")
        seen[checkpoint["global_step"]] = [e.step for e in scalars]
        write(checkpoint, *args, **kwargs)

    trainer.strategy.save_checkpoint = look_first  # type: ignore[method-assign]
    trainer.fit(tiny_lm(horizon=Steps(6), val_every_steps=3), datamodule=TinyData())
    # Lightning logs a step after the checkpoint that is written at its end, and before the validation that follows it.
    assert seen == {2: [1], 3: [1, 2, 3], 4: [1, 2, 3], 6: [1, 2, 3, 4, 5, 6]}


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"every_n_steps": 0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is 0"):
        Checkpoints(**wrong)
