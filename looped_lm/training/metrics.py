"""The token-weighted mean loss, as a torchmetrics metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric


class TokenLoss(Metric):
    """Mean loss in nats per token over all tokens of all ranks; sums are kept in float64."""

    full_state_update = False
    nats: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.set_dtype(torch.float64)
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Module:
        """Move with the module but keep the dtype: `module.to(bfloat16)` would round the loss."""
        return super()._apply(lambda t: fn(t).to(t.dtype), exclude_state)

    def update(self, loss: Tensor, tokens: int) -> None:
        """Add a batch of `tokens` tokens with mean loss `loss` (nats/token)."""
        self.nats += loss.detach().double() * tokens
        self.tokens += tokens

    def compute(self) -> tuple[Tensor, Tensor]:
        """Mean loss (nats/token) and the number of tokens it was taken over."""
        return self.nats / self.tokens, self.tokens
