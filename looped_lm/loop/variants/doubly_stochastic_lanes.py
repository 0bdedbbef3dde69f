"""Lanes whose mixing matrices are doubly stochastic, so that no mixing amplifies the state.

Source: mHC, manifold-constrained hyper-connections (arXiv 2512.24880), with static weights per recurrence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.lanes import HyperConnectionLanes

#: First weight of a recurrence's leading lane; the others share the rest. Sigmoids cannot start one-hot.
LEADING = 0.9
#: Keeps the quotient in the rounding finite; sums of rows then miss 1 by at most this.
ROUNDING_FLOOR = 1e-6


def doubly_stochastic(logits: Tensor, iterations: int) -> Tensor:
    """Doubly stochastic matrices (...,K,K) from any logits (...,K,K): Sinkhorn-Knopp on exp(logits), then rounding.

    The rounding (arXiv 1705.09634, algorithm 2) helps near permutations: rows and columns then sum to 1 within 2e-6,
    and exceed 1 in the last bit at most.
    """
    p = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for _ in range(iterations):
        p = p.log_softmax(dim=-1)
        p = p.log_softmax(dim=-2)
    p = p.exp()
    p = p / p.sum(dim=-1, keepdim=True).clamp_min(1.0)
    p = p / p.sum(dim=-2, keepdim=True).clamp_min(1.0)
    rows = (1.0 - p.sum(dim=-1, keepdim=True)).clamp_min(0.0)
    columns = (1.0 - p.sum(dim=-2, keepdim=True)).clamp_min(0.0)
    return p + rows * columns / (columns.sum(dim=-1, keepdim=True) + ROUNDING_FLOOR)


class DoublyStochasticLanes(HyperConnectionLanes):
    """Hyperconnection lanes with reads in (0,1), writes in (0,2) and doubly stochastic mixing.

    alpha_i = sigmoid(.), beta_i = 2·sigmoid(.), M_i = Sinkhorn-Knopp(exp(.)), which starts near the identity.

    A doubly stochastic matrix preserves equal lanes and the sum of the lanes. If all lanes began as the prelude's
    output, the first M_i could never train; if the coda read their plain sum, the last could not either. So the prelude
    writes, and the coda reads, with separate weights. Parameters: r (K² + 2K) + 2K.

    Args:
        d_model: width d.
        num_recurrences: recurrences r.
        num_lanes: lanes K.
        iterations: Sinkhorn-Knopp iterations.

    Raises:
        UserError: fewer than two lanes, or no iteration.
    """

    def __init__(self, d_model: int, num_recurrences: int, num_lanes: int = 2, iterations: int = 20) -> None:
        super().__init__(d_model, num_recurrences, num_lanes)
        if iterations < 1:
            raise UserError(f"iterations is {iterations}; Sinkhorn-Knopp needs at least 1.")
        self.iterations = iterations
        r, k = num_recurrences, num_lanes
        # Near one-hot where the unconstrained lanes are one-hot.
        near = torch.full((k, k), (1.0 - LEADING) / (k - 1)).fill_diagonal_(LEADING)
        self.alpha = nn.Parameter(near[torch.arange(r) % k].logit())
        self.mixing = nn.Parameter(near.log().repeat(r, 1, 1))
        self.beta = nn.Parameter(torch.zeros(r, k))
        self.entry = nn.Parameter(near[0].logit())  # (K,)
        self.exit = nn.Parameter(near[r % k].logit())  # (K,)

    def read_weights(self, i: int) -> Tensor:
        return super().read_weights(i).sigmoid()

    def mixing_matrix(self, i: int) -> Tensor:
        return doubly_stochastic(super().mixing_matrix(i), self.iterations)

    def write_weights(self, i: int) -> Tensor:
        return 2.0 * super().write_weights(i).sigmoid()

    def expand(self, s: Tensor) -> Tensor:
        return (2.0 * self.entry.sigmoid()).view(-1, *(1,) * s.dim()) * s

    def reduce(self, state: Tensor) -> Tensor:
        # A weighted sum, not a matrix product, which autocast would run in bf16.
        return (self.exit.sigmoid().view(-1, *(1,) * (state.dim() - 1)) * state).sum(dim=0)
