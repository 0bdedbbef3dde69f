"""Which recurrences keep gradients. One predicate serves the training graph and the FLOPs count.

Source: arXiv 2604.21106 (truncated backpropagation through the loop, window k = ceil(r/2)).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from looped_lm.common.errors import UserError
from looped_lm.loop.component import Component


class BPTTStrategy(Component, ABC):
    """Decides for each recurrence whether gradients pass through it."""

    @abstractmethod
    def keeps_grad(self, i: int, num_recurrences: int) -> bool:
        """Whether recurrence `i` of `num_recurrences` keeps gradients; the others run forward only."""


class FullBPTT(BPTTStrategy):
    """Gradients through every recurrence."""

    def keeps_grad(self, i: int, num_recurrences: int) -> bool:
        return True


class TruncatedBPTT(BPTTStrategy):
    """Gradients through the last `window` recurrences.

    Args:
        window: number of recurrences that keep gradients; None means ceil(r/2).

    Raises:
        UserError: a window below 1.
    """

    def __init__(self, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise UserError(f"window is {window}; the last recurrence must keep gradients (window >= 1).")
        self.window = window

    def keeps_grad(self, i: int, num_recurrences: int) -> bool:
        window = (num_recurrences + 1) // 2 if self.window is None else self.window
        return i >= num_recurrences - window
