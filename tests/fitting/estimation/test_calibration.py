"""Claims on simulated grids: the noise they are drawn with, and that few starts find what full searches find."""

import numpy as np
import pytest

from fitting.data.splits import PAPER
from fitting.errors import FitError
from fitting.estimation.calibration import (
    Claim,
    Fitted,
    check_grids,
    noise_left,
    objectives,
    share,
    simulated_gains,
)
from fitting.estimation.diagnostics import judge_rivals, rival_laws
from fitting.estimation.fits import fit_inputs
from fitting.estimation.noise import Noise, estimated
from fitting.laws import JointLaw
from fitting.published import load_grid

GRID = load_grid()
LAW = JointLaw()
X = LAW.inputs(GRID)
TRUTH = LAW.to_theta({"A": 28.13, "alpha": 0.1996, "B": 928.1, "beta": 0.3693, "E": 1.5697, "phi": 0.4332})
CLEAN, SLOPE = (part[0] for part in LAW.log_loss_and_gradient(TRUTH[None], X))
NOISE = Noise(0.003, 0.0026)


@pytest.mark.parametrize("true", [NOISE, Noise(0.012, 0.012), Noise(0.003, 0.0)])
def test_noise_is_estimated_without_bias(true):
    # What a least-squares fit leaves: the draws, less their projection on the derivatives.
    draws = true.draw(GRID.cell, 600, np.random.default_rng(0))
    left = draws - draws @ np.linalg.pinv(SLOPE) @ SLOPE
    found = [estimated(e, SLOPE, GRID.cell) for e in left]
    assert np.mean([noise.run**2 for noise in found]) == pytest.approx(true.run**2, rel=0.04)
    spread = np.mean([noise.cell**2 for noise in found])
    assert spread == pytest.approx(true.cell**2, rel=0.08, abs=0.1 * true.run**2)


def test_where_no_cell_has_two_runs_all_noise_is_of_runs():
    e = 0.01 * np.random.default_rng(1).standard_normal(len(X))
    noise = estimated(e, SLOPE, np.arange(len(X)))
    e = e - e @ np.linalg.pinv(SLOPE) @ SLOPE
    assert noise.cell == 0 and noise.run == pytest.approx(np.sqrt(e @ e / (116 - 6)))


def test_residuals_of_nothing_still_give_a_noise_that_can_be_drawn():
    assert noise_left(Fitted(LAW, TRUTH), X, CLEAN, GRID.cell).run > 0


def test_a_share_counts_the_runs_themselves():
    assert share(2.0, np.array([1.0, 2.0, 3.0])) == 0.75
    assert share(9.0, np.zeros(199)) == 1 / 200
    assert Claim("a", "b", 1.0, 0.049, 100, NOISE).holds and not Claim("a", "b", 1.0, 0.05, 100, NOISE).holds


def test_gains_are_those_of_full_searches_on_the_same_grids():
    runs = GRID.with_loss(np.exp(CLEAN + NOISE.draw(GRID.cell, 1, np.random.default_rng(2))[0]))
    laws = [law.bound_to(X) for law in rival_laws(PAPER)]
    on_runs = [Fitted(law, fit_inputs(law, X, runs, starts=100, seed=0, workers=1).theta) for law in laws]
    power, rivals = on_runs[0], on_runs[3:]
    found = simulated_gains(power, rivals, X, GRID.cell, NOISE, 20, seed=3)
    drawn = NOISE.draw(GRID.cell, 20, np.random.default_rng(3))
    mean = power.law.log_loss_and_gradient(power.theta[None], X)[0][0]
    for k in range(3):
        grid = GRID.with_loss(np.exp(mean + drawn[k]))
        lowest = [
            fit_inputs(one.law, X, grid, starts=150, seed=k, workers=1).objective for one in (power, *rivals)
        ]
        by_search = [np.log(lowest[0] / q) for q in lowest[1:]]
        assert found[:, k] == pytest.approx(by_search, abs=2e-4)


def test_too_few_grids_are_refused():
    check_grids(0)
    check_grids(20)
    with pytest.raises(FitError, match="19 simulated grids give no verdict at the level of 5%"):
        check_grids(19)


def test_the_strongest_of_several_rivals_has_a_larger_share_than_alone():
    laws = [law.bound_to(X) for law in rival_laws(PAPER)]
    observed = CLEAN + NOISE.draw(GRID.cell, 1, np.random.default_rng(5))[0]
    runs = GRID.with_loss(np.exp(observed))
    at = [Fitted(law, fit_inputs(law, X, runs, starts=60, seed=0, workers=1).theta) for law in laws]
    rivals = {i: one for i, one in enumerate(at) if i}
    found = judge_rivals(at[0], rivals, X, observed, GRID.cell, grids=60, seed=0)
    assert set(found) == set(range(1, 8))
    for i in (1, 2):  # phi = 0 and phi = 1: r^phi is the richer law, and far better
        claim = found[i]["claim"]
        assert claim.richer == LAW.name and claim.share == 1 / 61 and "share_of_any" not in found[i]
    strongest = min(range(3, 8), key=lambda i: found[i]["claim"].share)
    assert found[strongest]["share_of_any"] >= found[strongest]["claim"].share - 1 / 61
    lowest = [objectives(one.law, one.theta[None], X, observed)[0] for one in (at[0], at[6])]
    assert found[6]["claim"].gain == pytest.approx(np.log(lowest[0] / lowest[1]))
