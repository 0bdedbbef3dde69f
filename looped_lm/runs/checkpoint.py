"""Checkpoints as files: read, verified and compared, without Lightning."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looped_lm.common.errors import UserError

RECORD_KEY = "run_record"
_verified: set[tuple[int, ...]] = set()


def load_checkpoint(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    """A verified checkpoint on the CPU (`mmap`: read on use); UserError if damaged or not a LoopedLM's."""
    verify(path)
    return _read(path, mmap)


def verify(path: str | Path) -> None:
    """Compare a checkpoint's content with the checksums that were written with it.

    `torch.save` writes a zip archive with a CRC-32 of every record, which `torch.load` ignores.

    Raises:
        UserError: the file is truncated, damaged, or not one that `torch.save` wrote.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile and zlib raise many types for a damaged archive
        raise _unreadable(path, error) from error
    if damaged is not None:
        raise UserError(f"{path} is damaged: the checksum of {damaged!r} in it does not match its content.")
    _verified.add(_written(path))


def verify_once(path: str | Path) -> None:
    """Verify a checkpoint, unless this process has done so since it was written."""
    if _written(path) not in _verified:
        verify(path)


def _written(path: str | Path) -> tuple[int, ...]:
    found = os.stat(path) if os.path.exists(path) else None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found else ()


def _unreadable(path: str | Path, error: Exception) -> UserError:
    # torch's reasons are paragraphs about its own internals; the first sentence says what it met.
    met = str(error).split(". ")[0]
    if not isinstance(error, OSError) and not zipfile.is_zipfile(path):
        met = "it is not a zip archive, as checkpoints are"
    reason = f"it is truncated, damaged, or something else ({met})"
    return UserError(f"{path} cannot be read as a checkpoint: {reason}.")


def _read(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        raise _unreadable(path, error) from error
    needed = ("state_dict", "hyper_parameters", "global_step", "pytorch-lightning_version")
    missing = [k for k in needed if not isinstance(checkpoint, dict) or k not in checkpoint]
    if missing:
        raise UserError(f"{path} is not a checkpoint of a LoopedLM: it has no {' and no '.join(missing)}.")
    return checkpoint


@dataclass(frozen=True)
class Stored:
    """A checkpoint file, and what it says about its run, read without its tensors."""

    path: Path
    step: int
    record: Mapping[str, Any]


def look(path: str | Path) -> Stored:
    """What a checkpoint says about its run; UserError if it cannot be read or is not a LoopedLM's."""
    checkpoint = _read(path, mmap=True)
    record = checkpoint.get(RECORD_KEY)
    return Stored(Path(path), int(checkpoint["global_step"]), record if isinstance(record, dict) else {})


def in_folder(folder: str | Path) -> tuple[list[Stored], dict[Path, str]]:
    """Checkpoints in a folder, the newest first, and the unreadable ones with the reason."""
    found, unreadable = [], {}
    for path in sorted(Path(folder).glob("*.ckpt")):
        try:
            found.append(look(path))
        except UserError as error:
            # Another process may remove its files between listing and reading.
            if path.exists():
                unreadable[path] = str(error)
    # Of two for the same step, the later one was written after the run had gone back.
    return sorted(found, key=lambda c: (c.step, *_written(c.path)[2:]), reverse=True), unreadable


def newest_whole(folder: str | Path) -> tuple[Stored | None, dict[Path, str]]:
    """The newest whole checkpoint in a folder, and the damaged newer ones with the reason."""
    found, damaged = in_folder(folder)
    for stored in found:
        try:
            verify(stored.path)
            return stored, damaged
        except UserError as error:
            damaged[stored.path] = str(error)
    return None, damaged


@dataclass(frozen=True)
class Difference:
    """One value that a checkpoint and a module do not share."""

    key: str
    stored: Any
    given: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.stored!r} in the checkpoint, {self.given!r} here"


def differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[Difference]:
    """Every unequal leaf of two nested mappings; a key that one side lacks counts as None there."""
    old, new = _leaves(stored), _leaves(given)
    both = [Difference(key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())]
    return [d for d in both if d.stored != d.given]


def _leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    listed = values if isinstance(values, list) else []
    if listed and all(isinstance(v, Mapping) and "class_path" in v for v in listed):
        # By class, not by place: one more callback would make all that follow it differ.
        names = [str(v["class_path"]) for v in values]
        places = [f"#{names[:i].count(n) + 1}" if n in names[:i] else "" for i, n in enumerate(names)]
        values = {n + place: v for n, place, v in zip(names, places, values, strict=True)}
    if isinstance(values, Mapping):
        leaves: dict[str, Any] = {}
        for key, value in values.items():
            leaves.update(_leaves(value, f"{prefix}.{key}" if prefix else str(key)))
        return leaves
    return {prefix: list(values) if isinstance(values, tuple) else values}


def compare_tensors(
    stored: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    way_out: str = "Use the configuration the checkpoint was trained with, or LoopedLM.load_from_checkpoint(path).",
) -> None:
    """Refuse weights of another architecture: a UserError names the tensors that differ."""
    problems = [
        f"{name}: {tuple(stored[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the model"
        for name in sorted(own.keys() & stored.keys())
        if stored[name].shape != own[name].shape
    ]
    problems += [f"{name}: only in the checkpoint" for name in sorted(stored.keys() - own.keys())]
    problems += [f"{name}: only in the model" for name in sorted(own.keys() - stored.keys())]
    if problems:
        more = [f"... and {len(problems) - 8} more"] if len(problems) > 8 else []
        told = f"The checkpoint holds another architecture; {len(problems)} tensor(s) differ:"
        raise UserError("\n  ".join([told, *problems[:8], *more]) + f"\n{way_out}")


def refuse_weights_alone(checkpoint: Mapping[str, Any]) -> None:
    """Refuse (UserError) to continue training from a checkpoint without the optimizer's state."""
    if not checkpoint.get("optimizer_states"):
        raise UserError(
            "The checkpoint holds weights but no optimizer state, like every converted one, so training cannot go on "
            "from it. validate, test, predict, generate and export read it."
        )
