"""Reading checkpoints as plain data, and comparing them with what they are to be loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHOWN = 8


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint as plain data and tensors, on the CPU.

    Raises:
        ValueError: the file is no whole checkpoint of a LoopedLM.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is truncated, or something else ({type(error).__name__})."
        ) from error
    needed = ("state_dict", "hyper_parameters", "pytorch-lightning_version")
    missing = [k for k in needed if not isinstance(checkpoint, dict) or k not in checkpoint]
    if missing:
        raise ValueError(f"{path} is no checkpoint of a LoopedLM: it has no {' and no '.join(missing)}.")
    return checkpoint


@dataclass(frozen=True)
class Difference:
    """One value that a checkpoint and a module do not share."""

    key: str
    stored: Any
    given: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.stored!r} in the checkpoint, {self.given!r} here"


def differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[Difference]:
    """Every leaf of two nested mappings that is not equal; a key that one side lacks counts as None there."""
    old, new = _leaves(stored), _leaves(given)
    return [
        Difference(key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, Mapping):
        leaves: dict[str, Any] = {}
        for key, value in values.items():
            leaves.update(_leaves(value, f"{prefix}.{key}" if prefix else str(key)))
        return leaves
    return {prefix: list(values) if isinstance(values, tuple) else values}


def compare_tensors(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuse weights of another architecture.

    Raises:
        ValueError: naming the tensors that differ in shape or exist on one side only.
    """
    problems = [
        f"{name}: {tuple(stored[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the model"
        for name in sorted(own.keys() & stored.keys())
        if stored[name].shape != own[name].shape
    ]
    problems += [f"{name}: only in the checkpoint" for name in sorted(stored.keys() - own.keys())]
    problems += [f"{name}: only in the model" for name in sorted(own.keys() - stored.keys())]
    if problems:
        more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError(
            f"The checkpoint holds another architecture; {len(problems)} tensor(s) differ:\n  "
            + "\n  ".join(problems[:SHOWN] + more)
            + "\nUse the configuration the checkpoint was trained with, or LoopedLM.load_from_checkpoint(path)."
        )
