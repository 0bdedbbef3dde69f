"""SwiGLU in the place of relu²: a layer whose MLP is gated.

Source: GLU variants (arXiv 2002.05202), as in most open language models of today.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from looped_lm.loop.blocks import PreNormLayer
from looped_lm.loop.layer import LayerSizes


class SwiGLU(nn.Module):
    """W_out (silu(W_gate x) ⊙ W_in x), without biases."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, hidden, bias=False)
        self.fc_in = nn.Linear(d_model, hidden, bias=False)
        self.fc_out = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(F.silu(self.gate(x)) * self.fc_in(x))


class SwiGLULayer(PreNormLayer):
    """The paper's layer with SwiGLU of hidden width 8d/3, rounded up to a multiple of 8.

    Its three matrices have about as many parameters as the two of relu² with 4d.
    """

    def feed_forward(self, sizes: LayerSizes) -> nn.Module:
        return SwiGLU(sizes.d_model, -(-sizes.d_model // 3) * 8)
