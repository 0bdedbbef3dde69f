"""Files that pass for checkpoints, and damage to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def stored(path: Path, step: int, **record: Any) -> Path:
    """A file that passes for a checkpoint of a LoopedLM."""
    content = {
        "state_dict": {"w": torch.arange(4000.0) + step},
        "hyper_parameters": {},
        "global_step": step,
        "pytorch-lightning_version": "2.6.0",
        "run_record": {"steps_planned": 10, "status": "stopped", **record},
    }
    torch.save(content, path)
    return path


def flip(path: Path, place: int) -> None:
    """Flip the lowest bit of one byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
