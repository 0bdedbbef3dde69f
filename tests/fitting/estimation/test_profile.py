"""The profile likelihood: zero at the optimum, minimised over the others, and cut where it says."""

import numpy as np
import pytest
from scipy.optimize import brentq

from fitting.estimation.fits import fit
from fitting.estimation.objective import normal_psi_moments, robust_scale
from fitting.estimation.profile import CUT, profile, profile_curve, profile_interval
from fitting.laws import FixedPower, JointLaw
from fitting.published import load_grid

GRID = load_grid()
OBSERVED = np.log(GRID.val_loss)


@pytest.fixture(scope="module")
def result():
    return fit(GRID, starts=200)


def test_the_profile_is_the_best_objective_at_each_phi(result):
    x = result.law.inputs(GRID)
    curve = profile(result, x, OBSERVED, "phi", np.array([result["phi"], 0.3, 0.6]))
    scale = robust_scale(result.log_residuals) * np.sqrt(116 / 110)
    slope, square = normal_psi_moments(scale)
    assert curve.statistic[0] == pytest.approx(0, abs=1e-6)
    for phi, statistic in zip((0.3, 0.6), curve.statistic[1:], strict=True):
        held = fit(GRID, JointLaw(FixedPower(phi)), starts=100)
        assert statistic == pytest.approx(2 * (held.objective - result.objective) * slope / square, rel=1e-6)


def test_the_interval_ends_where_the_statistic_passes_the_cut(result):
    x = result.law.inputs(GRID)
    interval = profile_interval(result, x, OBSERVED, "phi")
    excess = lambda v: profile(result, x, OBSERVED, "phi", np.array([v])).statistic[0] - CUT  # noqa: E731
    assert interval.low == pytest.approx(brentq(excess, 0.3, result["phi"]), abs=2e-4)
    assert interval.high == pytest.approx(brentq(excess, result["phi"], 0.6), abs=2e-4)
    assert "independent runs" in interval.assumes


def test_intervals_of_amplitudes_are_in_reported_values(result):
    interval = profile_interval(result, result.law.inputs(GRID), OBSERVED, "A")
    assert 5 < interval.low < result["A"] < interval.high < 200


def test_the_curve_reaches_past_the_cut_on_both_sides(result):
    curve = profile_curve(result, result.law.inputs(GRID), OBSERVED, "beta")
    assert curve.statistic[0] > CUT and curve.statistic[-1] > CUT and (np.diff(curve.theta) >= 0).all()
