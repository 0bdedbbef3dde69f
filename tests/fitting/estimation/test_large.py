"""Very many runs: the search on a part of them and one-step resamples give what the long way gives."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

import fitting.estimation.fits as fits
import fitting.estimation.identification as identification
import fitting.estimation.resampling as resampling
from fitting import JointLaw, fit, load_grid
from fitting.data.runs import Runs
from fitting.estimation.resampling import bootstrap, draw_counts, one_step, refit, refit_many

GRID = load_grid()


def noisy(count: int) -> Runs:
    """Runs of the grid's design with tokens of their own, noise of heavy tails, and cells with offsets."""
    law, rng = fit(GRID, starts=60), np.random.default_rng(0)
    rows = rng.integers(0, len(GRID), count)
    runs = GRID.take(rows)
    runs = replace(runs, tokens=runs.tokens * rng.uniform(0.98, 1.02, count))
    clean = law.law.log_loss_and_gradient(law.theta[None], law.law.inputs(runs))[0][0]
    offsets = 0.0026 * rng.standard_normal(GRID.cell_count)[GRID.cell[rows]]
    return runs.with_loss(np.exp(clean + offsets + 0.003 * rng.standard_t(4, count)))


@pytest.fixture(scope="module")
def many() -> Runs:
    """Six thousand noisy runs of the grid's design, told apart by their seeds."""
    law, rng = fit(GRID, starts=60), np.random.default_rng(0)
    rows = rng.integers(0, len(GRID), 6000)
    runs = GRID.take(rows)
    clean = (np.log(GRID.val_loss) - law.log_residuals)[rows]
    return runs.with_loss(np.exp(clean + 0.001 * rng.standard_normal(len(runs))))


def test_the_optimum_is_that_of_a_search_on_all(many: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    part = fit(many, starts=60)
    monkeypatch.setattr(fits, "LARGE", 10**9)
    whole = fit(many, starts=60)
    assert part.trusted and part.check is not None and part.check.solver.endswith("on 1500 runs")
    assert np.allclose(part.theta, whole.theta, rtol=1e-6)
    assert part.objective == pytest.approx(whole.objective, rel=1e-9)


def test_one_step_resamples_spread_as_refits(many: Runs) -> None:
    result = fit(many, starts=60)
    law, x, observed = JointLaw(), JointLaw().inputs(many), np.log(many.val_loss)
    counts = draw_counts(many.cell_count, 60, np.random.default_rng(1))
    stepped = one_step(result, x, observed, many.cell, counts)
    refitted = refit(law, x, observed, result.theta, counts[:, many.cell], 0)
    assert np.corrcoef(stepped[:, 5], refitted[:, 5])[0, 1] > 0.97
    assert stepped[:, 5].std() == pytest.approx(refitted[:, 5].std(), rel=0.15)
    # All runs as they are: no step.
    ones = one_step(result, x, observed, many.cell, np.ones((1, many.cell_count)))
    assert np.allclose(ones[0], result.theta, rtol=1e-5)


def test_resamples_of_few_cells_end_where_refits_do(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = noisy(8000)
    result = fit(runs, starts=60)
    x, observed = result.law.inputs(runs), np.log(runs.val_loss)
    counts = draw_counts(runs.cell_count, 40, np.random.default_rng(1))
    refitted = refit(result.law, x, observed, result.theta, counts[:, runs.cell], 0)[:, 5]
    monkeypatch.setattr(resampling, "_AT_ONCE", 7 * len(runs))
    near = refit_many(result, x, observed, runs.cell, counts)[:, 5]
    assert np.abs(near - refitted).max() < 0.05 * refitted.std()
    assert near.std() == pytest.approx(refitted.std(), rel=0.01)
    monkeypatch.setattr(resampling, "_MANY_BLOCKS", 10)
    stepped = one_step(result, x, observed, runs.cell, counts)
    assert np.array_equal(refit_many(result, x, observed, runs.cell, counts), stepped)


@pytest.mark.slow
def test_a_hundred_thousand_runs_take_under_a_minute_on_two_cores() -> None:
    """The time of both cores, whatever else runs on them."""
    runs = noisy(100_000)
    began = time.process_time()
    found = bootstrap(runs, fit(runs), resamples=1000, names=["phi"])
    assert time.process_time() - began < 120
    quoted = found.recommended("phi")
    assert found.trusted and quoted is not None and quoted.low < 0.433 < quoted.high


def test_leaving_one_of_many_out_is_what_a_refit_gives(many: Runs) -> None:
    result = fit(many, starts=60)
    x, observed = result.law.inputs(many), np.log(many.val_loss)
    quick = identification._without_each(result, x, observed, None)[:, 5]
    worst = np.argsort(-np.abs(quick - result["phi"]))[:3]
    for row in worst:
        weights = np.ones((1, len(many)))
        weights[0, row] = 0.0
        expected = refit(result.law, x, observed, result.theta, weights, 0)[0, 5]
        assert quick[row] - result["phi"] == pytest.approx(expected - result["phi"], rel=0.25, abs=1e-6)


def test_an_analysis_of_many_runs_leaves_out_what_is_not_feasible(many: Runs) -> None:
    found = resampling.bootstrap(many, fit(many, starts=60), resamples=60, names=["phi"])
    methods = [interval.method for interval in found.intervals["phi"]]
    assert methods == ["block bootstrap, widened", "block bootstrap", "run-level bootstrap"]
