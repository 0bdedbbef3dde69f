"""How checkpoints reach the disk: whole or not at all, each with its run record beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from fitting.records import RunRecord, record_path
from looped_lm.common.errors import UserError
from looped_lm.runs.checkpoint import Stored, verify

CHECKPOINT_KEY = "run_record"
PARTIAL = ".partial"


class RecordingCheckpointIO(_WrappingCheckpointIO):
    """Writes checkpoints whole or not at all, and writes and removes the record beside each, whoever asked for it.

    A checkpoint is written aside and renamed once it is on the disk, so that a process killed at any moment leaves
    whole ones only. Its record comes after it and goes before it: where a record lies, its checkpoint lies, too.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
        if "://" in str(path):
            # An object store shows a whole object or none.
            super().save_checkpoint(checkpoint, path, *args, **kwargs)
            return
        aside = Path(f"{path}{PARTIAL}")
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            if type(self.checkpoint_io) is TorchCheckpointIO:
                # Lightning's own way holds the file in memory twice and takes a detour over the system's /tmp.
                with aside.open("wb") as file:
                    torch.save(checkpoint, file)
            else:
                super().save_checkpoint(checkpoint, aside, *args, **kwargs)
            _flush(aside)
            aside.replace(path)
            _flush(aside.parent)
        except (OSError, RuntimeError) as error:
            # torch.save makes a RuntimeError of a disk that is full.
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise UserError(
                f"{path} could not be written ({_reason(error)}). Earlier checkpoints are untouched: make room, and go "
                "on with --resume auto."
            ) from error
        if CHECKPOINT_KEY in checkpoint:
            write_record(checkpoint[CHECKPOINT_KEY], path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if "://" not in str(path):
            verify(path)
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        record_path(path).unlink(missing_ok=True)
        super().remove_checkpoint(path)


def write_record(record: Mapping[str, Any], checkpoint: str | Path) -> None:
    """Write the record that a checkpoint holds beside it."""
    path = record_path(checkpoint)
    try:
        RunRecord.from_dict(record).save(path)
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({_reason(error)}); the checkpoint beside it is whole, and --resume auto "
            "goes on from it."
        ) from error


def mend_record(stored: Stored) -> None:
    """Write the record of a whole checkpoint that has none beside it, as a kill between the two leaves it."""
    if stored.record and not record_path(stored.path).exists():
        write_record(stored.record, stored.path)


def _flush(path: Path) -> None:
    """Have the disk hold what was written: the content of a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    """What the operating system said, where torch wraps it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    return str(error).splitlines()[0]
