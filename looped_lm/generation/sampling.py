"""How the next token is chosen from logits (B,V)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from looped_lm.common.errors import UserError

#: Differences of logits divided by this stay finite in fp32, and a lower temperature would not differ from greedy.
_COLDEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """Temperature, then top-k, then top-p, in the customary order.

    Args:
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample among this many most likely tokens; None: all.
        top_p: sample among the fewest tokens that together have this probability; None: all.
        seed: seed of the draws. Every row has its own stream of random numbers, whatever the other rows are.

    Raises:
        UserError: a value is out of range, or top_k or top_p is given at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number.")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; it must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}; it must be between 0 and 2^32 - 1.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise UserError(
                "top_k and top_p have no effect at temperature 0: give a temperature, such as 1, too."
            )

    def generators(self, rows: int, device: torch.device) -> list[torch.Generator]:
        """One generator per row."""
        return [torch.Generator(device).manual_seed(self.seed * 2**31 + row) for row in range(rows)]

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution (B,V) to draw from at a temperature above 0."""
        # Relative to the largest, so that a tiny temperature does not overflow.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(self.temperature, _COLDEST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kept = logits.topk(self.top_k, dim=-1)
            logits = torch.full_like(logits, -math.inf).scatter_(-1, kept.indices, kept.values)
        p = logits.softmax(dim=-1)
        if self.top_p is not None:
            ordered, order = p.sort(dim=-1, descending=True, stable=True)
            # A token stays if those before it do not reach top_p yet, so the first always stays.
            outside = ordered.cumsum(dim=-1) - ordered >= self.top_p
            p = p.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), 0.0)
            p = p / p.sum(dim=-1, keepdim=True)
        return p

    def choose(self, logits: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Token ids (B,) drawn from logits (B,V).

        Raises:
            UserError: the logits are not finite.
        """
        if not bool(logits.isfinite().all()):
            raise UserError(
                "The model's logits are not finite: its weights contain NaN or infinity, or lead to an overflow. Use a "
                "checkpoint from before its training diverged."
            )
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        p = self.probabilities(logits)
        drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(p, generators, strict=True)]
        return torch.cat(drawn)
