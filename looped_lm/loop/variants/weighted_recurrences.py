"""Losses at several recurrences, summed with fixed weights.

Source: LoopFormer, arXiv 2602.11451, which trains a shorter loop beside the whole one. Left out: its conditioning of
the block on time and step size, the drawing of the shorter loop, and the consistency term between the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from looped_lm.common.errors import UserError
from looped_lm.loop.objective import Objective, Read, States


class WeightedRecurrences(Objective):
    """Σ w_k·(cross entropy after recurrence k) / Σ w_k. Logs `loss_after_<n>`, the loss after n recurrences, for each.

    Args:
        d_model: width d, not used.
        num_recurrences: recurrences r of training, not used.
        recurrences: which recurrences k, counted from 0, or from the end as -1, -2, ...; None: the last two. Steps of
            fewer recurrences than the shortest count allows are refused.
        weights: their weights w, in the same order; None: equal ones.

    Raises:
        UserError: no recurrences, another number of weights, or a weight that is not positive.
    """

    def __init__(
        self,
        d_model: int,
        num_recurrences: int,
        recurrences: list[int] | None = None,
        weights: list[float] | None = None,
    ) -> None:
        super().__init__(d_model, num_recurrences)
        self.recurrences = [-2, -1] if recurrences is None else recurrences
        self.weights = [1.0] * len(self.recurrences) if weights is None else weights
        if not self.recurrences or len(self.weights) != len(self.recurrences):
            raise UserError(
                f"{len(self.weights)} weights for the recurrences {self.recurrences}: give at least one recurrence, "
                "and one weight for each."
            )
        if not all(0.0 < w < math.inf for w in self.weights):
            raise UserError(f"weights are {self.weights}; each must be positive and finite.")

    def wanted(self, num_recurrences: int) -> Sequence[int]:
        return [k + num_recurrences if k < 0 else k for k in self.recurrences]

    def forward(
        self, states: States, read: Read, auxiliary: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        losses = {i: read(state, None) for i, state in states.items()}
        weights = zip(self.wanted(max(states) + 1), self.weights, strict=True)
        total = torch.stack([w * losses[i] for i, w in weights]).sum() / sum(self.weights)
        return sum(auxiliary.values(), total), {f"loss_after_{i + 1}": loss for i, loss in losses.items()}
