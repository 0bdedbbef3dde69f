"""Low-rank adapters for every recurrence beside the shared layer.

Source: relaxed recursive transformers (arXiv 2410.20672). There every matrix has an adapter, and shared weights come
from a pretrained model; here each of the two branches has one, and everything is trained from the start.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.blocks import PreNormLayer
from looped_lm.loop.component import ModelComponent
from looped_lm.loop.layer import KeyValueSlot, LayerSizes, LoopContext


class LoopAdapter(ModelComponent, nn.Module):
    """x -> B_i A_i x at recurrence i, with A_i (k,d) and B_i (d,k), which starts at zero."""

    def __init__(self, d_model: int, num_recurrences: int, rank: int) -> None:
        super().__init__()
        bound = math.sqrt(3.0 / d_model)
        self.down = nn.Parameter(torch.empty(num_recurrences, d_model, rank).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(num_recurrences, rank, d_model))

    def forward(self, x: Tensor, i: int) -> Tensor:
        return x @ self.down[i] @ self.up[i]

    def flops_per_token(self) -> float:
        return 2 * (self.down[0].numel() + self.up[0].numel())


class AdapterLayer(PreNormLayer):
    """x + Attn(y) + B_i A_i y with y = norm(x), then the same with the MLP; trained with AdamW.

    There is no rule for recurrences beyond the trained ones, so evaluation refuses them.

    Args:
        sizes: the model's.
        rank: rank k of an adapter.

    Raises:
        UserError: a rank below 1.
    """

    step_specific = True

    def __init__(self, sizes: LayerSizes, rank: int = 8) -> None:
        super().__init__(sizes)
        if rank < 1:
            raise UserError(f"rank is {rank}; an adapter needs at least 1.")
        r, d = sizes.num_recurrences, sizes.d_model
        self.adapter_attn, self.adapter_mlp = LoopAdapter(d, r, rank), LoopAdapter(d, r, rank)

    def forward(
        self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None = None
    ) -> Tensor | tuple[Tensor, Any]:
        i, y = context.i, self.norm_attn(x)
        x = self.residual_attn(x, self.attn(y, context, cache) + self.adapter_attn(y, i))
        y = self.norm_mlp(x)
        return self.residual_mlp(x, self.mlp(y) + self.adapter_mlp(y, i))
