"""How checkpoints reach the disk: whole or not at all, each with its run record beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from fitting.records import RunRecord, record_path
from looped_lm.common.writing import failing_with, new_file
from looped_lm.runs.checkpoint import Stored, verify_once
from looped_lm.runs.lightning_internals import WrappingCheckpointIO

RECORD_KEY = "run_record"


class RecordingCheckpointIO(WrappingCheckpointIO):
    """Writes checkpoints whole or not at all, and writes and removes the record beside each, whoever asked for it.

    A record comes after its checkpoint and goes before it: where there is a record, there is its checkpoint, too.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
        if "://" in str(path):
            # An object store shows a whole object or none.
            super().save_checkpoint(checkpoint, path, *args, **kwargs)
            return
        with failing_with(
            "Earlier checkpoints are untouched: make room, and go on with --resume auto.", path
        ):
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
    """Write a checkpoint whole or not at all. Raises what `torch.save` raises, of a full disk, for example."""
    # Lightning's own way holds the file in memory twice and takes a detour over the system's /tmp.
    with new_file(path) as aside, aside.open("wb") as file:
        torch.save(checkpoint, file)


def write_record(record: Mapping[str, Any], checkpoint: str | Path) -> None:
    """Write the record that a checkpoint holds beside it; a UserError where the disk does not take it."""
    path = record_path(checkpoint)
    with failing_with("The checkpoint beside it is whole, and --resume auto goes on from it.", path):
        RunRecord.from_dict(record).save(path)


def mend_record(stored: Stored) -> None:
    """Write the record of a whole checkpoint that has none beside it, as a kill between the two leaves it."""
    if stored.record and not record_path(stored.path).exists():
        write_record(stored.record, stored.path)
