"""Forecasts and equivalent sizes of the shipped grid's fit."""

import dataclasses

import numpy as np
import pytest

from fitting.data.splits import REGRESSED
from fitting.errors import FitError
from fitting.estimation.fits import fit
from fitting.laws import JointLaw
from fitting.published import load_grid
from fitting.report.report import text
from fitting.studies.prediction import draw, equivalents, forecast

GRID = load_grid()


@pytest.fixture(scope="module")
def result():
    return fit(GRID, starts=200)


@pytest.fixture(scope="module")
def drawn(result):
    return draw(GRID, result, 100, 0)


def test_the_papers_example_of_equivalent_sizes():
    published = fit(GRID, JointLaw(split=REGRESSED), starts=200)
    rows = {row.r: row for row in equivalents(GRID, published, 1e9)}
    assert rows[4].unique == pytest.approx(410e6, rel=0.01)
    assert rows[4].effective == pytest.approx(580e6, rel=0.01)
    assert rows[1].effective == pytest.approx(1e9, rel=1e-3)


def test_forecasts_lie_on_the_frontier_and_carry_intervals(result, drawn):
    found = forecast(GRID, result, 1e19, drawn)
    assert found.best == 1 and [p.r for p in found.predictions] == [1, 2, 4, 8]
    for p, minimum in zip(found.predictions, (2.4014, 2.4312, 2.4582, 2.4950), strict=True):
        assert p.loss == pytest.approx(minimum, abs=0.012) and p.low < minimum < p.high and not p.note
    # three times the tokens' worth of forward FLOPs is the whole training cost
    assert 3 * found.predictions[0].forward_flops * found.predictions[0].tokens == pytest.approx(
        1e19, rel=1e-3
    )


def test_extrapolation_is_flagged_and_wider(result, drawn):
    inside, outside = (forecast(GRID, result, c, drawn).predictions[0] for c in (1e19, 1e22))
    assert "extrapolates" in outside.note and outside.high / outside.low > inside.high / inside.low


def test_an_inference_cap_binds_the_size(result, drawn):
    free, capped = (forecast(GRID, result, 1e19, drawn, cap) for cap in (None, 5e8))
    for wide, small in zip(free.predictions, capped.predictions, strict=True):
        assert small.forward_flops <= 5e8 * 1.001 < wide.forward_flops and small.loss > wide.loss
    nothing = forecast(GRID, result, 1e19, drawn, 1e3)
    assert nothing.best is None and len(nothing.refused) == 4 and "No r is allowed" in text(nothing)


def test_forward_flops_are_not_guessed_under_truncation(result, drawn):
    truncated = dataclasses.replace(GRID, bptt=np.where(GRID.r > 1, "truncated", "full").astype(object))
    found = forecast(truncated, result, 1e19, drawn, 5e8)
    assert [p.r for p in found.predictions] == [1] and "truncated" in found.refused[0][1]
    assert forecast(truncated, result, 1e19, drawn).predictions[1].forward_flops is None


def test_budgets_that_are_none_are_refused(result, drawn):
    with pytest.raises(FitError, match="positive"):
        forecast(GRID, result, -1.0, drawn)


def test_equivalents_out_of_reach_are_refused_or_flagged(result):
    for size, words in (
        (0.0, "Give a positive number"),
        (-1e9, "Give a positive number"),
        (float("nan"), "Give a positive number"),
        (1e3, "out of reach"),
        (1e15, "reach"),
    ):
        with pytest.raises(FitError, match=words):
            equivalents(GRID, result, size)
    assert all("outside the sampled widths" in row.note for row in equivalents(GRID, result, 5e9))
    assert all(row.note == "" for row in equivalents(GRID, result, 1e9))
