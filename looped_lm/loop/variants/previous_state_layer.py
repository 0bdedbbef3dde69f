"""A layer that reads its own state of the recurrence before.

Source: Fully Looped Transformer (arXiv 2605.18797), which spreads what one loop hands to the next over all layers, and
lets it in through the attention that is there, without new parameters. Its details were not at hand: this is the
plainest form of that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from looped_lm.loop.blocks import PreNormLayer
from looped_lm.loop.layer import KeyValueSlot, LoopContext


class PreviousStateLayer(PreNormLayer):
    """Keys and values come from the layer's output at the recurrence before, at the first from its input."""

    def forward(
        self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None = None
    ) -> Tensor | tuple[Tensor, Any]:
        y = self.norm_attn(x)
        source = y if context.memory is None else self.norm_attn(context.memory)
        q = self.attn.queries(y, context)
        x = self.residual_attn(x, self.attn.attend(q, *self.attn.keys_values(source, context, cache)))
        x = self.residual_mlp(x, self.mlp(self.norm_mlp(x)))
        return x, x
