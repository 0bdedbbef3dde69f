"""Keys and values of the first recurrence, read by all later ones.

Source: CART (arXiv 2606.01495), which also changes what the loop carries; here only the keys and values are shared.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from looped_lm.loop.blocks import PreNormLayer, count
from looped_lm.loop.layer import KeyValueSlot, LoopContext


class SharedKeysValuesLayer(PreNormLayer):
    """The paper's layer, whose later recurrences attend with queries of their own to the first one's keys and values.

    Later recurrences save the two products, and generation keeps one cache entry per token and layer, not r.
    """

    first_recurrence_only = True

    def forward(
        self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None = None
    ) -> Tensor | tuple[Tensor, Any]:
        y, memory = self.norm_attn(x), context.memory
        q = self.attn.queries(y, context)
        if memory is None:
            memory = self.attn.keys_values(y, context, cache)
        x = self.residual_attn(x, self.attn.attend(q, *memory))
        return self.residual_mlp(x, self.mlp(self.norm_mlp(x))), memory

    def flops_per_token(self, seq_len: float = 0.0, i: int = 0) -> float:
        saved = 0 if i == 0 else 2 * (count(self.attn.k) + count(self.attn.v))
        return super().flops_per_token(seq_len, i) - saved
