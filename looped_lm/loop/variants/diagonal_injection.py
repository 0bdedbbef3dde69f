"""Diagonal injection: the carried state decays channel by channel, so that the loop's linear part is stable.

Source: Parcae (arXiv 2604.12946), with the initial values of its public implementation.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.injection import Injection

#: Smallest decay rate: it keeps exp(-rate) below 1 even in fp32, whatever the parameters.
RATE_FLOOR = 1e-6


class DiagonalInjection(Injection):
    """u = A ⊙ s + Δ ⊙ (B e), with A = exp(-Δ ⊙ exp(log_a)) in (0,1)^d and Δ = softplus(log_delta) > 0.

    The step Δ discretises the system s' = -exp(log_a) ⊙ s + B e: exactly for the state (zero-order hold), by Euler's
    rule for the input. B (d,d) starts as the identity, A as sqrt(1/5). Parcae draws s_0 at random; here it is e.
    """

    def __init__(self, d_model: int, decay: float = math.sqrt(1 / 5)) -> None:
        super().__init__(d_model)
        if not 0.0 < decay < 1.0:
            raise UserError(f"decay is {decay}; the share of the state that is kept must lie in (0, 1).")
        delta = -math.log(decay)
        self.log_a = nn.Parameter(torch.zeros(d_model))
        self.log_delta = nn.Parameter(torch.full((d_model,), math.log(math.expm1(delta))))
        self.proj = nn.Linear(d_model, d_model, bias=False)
        nn.init.eye_(self.proj.weight)

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def decay(self) -> Tensor:
        """Diagonal (d,) of A."""
        return torch.exp(-(F.softplus(self.log_delta) * self.log_a.exp() + RATE_FLOOR))

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return self.decay() * s + F.softplus(self.log_delta) * self.proj(e)

    def flops_per_token(self) -> int:
        # The product B e, and three elementwise operations on d channels.
        return 2 * self.proj.weight.numel() + 3 * self.d_model
