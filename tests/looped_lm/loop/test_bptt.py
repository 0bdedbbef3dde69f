"""Truncation windows."""

from __future__ import annotations

import pytest

from looped_lm import FullBPTT, TruncatedBPTT


@pytest.mark.parametrize(
    "window, r, kept", [(None, 4, [2, 3]), (None, 5, [2, 3, 4]), (None, 1, [0]), (1, 3, [2]), (9, 2, [0, 1])]
)
def test_truncated_keeps_the_last_recurrences(window: int | None, r: int, kept: list[int]) -> None:
    assert [i for i in range(r) if TruncatedBPTT(window).keeps_grad(i, r)] == kept


def test_full_keeps_all() -> None:
    assert all(FullBPTT().keeps_grad(i, 8) for i in range(8))


def test_a_window_without_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        TruncatedBPTT(0)
