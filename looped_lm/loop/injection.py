"""Injection: how the prelude's output reaches every recurrence.

B batch rows, T sequence length, d = d_model; e (B,T,d) the prelude's output, s (B,T,d) the state, i the recurrence.
Source: arXiv 2604.21106, section 3 and the injection ablation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from looped_lm.loop.component import PerRecurrence


class Injection(PerRecurrence, nn.Module, ABC):
    """Joins the prelude's output with the state at the start of each recurrence. A subclass takes `d_model` first."""

    #: Whether `forward` reads `e`. If not, the prelude learns through the initial state alone.
    reinjects_input: bool = True

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    @abstractmethod
    def initial_state(self, e: Tensor) -> Tensor:
        """State s_0 (B,T,d) before the first recurrence, where it follows from e alone."""

    def start(self, e: Tensor, positions: Tensor | None, rows: Sequence[int] | None) -> Tensor:
        """State s_0 (B,T,d); what draws it at random overrides this and not `initial_state`.

        `positions` (B,T) are the tokens' places in their rows in generation; None: 0 to T - 1. `rows` numbers the B
        rows among all that training sees, whatever process and micro-batch they are in; None: this is not training.
        """
        return self.initial_state(e)

    @abstractmethod
    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        """Input u (B,T,d) of the recurrent block at recurrence `i`."""


class LinearInjection(Injection):
    """u = W [e ‖ s] with W in R^{d x 2d}, starting as [I | 0]."""

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.proj = nn.Linear(2 * d_model, d_model, bias=False)
        with torch.no_grad():
            self.proj.weight.zero_()
            self.proj.weight[:, :d_model].fill_diagonal_(1.0)

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return self.proj(torch.cat((e, s), dim=-1))

    def flops_per_token(self) -> int:
        return 2 * self.proj.weight.numel()


class AdditiveInjection(Injection):
    """u = s + e, starting from s_0 = 0."""

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.zeros_like(e)

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return s + e


class PassthroughInjection(Injection):
    """u = s: the prelude's output enters as the initial state only."""

    reinjects_input = False

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return s
