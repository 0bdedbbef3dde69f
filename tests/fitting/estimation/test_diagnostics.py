"""Residuals, scatter, halves, held-out errors and AICc, on the shipped grid and on data of known make."""

import numpy as np
import pytest

from fitting.data.splits import PAPER, REGRESSED
from fitting.errors import FitError
from fitting.estimation.diagnostics import (
    aicc,
    compare_laws,
    halves,
    leave_out,
    residual_summary,
    rival_laws,
    scatter,
)
from fitting.estimation.fits import fit
from fitting.laws import DriftingPower, FixedPower, JointLaw, LogGrowth, Power
from fitting.published import load_grid

GRID = load_grid()


@pytest.fixture(scope="module")
def regressed():
    return fit(GRID, JointLaw(split=REGRESSED), starts=200)


def test_residuals_per_r_under_the_regressed_split(regressed):
    expected = [
        (-0.0007, 0.0184, 0.0086),
        (0.0042, 0.0359, 0.0109),
        (-0.0056, 0.0233, 0.0109),
        (0.0005, 0.0294, 0.0099),
    ]
    rows = residual_summary(regressed.residuals, GRID.r)
    assert [row.group for row in rows] == [1, 2, 4, 8]
    for row, values in zip(rows, expected, strict=True):
        assert (row.mean, row.max, row.rmse) == pytest.approx(values, abs=0.001)


def test_residuals_are_observed_minus_predicted(regressed):
    predicted = regressed.law.predict(regressed.theta[None], regressed.law.inputs(GRID))[0]
    assert regressed.residuals == pytest.approx(GRID.val_loss - predicted, abs=1e-12)


def test_scatter_finds_the_two_components():
    rng = np.random.default_rng(0)
    cell = np.repeat(np.arange(400), 5)
    draws = 0.003 * rng.standard_normal(2000) + 0.004 * rng.standard_normal(400)[cell]
    found = scatter(draws, cell, 0)
    assert found.run == pytest.approx(0.003, rel=0.05) and found.cell == pytest.approx(0.004, rel=0.1)
    none = scatter(0.003 * rng.standard_normal(2000), cell, 0)
    assert none.cell < 0.0008 and none.cell_share_of_mean == pytest.approx(1, abs=0.1)


def test_leaving_out_refits_the_rest(regressed):
    rows = leave_out(GRID, regressed, GRID.r)
    alone = fit(GRID.where("r!=8"), JointLaw(split=REGRESSED), starts=200)
    last = rows[-1]
    assert last.left_out == 8 and last.runs == 29
    assert last.parameters["phi"] == pytest.approx(alone["phi"], abs=1e-4)
    held = GRID.where("r=8")
    error = held.val_loss - alone.law.predict(alone.theta[None], alone.law.inputs(held))[0]
    assert last.held_out_rmse == pytest.approx(np.sqrt((error**2).mean()), abs=1e-5)


def test_halves_split_the_budgets_and_say_when_they_cannot_carry_the_law():
    low, high = halves(GRID, JointLaw(), starts=100, seed=0)
    assert (low.runs, high.runs) == (56, 60)
    assert low.parameters["phi"] == pytest.approx(0.4196, abs=0.004)
    few = halves(GRID.where("budget<=1e18"), JointLaw(), starts=60, seed=0)
    assert {row.status for row in few} == {"not identified"} and "one budget" in few[0].message


def test_aicc_by_hand(regressed):
    n, k = 116, 7
    by_hand = 2 * n * np.log(regressed.objective) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
    assert aicc(regressed) == pytest.approx(by_hand)


def test_the_true_form_wins_on_data_made_with_it():
    truth = JointLaw(LogGrowth())
    theta = truth.to_theta({"A": 28, "alpha": 0.2, "B": 900, "beta": 0.37, "E": 1.57, "c": 1.5})
    noise = np.exp(0.002 * np.random.default_rng(1).standard_normal(len(GRID)))
    runs = GRID.with_loss(truth.predict(theta[None], truth.inputs(GRID))[0] * noise)
    laws = [JointLaw(Power()), JointLaw(LogGrowth()), JointLaw(FixedPower(1))]
    rows = compare_laws(runs, laws, starts=100, seed=0)
    best = min(rows, key=lambda row: row.aicc_difference)
    assert best.law == "joint, m = 1 + c log r" and best.aicc_difference == 0
    assert best.held_out_by_r == min(row.held_out_by_r for row in rows)
    assert len(rival_laws(PAPER)) == 8


def test_scatter_needs_a_cell_with_two_runs():
    with pytest.raises(FitError, match="no cell of 9 has two runs"):
        scatter(np.linspace(-1, 1, 9), np.arange(9), 3)


def test_a_rival_that_cannot_be_fitted_is_a_row_with_its_reason():
    few = GRID.take(np.flatnonzero((GRID.r > 1) & (GRID.budget <= 1e18))[::4])
    rows = compare_laws(few, [JointLaw(FixedPower(1)), JointLaw(DriftingPower())], starts=40, seed=0)
    assert len(few) == 7 and rows[1].status == "not estimated" and "7 runs cannot" in rows[1].message
    assert rows[0].parameters and rows[1].parameters is None
