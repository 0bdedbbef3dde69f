"""Bootstraps: the published percentiles, equality with full searches, and what widening does."""

import numpy as np
import pytest

from fitting.data.splits import PAPER, REGRESSED
from fitting.errors import FitError
from fitting.estimation.fits import fit
from fitting.estimation.resampling import (
    bootstrap,
    draw_counts,
    percentile_interval,
    resample,
    widened,
)
from fitting.laws import JointLaw
from fitting.published import load_grid
from tests.support.full_search import refit_fully

GRID = load_grid()
OBSERVED = np.log(GRID.val_loss)


@pytest.fixture(scope="module")
def fitted():
    return {split: fit(GRID, JointLaw(split=split), starts=200) for split in (PAPER, REGRESSED)}


@pytest.mark.parametrize(
    ("split", "low", "high"),
    [pytest.param(PAPER, 0.393, 0.492, marks=pytest.mark.slow), (REGRESSED, 0.416, 0.515)],
    ids=["paper", "regressed"],
)
def test_block_percentiles_of_the_shipped_grid(fitted, split, low, high):
    result = fitted[split]
    drawn = resample(result, result.law.inputs(GRID), OBSERVED, GRID.cell, 2000, seed=0)
    block = percentile_interval(drawn.values("phi"), "block", "", 0)
    assert (block.low, block.high) == pytest.approx((low, high), abs=0.006)
    if split is REGRESSED:
        wide = widened(block, result["phi"], 24, 6)
        assert (wide.low, wide.high) == pytest.approx((0.409, 0.524), abs=0.006)


def test_resample_refits_equal_full_searches(fitted):
    result = fitted[PAPER]
    x = result.law.inputs(GRID)
    drawn = resample(result, x, OBSERVED, GRID.cell, 20, seed=3)
    full = refit_fully(result.law, x, OBSERVED, drawn.counts[:, GRID.cell], 100, seed=9)
    assert np.abs(full.best.theta[:, 5] - drawn.theta[:, 5]).max() < 1e-4


@pytest.mark.slow
def test_two_hundred_resample_refits_equal_searches_with_500_starts(fitted):
    result = fitted[PAPER]
    x = result.law.inputs(GRID)
    drawn = resample(result, x, OBSERVED, GRID.cell, 200, seed=0)
    full = refit_fully(result.law, x, OBSERVED, drawn.counts[:, GRID.cell], 500, seed=3)
    assert np.abs(full.best.theta[:, 5] - drawn.theta[:, 5]).max() < 1e-4


def test_blocks_are_drawn_whole_and_as_often_as_there_are_blocks():
    counts = draw_counts(24, 50, np.random.default_rng(0))
    assert counts.shape == (50, 24) and (counts.sum(axis=1) == 24).all() and counts.max() > 1


def test_widening_stretches_both_sides_around_the_estimate():
    plain = percentile_interval(np.linspace(0, 1, 1001), "m", "", 0)
    wide = widened(plain, 0.4, 24, 6)
    factor = np.sqrt(24 / 18)
    assert wide.low == pytest.approx(0.4 - factor * (0.4 - 0.025))
    assert wide.high == pytest.approx(0.4 + factor * (0.975 - 0.4))
    assert wide.recommended and not plain.recommended
    assert plain.at_or_below_zero == 1 and plain.at_or_above_one == 1


def test_four_intervals_stand_side_by_side_and_do_not_depend_on_workers(fitted):
    one, two = (bootstrap(GRID, fitted[PAPER], resamples=60, names=["phi"], workers=w) for w in (1, 3))
    assert one.intervals == two.intervals
    methods = [interval.method for interval in one.intervals["phi"]]
    assert methods == [
        "block bootstrap, widened",
        "block bootstrap",
        "run-level bootstrap",
        "profile likelihood",
    ]
    assert [i.recommended for i in one.intervals["phi"]] == [True, False, False, False]
    assert all(i.assumes for i in one.intervals["phi"]) and one.intervals["phi"][0].seed == 0
    assert bootstrap(GRID, fitted[PAPER], resamples=60, names=["phi"], seed=1).intervals != one.intervals


def test_a_bootstrap_that_cannot_work_is_refused(fitted):
    result = fitted[PAPER]
    x = result.law.inputs(GRID)
    with pytest.raises(FitError, match="6 blocks cannot carry"):
        resample(result, x, OBSERVED, np.arange(116) % 6, 100, 0)
    with pytest.raises(FitError, match="5 resamples"):
        resample(result, x, OBSERVED, GRID.cell, 5, 0)
