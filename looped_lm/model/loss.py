"""Cross entropy of the head without ever holding all logits.

N tokens, d = d_model, V vocabulary. Loss and exact gradients are computed together, one chunk of tokens at a time, so
that backward has nothing to recompute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Logits held at once, in elements: 64 MiB in fp32, a few times that with temporaries.
CHUNK_ELEMENTS = 2**24


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose logits are held at once."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


def softcapped_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    softcap: float,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Mean of w·(-log softmax(c·tanh(W h / c))[target]) over all tokens, in nats.

    h is `hidden` (N,d), W the first V rows of `weight` (V_pad,d), c the `softcap`; `targets` are int64 (N,). w are the
    `token_weights` (N,), 1 if None; the mean is over N tokens whatever their weights.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, vocab_size, softcap, token_weights)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        softcap: float,
        token_weights: Tensor | None,
    ) -> Tensor:
        wants_gradients = any(ctx.needs_input_grad)
        used = weight[:vocab_size]
        # At least fp32; a float64 model keeps its precision.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        grad_hidden = torch.empty_like(hidden) if wants_gradients else None
        grad_weight = torch.zeros_like(weight) if wants_gradients else None
        grad_tokens = None if token_weights is None else hidden.new_empty(len(hidden), dtype=wide)
        size = chunk_tokens(vocab_size)
        for start in range(0, len(hidden), size):
            h, y = hidden[start : start + size], targets[start : start + size]
            tanh = (h @ used.T).to(wide).div_(softcap).tanh_()
            logits = tanh * softcap
            log_z = logits.logsumexp(dim=-1, keepdim=True)
            losses = log_z - logits.gather(-1, y.unsqueeze(-1))
            w = None if token_weights is None else token_weights[start : start + size].to(wide).unsqueeze(-1)
            if w is not None and grad_tokens is not None:
                # d loss / d w is the token's own loss / N.
                grad_tokens[start : start + size] = losses.squeeze(-1) / len(hidden)
                losses = w * losses
            total += losses.sum()
            if grad_hidden is None or grad_weight is None:
                continue
            # d loss / d (W h) = (softmax - one-hot)·(1 - tanh²) / N
            g = logits.sub_(log_z).exp_()
            g.scatter_add_(-1, y.unsqueeze(-1), g.new_full((len(y), 1), -1.0))
            g.mul_(tanh.square_().neg_().add_(1.0)).div_(len(hidden))
            if w is not None:
                g.mul_(w)
            g = g.to(h.dtype)
            grad_hidden[start : start + size] = g @ used
            grad_weight[:vocab_size] += g.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight, grad_tokens)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, Tensor | None]:
        grad_hidden, grad_weight, grad_tokens = ctx.saved_tensors
        of_tokens = None if grad_tokens is None else grad_tokens * grad
        return grad_hidden * grad, grad_weight * grad, None, None, None, of_tokens
