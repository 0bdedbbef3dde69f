"""The looped transformer's loss as straight-line functions on a dictionary of tensors of any float dtype.

Shapes: B batch rows, T positions, d model width, h head_dim, H query heads, G key/value heads, V vocabulary,
V_pad padded vocabulary, r recurrences, K lanes. Matrices are (out, in), applied as x @ W.T.

weights = {
    "embedding": (V_pad, d), "head": (V_pad, d),
    "norm_emb": (d,), "norm_recur": (d,), "norm_final": (d,),
    "prelude": [layer, ...], "block": [layer, ...], "coda": [layer, ...],  # lists, possibly empty
    "inject": (d, 2d) or None,                                             # columns: first e, then s
    "lane_alpha": (r, K), "lane_mixing": (r, K, K), "lane_beta": (r, K),   # absent or None: one state
}
layer = {
    "q": (H·h, d), "k": (G·h, d), "v": (G·h, d), "out": (d, H·h), "mlp_in": (4d, d), "mlp_out": (d, 4d),
    "norm_attn": (d,), "norm_mlp": (d,),
}
Head j owns rows j·h .. (j+1)·h - 1 of its projection.
Key/value head j serves query heads j·g .. (j+1)·g - 1, with g = H/G.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Layer = dict[str, Tensor]
Weights = dict[str, Any]
Injection = Callable[[Tensor, Tensor, Tensor | None], Tensor]

EPS = 1e-6
ROPE_BASE = 10_000.0


# --- what the recurrent block reads: (e, s, W) -> u, all (B, T, d) but W


def linear(e: Tensor, s: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None
    return torch.cat([e, s], dim=-1) @ weight.T


def additive(e: Tensor, s: Tensor, weight: Tensor | None) -> Tensor:
    return s + e


def passthrough(e: Tensor, s: Tensor, weight: Tensor | None) -> Tensor:
    return s


def first_state(e: Tensor, injection: Injection) -> Tensor:
    """s_0: zero for the additive injection (or e would count twice), e for the other two."""
    return torch.zeros_like(e) if injection is additive else e


# --- layers


def rms_norm(x: Tensor, scale: Tensor | None = None) -> Tensor:
    normed = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + EPS)
    return normed if scale is None else normed * scale


def rotate(x: Tensor, bf16_tables: bool = False) -> Tensor:
    """Rotary embedding of one head, x (B, T, h).

    The pair (i, i + h/2) at position t is turned clockwise by the angle t·base^(-2i/h).
    """
    length, width = x.shape[-2], x.shape[-1]
    half = width // 2
    i = torch.arange(half, dtype=torch.float64)
    position = torch.arange(length, dtype=torch.float64)
    angle = position[:, None] * (ROPE_BASE ** (-2.0 * i / width))[None, :]
    cos, sin = torch.cos(angle), torch.sin(angle)
    if bf16_tables:
        cos, sin = cos.to(torch.float32).to(torch.bfloat16), sin.to(torch.float32).to(torch.bfloat16)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * cos + x2 * sin, -x1 * sin + x2 * cos], dim=-1)


def attention(x: Tensor, layer: Layer, head_dim: int, bf16_tables: bool = False) -> Tensor:
    """Full causal self-attention, one query head at a time."""
    length = x.shape[1]
    n_heads = layer["q"].shape[0] // head_dim
    n_kv_heads = layer["k"].shape[0] // head_dim
    group = n_heads // n_kv_heads
    queries, keys, values = x @ layer["q"].T, x @ layer["k"].T, x @ layer["v"].T
    future = (
        torch.arange(length)[None, :] > torch.arange(length)[:, None]
    )  # (T, T), row = query, column = key

    mixed = []
    for j in range(n_heads):
        own = slice(j * head_dim, (j + 1) * head_dim)
        shared = slice((j // group) * head_dim, (j // group + 1) * head_dim)
        q = rms_norm(rotate(queries[..., own], bf16_tables))
        k = rms_norm(rotate(keys[..., shared], bf16_tables))
        scores = (q @ k.transpose(1, 2)) / head_dim**0.5  # (B, T, T)
        scores = scores.masked_fill(future, float("-inf"))
        unnormalised = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        probabilities = unnormalised / unnormalised.sum(dim=-1, keepdim=True)
        mixed.append(probabilities @ values[..., shared])
    return torch.cat(mixed, dim=-1) @ layer["out"].T


def mlp(x: Tensor, layer: Layer) -> Tensor:
    hidden = torch.relu(x @ layer["mlp_in"].T)
    return (hidden * hidden) @ layer["mlp_out"].T


def layers(x: Tensor, stack: Sequence[Layer], head_dim: int, bf16_tables: bool = False) -> Tensor:
    for layer in stack:
        x = x + attention(rms_norm(x, layer["norm_attn"]), layer, head_dim, bf16_tables)
        x = x + mlp(rms_norm(x, layer["norm_mlp"]), layer)
    return x


# --- the loop


def loop(
    e: Tensor,
    weights: Weights,
    head_dim: int,
    num_recurrences: int,
    injection: Injection,
    window: int | None = None,
    bf16_tables: bool = False,
) -> Tensor:
    """What the coda reads, (B, T, d), from the prelude output e.

    window = number of last recurrences that keep gradients, None for all. The state (every lane of it) is
    cut after each earlier recurrence, so it enters the first kept one as a constant; e is never cut.
    """
    inject_weight = weights.get("inject")
    alpha: Any = weights.get("lane_alpha")
    mixing: Any = weights.get("lane_mixing")
    beta: Any = weights.get("lane_beta")
    n_lanes = 1 if alpha is None else alpha.shape[1]
    kept = num_recurrences if window is None else window

    start = first_state(e, injection)
    lanes = [start for _ in range(n_lanes)]
    for i in range(num_recurrences):
        if alpha is None:
            s = lanes[0]
        else:
            s = torch.zeros_like(e)
            for k in range(n_lanes):
                s = s + alpha[i, k] * lanes[k]

        u = injection(e, s, inject_weight)
        y = rms_norm(layers(u, weights["block"], head_dim, bf16_tables), weights["norm_recur"])

        if alpha is None:
            lanes = [y]
        else:
            written = []
            for j in range(n_lanes):
                lane = beta[i, j] * y
                for k in range(n_lanes):
                    lane = lane + mixing[i, j, k] * lanes[k]
                written.append(lane)
            lanes = written

        if i < num_recurrences - kept:
            lanes = [lane.detach() for lane in lanes]

    total = lanes[0]
    for lane in lanes[1:]:
        total = total + lane
    return total


def forward(
    weights: Weights,
    tokens: Tensor,
    targets: Tensor,
    *,
    head_dim: int,
    num_recurrences: int,
    injection: Injection,
    vocab_size: int,
    window: int | None = None,
    softcap: float = 15.0,
    bf16_tables: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mean cross entropy in nats over all B·T positions, and the soft-capped logits (B, T, V).

    The logits keep the dtype of the weights: casting float64 down to fp32 would only lose digits.
    """
    x = rms_norm(weights["embedding"][tokens], weights["norm_emb"])
    e = layers(x, weights["prelude"], head_dim, bf16_tables)
    x = loop(e, weights, head_dim, num_recurrences, injection, window, bf16_tables)
    x = rms_norm(layers(x, weights["coda"], head_dim, bf16_tables), weights["norm_final"])

    logits = (x @ weights["head"].T)[..., :vocab_size]
    logits = softcap * torch.tanh(logits / softcap)

    top = logits.amax(dim=-1, keepdim=True)
    log_normaliser = top.squeeze(-1) + torch.log(torch.exp(logits - top).sum(dim=-1))  # (B, T)
    of_target = torch.gather(logits, -1, targets.unsqueeze(-1)).squeeze(-1)
    return (log_normaliser - of_target).mean(), logits
