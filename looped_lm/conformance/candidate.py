"""The tiny model that a component is tried in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from looped_lm.training.lightning_module import LoopedLM
from looped_lm.training.schedules import Steps

VOCAB, SEQ_LEN, ROWS = 61, 16, 4
SIZES: Mapping[str, Any] = dict(
    vocab_size=VOCAB,
    seq_len=SEQ_LEN,
    batch_tokens=ROWS * SEQ_LEN,
    size=1,
    head_dim=16,
    prelude_layers=1,
    recurrent_layers=1,
    coda_layers=1,
    num_recurrences=4,
)


class ConformanceError(AssertionError):
    """A component breaks a promise; the message names it and says what was expected."""


@dataclass(frozen=True)
class Candidate:
    """Arguments of LoopedLM on trial, over those of a tiny linear model with r = 4."""

    components: Mapping[str, Any] = field(default_factory=dict)

    def lm(self, dtype: torch.dtype = torch.float64, moved: bool = True, **overrides: Any) -> LoopedLM:
        """A freshly built module, the same each time, without touching the global random state.

        `moved` takes every weight off its initial value: [I | 0] or one-hot lanes hide what a component does.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            lm = LoopedLM(**{"horizon": Steps(8), **SIZES, **self.components, **overrides}).to(dtype)
        if moved:
            move(lm)
        return lm

    def __str__(self) -> str:
        return ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in self.components.items()) or "defaults"


def move(module: nn.Module, scale: float = 0.3) -> None:
    """Add noise to every parameter, small against a matrix's own entries."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.add_(scale * noise / math.sqrt(p.shape[-1] if p.dim() else 1))


def batch(rows: int = ROWS, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Random inputs and targets (rows,T)."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(VOCAB, (rows, SEQ_LEN + 1), generator=generator)
    return row[:, :-1], row[:, 1:]


def expect(holds: bool, message: str) -> None:
    """Raise ConformanceError with the message unless it holds."""
    if not holds:
        raise ConformanceError(message)


def expect_close(actual: Tensor, expected: Tensor, message: str, tolerance: float = 1e-9) -> None:
    """The same unless two tensors agree, relative to the largest expected value."""
    off = float((actual.detach() - expected.detach()).abs().max())
    bound = tolerance * max(float(expected.detach().abs().max()), 1e-30)
    # Not `off > bound`: a nan agrees with nothing.
    expect(off <= bound, f"{message} (largest difference {off:.2e}, allowed {bound:.2e})")
