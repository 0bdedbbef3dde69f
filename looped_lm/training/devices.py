"""The device that work runs on, and what follows from it."""

from __future__ import annotations

import platform

import torch

from looped_lm.common.errors import UserError


def usable_device(name: str | None) -> torch.device:
    """The device of a name such as cpu or cuda:1 (None: a GPU if there is one); UserError if it cannot be used."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"The device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def keeps_embedding_in_bf16(device: torch.device, precision: str | int | None) -> bool:
    """Whether the embedding's weights are bf16: under bf16 autocast on GPUs; on CPUs they would be slower."""
    return device.type == "cuda" and precision == "bf16-mixed"


def compute_dtype(precision: str) -> torch.dtype:
    """Dtype in which matrix products run under a Trainer's precision."""
    if "bf16" in precision:
        return torch.bfloat16
    return torch.float16 if "16" in precision else torch.float32


def hardware(device: torch.device) -> str:
    """What one process trains on, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
