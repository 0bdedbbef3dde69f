"""Residual: how a layer of the recurrent block adds the output of its attention or MLP to its stream.

B batch rows, T sequence length, d = d_model, r recurrences. Prelude and coda add plainly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.component import ModelComponent


class Residual(ModelComponent, nn.Module, ABC):
    """Joins a layer's stream with one of its two branches; every branch of the recurrent block has its own.

    A subclass takes `d_model` and `num_recurrences` first. Its parameters count as the block's.
    """

    def __init__(self, d_model: int, num_recurrences: int) -> None:
        super().__init__()
        self.d_model, self.num_recurrences = d_model, num_recurrences

    @abstractmethod
    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Stream (B,T,d) after a branch, from the stream x (B,T,d) and the branch's output (B,T,d)."""

    def flops_per_token(self) -> int:
        """Forward FLOPs per token of one use: 2 per parameter, as for norm scales."""
        return 2 * sum(p.numel() for p in self.parameters())


class PlainResidual(Residual):
    """x + branch."""

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch


class ScaledResidual(Residual):
    """x + (gain / r)·branch, with r the recurrences the model is trained with.

    A block run r times adds r correlated updates: 1/r, rather than 1/sqrt(r), keeps their sum bounded, and learning
    rates carry over from one r to another. A model that is evaluated with another count keeps the factor of training.
    Source: arXiv 2606.18524; its λ / (N·sqrt(L)) for L layers looped N times is gain = λ / sqrt(L).

    Args:
        d_model: width d.
        num_recurrences: recurrences r of training.
        gain: λ / sqrt(L) of the paper.

    Raises:
        UserError: a gain that is not positive.
    """

    def __init__(self, d_model: int, num_recurrences: int, gain: float = 1.0) -> None:
        super().__init__(d_model, num_recurrences)
        if not gain > 0.0:
            raise UserError(f"gain is {gain}; it must be positive, or the branches would never train.")
        self.scale = gain / num_recurrences

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(x, branch, alpha=self.scale)
