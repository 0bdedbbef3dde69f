"""The planner: Gauss-Newton against simulation, noise components, added runs."""

import numpy as np
import pytest

from fitting.errors import FitError
from fitting.estimation.objective import DELTA
from fitting.laws import JointLaw
from fitting.published import load_grid
from fitting.report.report import text
from fitting.studies.planner import Noise, plan, psi_moments
from fitting.studies.widths import Widths

GRID = load_grid()
LAW = JointLaw()
TRUTH = {"A": 28.13, "alpha": 0.1996, "B": 928.1, "beta": 0.3693, "E": 1.5697, "phi": 0.4332}


@pytest.mark.parametrize("noise", [Noise(0.003), Noise(0.003, 0.0026)], ids=["runs", "cells"])
@pytest.mark.parametrize("study", [False, True], ids=["phi", "delta phi"])
def test_gauss_newton_and_simulation_agree(noise, study):
    found = plan(GRID, LAW, TRUTH, noise, study=study, simulate=400, candidates=0)
    assert found.parameter == ("delta_phi" if study else "phi")
    # 400 simulations know a percentile half-width to about 6%
    assert found.simulated_half_width == pytest.approx(found.fisher_half_width, rel=0.2)
    assert found.half_width == found.simulated_half_width and found.trusted


def test_moments_by_simulation():
    noise = Noise(0.002, 0.0015)
    rng = np.random.default_rng(0)
    offset = noise.cell * rng.standard_normal(400_000)
    first, second = (
        np.clip(offset + noise.run * rng.standard_normal(400_000), -DELTA, DELTA) for _ in range(2)
    )
    slope, square, shared = psi_moments(noise)
    assert square == pytest.approx((first**2).mean(), rel=0.01)
    assert shared == pytest.approx((first * second).mean(), rel=0.02)
    assert slope == pytest.approx((np.abs(first) < DELTA).mean(), rel=0.02)


def test_more_runs_and_less_noise_narrow_it():
    all_runs = plan(GRID, LAW, TRUTH, Noise(0.003), candidates=0).half_width
    assert plan(GRID.where("budget<=4.64e18"), LAW, TRUTH, Noise(0.003), candidates=0).half_width > all_runs
    assert plan(GRID, LAW, TRUTH, Noise(0.001), candidates=0).half_width < all_runs


def test_a_hopeless_design_is_simulated_without_being_asked():
    tiny = GRID.where("budget<=1e18", "d_model<=640")
    found = plan(tiny, LAW, TRUTH, Noise(0.02), candidates=0)
    assert found.fisher_half_width > 0.3 and found.simulations == 400
    # phi lives in a box of width 6, which the linear approximation does not know
    assert found.half_width <= 3.0


def test_added_runs_help_stay_in_range_and_are_ranked_per_flop():
    found = plan(GRID, LAW, TRUTH, Noise(0.003, 0.0026), candidates=8)
    ratio = GRID.tokens / GRID.n_total
    gains = [c.gain_per_flop for c in found.candidates]
    assert len(gains) == 8 and gains == sorted(gains, reverse=True)
    for c in found.candidates:
        assert c.half_width < found.fisher_half_width
        assert ratio.min() <= c.tokens_per_parameter <= ratio.max()
        expected = (found.fisher_half_width - c.half_width) / c.budget
        assert c.gain_per_flop == pytest.approx(expected)


def test_an_added_run_is_worth_what_a_plan_with_it_says():
    best = plan(GRID, LAW, TRUTH, Noise(0.003), candidates=1).candidates[0]
    widths = Widths.of(GRID, LAW, best.r)
    like = int(
        np.flatnonzero((GRID.r == best.r) & (GRID.budget == best.budget) & (GRID.d_model == best.d_model))[0]
    )
    longer = GRID.take(np.append(np.arange(len(GRID)), like))
    assert widths.flops(np.array([best.d_model]))[0] == pytest.approx(GRID.flops_per_token[like], rel=1e-6)
    again = plan(longer, LAW, TRUTH, Noise(0.003), candidates=0)
    assert again.half_width == pytest.approx(best.half_width, rel=1e-6)


def test_bad_plans_are_refused():
    with pytest.raises(FitError, match="positive"):
        Noise(0.0)
    with pytest.raises(FitError, match="do not identify"):
        plan(GRID.where("r=1"), LAW, TRUTH, Noise(0.003))


def test_a_plan_prints_its_assumptions():
    told = text(plan(GRID, LAW, TRUTH, Noise(0.003, 0.001), simulate=50, candidates=2, seed=4))
    for words in (
        "0.003 per run",
        "0.001 per cell",
        "split paper",
        "Gauss-Newton",
        "50 simulated grids, seed 4",
        "D/N",
    ):
        assert words in told
