"""A layer that is modulated by the recurrence it runs in.

Source: timestep encoding for looped transformers (arXiv 2410.01405). There a small network makes the scales of the
norms; here one matrix does, so that it starts as the plain layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.blocks import PreNormLayer
from looped_lm.loop.component import ModelComponent
from looped_lm.loop.layer import KeyValueSlot, LayerSizes, LoopContext
from looped_lm.loop.variants.loop_index_injection import BASE


class LoopScale(ModelComponent, nn.Module):
    """x -> x ⊙ (1 + W p(i + 1)), with W (d,d) starting at zero and the index embedding p of `LoopIndexInjection`."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d_model, d_model))

    def forward(self, x: Tensor, i: int) -> Tensor:
        d = len(self.weight)
        pairs = torch.arange(0, d, 2, dtype=self.weight.dtype, device=x.device)
        angles = (i + 1) * BASE ** (-pairs / d)
        return x * (1.0 + self.weight @ torch.cat((angles.sin(), angles.cos())))

    def flops_per_token(self) -> float:
        return len(self.weight)  # The scale is computed once for all tokens.

    def parameter_roles(self) -> dict[str, str]:
        return {"weight": "norm"}


class LoopModulatedLayer(PreNormLayer):
    """The paper's layer with both norms scaled by the recurrence. The width must be even.

    One matrix serves all recurrences, so it trains under truncated BPTT and extends beyond the trained count.
    """

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__(sizes)
        if sizes.d_model % 2:
            raise UserError(f"d_model is {sizes.d_model}; sine and cosine come in pairs, so it must be even.")
        self.scale_attn, self.scale_mlp = LoopScale(sizes.d_model), LoopScale(sizes.d_model)

    def forward(
        self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None = None
    ) -> Tensor | tuple[Tensor, Any]:
        y = self.scale_attn(self.norm_attn(x), context.i)
        x = self.residual_attn(x, self.attn(y, context, cache))
        return self.residual_mlp(x, self.mlp(self.scale_mlp(self.norm_mlp(x), context.i)))
