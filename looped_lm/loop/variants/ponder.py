"""Soft halting with a cost of pondering: a learned distribution over exits, held near a geometric one.

Source: PonderNet, arXiv 2107.05407. Left out: drawing the exit in evaluation, and the share of probability at which its
training stops to unroll; here every step runs all its recurrences.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from looped_lm.common.errors import UserError
from looped_lm.loop.variants.halting import Halting


class PonderCost(Halting):
    """Σ_i E[p_i·ℓ_i] + beta·E[KL(p ‖ q)] over the exits of `Halting`; also logs `prior_kl`, E[KL(p ‖ q)] in nats.

    The prior q_i ∝ prior·(1 - prior)^i is cut at the recurrences of the step and sums to one over them.

    Args:
        d_model: width d.
        num_recurrences: recurrences r of training, not used.
        beta: weight of the distance from the prior.
        prior: probability of leaving at each recurrence; 1 / prior is the mean exit of a loop without an end.

    Raises:
        UserError: a beta or prior out of range, or a step of one recurrence.
    """

    def __init__(self, d_model: int, num_recurrences: int, beta: float = 0.01, prior: float = 0.3) -> None:
        super().__init__(d_model, num_recurrences, beta)
        if not 0.0 < prior < 1.0:
            raise UserError(f"prior is {prior}; it must lie in (0, 1), so that every exit is possible.")
        self.prior = prior

    def penalty(self, log_p: Tensor) -> tuple[Tensor, str, Tensor]:
        powers = torch.arange(len(log_p), dtype=log_p.dtype, device=log_p.device) * math.log1p(-self.prior)
        log_q = powers.log_softmax(0)[:, None, None]
        divergence = (log_p.exp() * (log_p - log_q)).sum(0).mean()
        return divergence, "prior_kl", divergence
