"""The scripts here run, on few grids."""

from __future__ import annotations

import pytest

from tests.fitting.simulations import comparison, intervals, matching, statuses

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


def test_matching_covers_and_finds_a_drift_and_seldom_contradicts_a_law_that_holds() -> None:
    holds = matching.scored(matching.CASES["the law holds"], matching.NOISES["quiet"], grids=20)
    assert holds.covered >= 0.9 * holds.pairs and holds.pooled >= 16 and holds.doubted <= 2
    drifts = matching.scored(matching.CASES["phi rises by .3"], matching.NOISES["quiet"], grids=20)
    assert drifts.covered >= 0.9 * drifts.pairs and drifts.pooled >= 16 and drifts.uneven >= 16
