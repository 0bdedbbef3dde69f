"""Early exit: a row leaves the loop when its state has stopped changing.

B batch rows, d = d_model, V vocabulary. This is for decoding only, where each row has one token. A row's decision never
depends on the other rows. Source of both criteria: arXiv 2502.05171, section on zero-shot adaptive compute.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from looped_lm.common.errors import UserError


class ExitRule(ABC):
    """Says when the state has settled: a measure of change between two recurrences falls below a threshold.

    Raises:
        UserError: the threshold is not positive and finite.
    """

    def __init__(self, threshold: float) -> None:
        if not (math.isfinite(threshold) and threshold > 0):
            raise UserError(f"The exit threshold is {threshold}; it must be positive and finite.")
        self.threshold = threshold

    @abstractmethod
    def look(self, state: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """What to compare, from the state (B,1,d) that the coda would read; `logits` runs coda and head on it."""

    @abstractmethod
    def change(self, before: Tensor, after: Tensor) -> Tensor:
        """Change (B,) between what `look` saw after two recurrences."""


class RelativeChange(ExitRule):
    """‖s_i - s_{i-1}‖ / ‖s_i‖ of the state that the coda would read.

    A run logs something else as `loop/change_i`: that is relative to ‖s_{i-1}‖, over all lanes and over training rows.
    """

    def look(self, state: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        return state.flatten(1).float()

    def change(self, before: Tensor, after: Tensor) -> Tensor:
        return (after - before).norm(dim=-1) / after.norm(dim=-1).clamp_min(1e-10)


class KLChange(ExitRule):
    """KL(p_i ‖ p_{i-1}) in nats between the next-token distributions. It runs the coda after every recurrence."""

    def look(self, state: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        return logits(state).flatten(1).log_softmax(dim=-1)

    def change(self, before: Tensor, after: Tensor) -> Tensor:
        return (after.exp() * (after - before)).sum(dim=-1)


class EarlyExit:
    """Which rows are still in the loop during a pass, and the states of those that have left.

    Args:
        rule: says when a row leaves.
        live: bool (B,); rows that are not live leave after the first recurrence.
        on_exit: called as `on_exit(leaving, i)` with the rows, bool (B,), that leave after recurrence `i`.
    """

    def __init__(self, rule: ExitRule, live: Tensor, on_exit: Callable[[Tensor, int], None]) -> None:
        self.rule, self._live, self._on_exit = rule, live, on_exit
        #: Rows that still run, bool (B,), and the recurrences (B,) that each row has run.
        self.active = torch.ones_like(live)
        self.used = torch.zeros_like(live, dtype=torch.int64)
        self.some_left = False
        #: What the coda reads (B,1,d): the state with which each row left, or its newest one.
        self.output: Tensor
        self._before: Tensor

    def settled(self, i: int, state: Tensor, logits: Callable[[Tensor], Tensor]) -> bool:
        """Take note of the state (B,1,d) after recurrence `i`; returns whether all rows have left."""
        self.output = state if i == 0 else torch.where(self.active[:, None, None], state, self.output)
        self.used += self.active
        seen = self.rule.look(state, logits)
        leaving = self.active & ~self._live
        if i > 0:
            leaving |= self.active & (self.rule.change(self._before, seen) < self.rule.threshold)
        self._before = seen
        if bool(leaving.any()):
            self._on_exit(leaving, i)
            self.active, self.some_left = self.active & ~leaving, True
        return not bool(self.active.any())
