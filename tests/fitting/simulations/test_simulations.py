"""The scripts here run, on few grids."""

from __future__ import annotations

import pytest

from tests.fitting.simulations import intervals, statuses

pytestmark = pytest.mark.slow


def test_intervals_cover() -> None:
    true, half, quoted, _ = intervals.coverage("nano, quiet", grids=40)
    assert half == pytest.approx(true, rel=0.6) and quoted >= 0.85


def test_narrow_designs_are_trusted_and_wide_ones_doubted() -> None:
    assert statuses.doubted(*statuses.NARROW[1], grids=20)["ok"] >= 18
    assert statuses.doubted(*statuses.WIDE[1], grids=20)["ok"] <= 2
