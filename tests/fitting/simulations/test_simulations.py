"""The scripts here run, on few grids."""

from __future__ import annotations

import pytest

from tests.fitting.simulations import comparison, intervals, statuses

pytestmark = pytest.mark.slow


def test_intervals_cover() -> None:
    true, half, quoted, _ = intervals.coverage("nano, quiet", grids=40)
    assert half == pytest.approx(true, rel=0.6) and quoted >= 0.85


def test_narrow_designs_are_trusted_and_wide_ones_doubted() -> None:
    assert statuses.doubted(*statuses.NARROW[1], grids=20)["ok"] >= 18
    assert statuses.doubted(*statuses.WIDE[1], grids=20)["ok"] <= 2


def test_true_nulls_are_seldom_given_a_change_and_true_changes_are_found() -> None:
    arms = comparison.Arms.of(*comparison.paper_arms(), comparison.PAPER)
    of_paper = arms, comparison.PAPER_VALUES, comparison.PAPER_NOISE
    found = {
        truth: [new for new, _ in comparison.verdicts(*of_paper, truth, grids=30, seed=11)]
        for truth in comparison.RIGHT
    }
    assert found["no change"].count("neither") >= 26
    assert found["delta phi .1"].count("neither") <= 3 and found["shift .03"].count("neither") <= 1
    assert found["delta phi .1"].count("delta phi") >= 12 and found["shift .03"].count("shift") >= 25


def test_few_true_powers_are_given_a_rival() -> None:
    runs, _ = comparison.nano_arms()
    values, noise = comparison.NANO_VALUES, comparison.NANO_NOISE
    called, by_aicc = comparison.spurious_rivals(runs, values, noise, grids=30, seed=11)
    assert called <= 5 < by_aicc
