"""The paper's layer and its parts: rotary embedding, attention, MLP.

B batch rows, T sequence length, d = d_model, h query heads, g key/value heads, c = head_dim.
Source: arXiv 2604.21106, section 3; no biases, no dropout, RMSNorm eps 1e-6.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped_lm.loop.component import ModelComponent
from looped_lm.loop.layer import KeyValueSlot, Layer, LayerSizes, LoopContext

NORM_EPS = 1e-6


def count(module: nn.Module) -> int:
    """Number of parameters of a module; shared ones count once."""
    return sum(p.numel() for p in module.parameters())


def rms_norm(d_model: int) -> nn.RMSNorm:
    """RMSNorm with a learnable scale, as used everywhere in the model."""
    return nn.RMSNorm(d_model, eps=NORM_EPS)


class Rotary(nn.Module):
    """Cosine and sine tables (T, c/2) of the rotary embedding, base 10,000; longer sequences extend them.

    `bf16_tables` rounds them to bfloat16, as checkpoints of the paper's public code expect.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, seq_len: int, bf16_tables: bool = False) -> None:
        super().__init__()
        self.head_dim, self.bf16_tables = head_dim, bf16_tables
        cos, sin = self._tables(seq_len, torch.get_default_dtype(), None)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, seq_len: int, dtype: torch.dtype, device: torch.device | None) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device=device), 10_000.0**-exponents)
        cos, sin = angles.cos(), angles.sin()
        if self.bf16_tables:
            cos, sin = cos.to(torch.bfloat16), sin.to(torch.bfloat16)
        return cos.to(dtype), sin.to(dtype)

    def forward(self, seq_len: int) -> tuple[Tensor, Tensor]:
        if seq_len > self.cos.shape[0]:
            # Tables made in inference mode could not be used in training later.
            with torch.inference_mode(False):
                self.cos, self.sin = self._tables(seq_len, self.cos.dtype, self.cos.device)
        return self.cos[:seq_len], self.sin[:seq_len]

    def at(self, positions: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """Tables (B,1,T,c/2) for tokens at positions (B,T) below `seq_len`."""
        cos, sin = self(seq_len)
        return cos[positions][:, None], sin[positions][:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dimension of x (B,h,T,c) by tables (T,c/2) or (B,1,T,c/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary embedding, then RMSNorm without scale on queries and keys."""

    def __init__(self, d_model: int, head_dim: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.n_heads, self.n_kv_heads = d_model // head_dim, n_kv_heads
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.v = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None = None) -> Tensor:
        # Queries first: the order in which gradients of x are summed follows from it.
        q = self.queries(x, context)
        return self.attend(q, *self.keys_values(x, context, cache))

    def queries(self, x: Tensor, context: LoopContext) -> Tensor:
        """Queries (B,h,T,c) of x (B,T,d)."""
        q = self.q(x).view(*x.shape[:2], self.n_heads, self.head_dim).transpose(1, 2)
        return F.rms_norm(rotate(q, context.cos, context.sin), (self.head_dim,), eps=NORM_EPS)

    def keys_values(
        self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (B,g,S,c) of x (B,T,d) after those in the cache, and the mask (None: causal)."""
        b, t, _ = x.shape
        k = self.k(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        # Mixed precision leaves the norms in fp32; attention needs a single dtype.
        k = F.rms_norm(rotate(k, context.cos, context.sin), (self.head_dim,), eps=NORM_EPS).to(v.dtype)
        return (k, v, context.mask) if cache is None else cache.extend(self, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Output (B,T,d) for queries (B,h,T,c) over keys and values (B,g,S,c); without a mask causal."""
        y = F.scaled_dot_product_attention(
            q.to(v.dtype),
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.n_kv_heads != self.n_heads,
        )
        return self.out(y.transpose(1, 2).flatten(2))

    def flops_per_key(self) -> int:
        """Forward FLOPs per token and key of QKᵀ and of the weighted sum of values."""
        return 2 * 2 * self.n_heads * self.head_dim


class MLP(nn.Module):
    """d -> hidden -> d with relu(x)²; hidden is 4d in the paper."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.fc_in = nn.Linear(d_model, hidden, bias=False)
        self.fc_out = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_out(F.relu(self.fc_in(x)).square())


class PreNormLayer(Layer):
    """x + Attn(norm(x)), then x + MLP(norm(x)); each sum has its own residual.

    A subclass may put other modules in the place of `attn` and `mlp`, which are made by `attention` and `feed_forward`.
    """

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.norm_attn = rms_norm(sizes.d_model)
        self.attn = self.attention(sizes)
        self.norm_mlp = rms_norm(sizes.d_model)
        self.mlp = self.feed_forward(sizes)
        self.residual_attn, self.residual_mlp = sizes.residual(), sizes.residual()
        # Uniform(-a, a) with a = sqrt(3 / fan_in): standard deviation 1/sqrt(fan_in).
        for module in (*self.attn.modules(), *self.mlp.modules()):
            if isinstance(module, nn.Linear):
                bound = math.sqrt(3.0 / module.in_features)
                nn.init.uniform_(module.weight, -bound, bound)

    def attention(self, sizes: LayerSizes) -> Attention:
        """The module `attn`, whose matrices the constructor initialises."""
        return Attention(sizes.d_model, sizes.head_dim, sizes.n_kv_heads)

    def feed_forward(self, sizes: LayerSizes) -> nn.Module:
        """The module `mlp`, whose matrices the constructor initialises."""
        return MLP(sizes.d_model, 4 * sizes.d_model)

    def forward(
        self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None = None
    ) -> Tensor | tuple[Tensor, Any]:
        x = self.residual_attn(x, self.attn(self.norm_attn(x), context, cache))
        return self.residual_mlp(x, self.mlp(self.norm_mlp(x)))

    def flops_per_token(self, seq_len: float = 0.0, i: int = 0) -> float:
        """2 per parameter, what components inside say of theirs, and attention over `seq_len` keys."""
        parts = [m for m in self.modules() if isinstance(m, ModelComponent) and m is not self]
        weights = count(self) - sum(map(count, parts))
        attention = sum(m.flops_per_key() for m in self.modules() if isinstance(m, Attention)) * seq_len
        return 2 * weights + attention + sum(m.flops_per_token() for m in parts)
