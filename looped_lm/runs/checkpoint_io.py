"""How Lightning writes a run's checkpoints, with the record beside each, and counts on from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from fitting.records import RunRecord, record_path
from looped_lm.common.writing import failing_with, new_file
from looped_lm.runs.checkpoint import RECORD_KEY, Stored, verify_once
from looped_lm.runs.lightning_internals import WrappingCheckpointIO, count_batches_anew

MICRO_BATCHES = "micro_batches_per_step"
"""Key in a checkpoint: micro-batches per optimizer step of its run."""


class RecordingCheckpointIO(WrappingCheckpointIO):
    """Writes checkpoints whole or not at all, and writes and removes the record beside each.

    A checkpoint is written aside and renamed once it is on the disk: a process killed at any moment leaves only whole
    ones. A record is written after its checkpoint and removed before it, so there is never a record without one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
        if "://" in str(path):
            # An object store shows a whole object or none.
            super().save_checkpoint(checkpoint, path, *args, **kwargs)
            return
        way_out = "Earlier checkpoints are untouched: make room, and go on with --resume auto."
        with failing_with(way_out, path):
            if type(self.checkpoint_io) is TorchCheckpointIO:
                write_checkpoint(checkpoint, path)
            else:
                with new_file(path) as aside:
                    super().save_checkpoint(checkpoint, aside, *args, **kwargs)
        if RECORD_KEY in checkpoint:
            write_record(checkpoint[RECORD_KEY], path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if "://" not in str(path):
            verify_once(path)
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        record_path(path).unlink(missing_ok=True)
        super().remove_checkpoint(path)


def write_checkpoint(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Write a checkpoint whole or not at all; raises what `torch.save` raises."""
    # Lightning's own writer holds the file in memory twice and takes a detour through the system's /tmp.
    with new_file(path) as aside, aside.open("wb") as file:
        torch.save(checkpoint, file)


def write_record(record: Mapping[str, Any], checkpoint: str | Path) -> None:
    """Write a checkpoint's record to a file beside it; UserError if it cannot be written."""
    path = record_path(checkpoint)
    with failing_with("The checkpoint beside it is whole, and --resume auto goes on from it.", path):
        RunRecord.from_dict(record).save(path)


def mend_record(stored: Stored) -> None:
    """Write the record beside a whole checkpoint if it is missing, as after a kill between the two."""
    if stored.record and not record_path(stored.path).exists():
        write_record(stored.record, stored.path)


def realign(checkpoint: dict[str, Any], micro_batches: int, data: object) -> None:
    """Recount a checkpoint's micro-batches, in place, as if every step had had `micro_batches` of them.

    That number depends on the processes and the rows per device. Lightning derives the ends of steps and the times of
    validations from the micro-batches counted since training began.
    """
    then = checkpoint.get(MICRO_BATCHES)
    if then in (None, micro_batches):
        return
    more = count_batches_anew(checkpoint, then, micro_batches)
    position = checkpoint.get(type(data).__qualname__, {})
    if "batches_processed" in position:
        # The data module counts new rows from this number on; the rows read so far stay the same.
        position["batches_processed"] += more
