"""Loop-index embedding: the block is told which recurrence it is in.

Source: the timestep embedding of Universal Transformers (arXiv 1807.03819), added to the linear injection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.injection import LinearInjection

BASE = 10_000.0


class LoopIndexInjection(LinearInjection):
    """u = W [e ‖ s] + g ⊙ p(i + 1), where p(t) holds sin and cos of t / 10,000^(2j/d) for the channel pairs j.

    The gain g (d,) is learned and starts at zero, so that training begins as with the linear injection. One gain serves
    all recurrences, so it trains under truncated BPTT and extends beyond the trained count. The width must be even.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        if d_model % 2:
            raise UserError(f"d_model is {d_model}; sine and cosine come in pairs, so it must be even.")
        self.gain = nn.Parameter(torch.zeros(d_model))

    def index_embedding(self, i: int) -> Tensor:
        """p(i + 1) (d,): sines, then cosines. In p(0) the sines are zero, so their gains would not train."""
        pairs = torch.arange(0, self.d_model, 2, dtype=self.gain.dtype, device=self.gain.device)
        angles = (i + 1) * BASE ** (-pairs / self.d_model)
        return torch.cat((angles.sin(), angles.cos()))

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return super().forward(e, s, i) + self.gain * self.index_embedding(i)

    def flops_per_token(self) -> int:
        return super().flops_per_token() + self.d_model  # The embedding is computed once for all tokens.
