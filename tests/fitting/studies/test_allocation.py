"""Allocation: published minima, exponents and gaps; exact F(N); refusals of parabolas that mean nothing."""

import dataclasses

import numpy as np
import pytest

from fitting.errors import FitError
from fitting.estimation.fits import fit_architectures
from fitting.laws import JointLaw
from fitting.published import load_grid
from fitting.studies.allocation import (
    closed_form_exponents,
    exponents,
    frontier_gaps,
    law_optimum,
    parabola,
    parabolas,
)  # fmt: skip
from fitting.studies.widths import Widths

GRID = load_grid()
LAW = JointLaw()
PUBLISHED_MINIMA = {
    1: (2.8523, 2.7184, 2.6048, 2.4976, 2.4014, 2.3088),
    2: (2.9137, 2.7738, 2.6452, 2.5337, 2.4312, 2.3389),
    4: (2.9357, 2.7963, 2.6706, 2.5591, 2.4582, 2.3599),
    8: (2.9768, 2.8381, 2.7089, 2.5977, 2.4950, 2.4021),
}


def test_all_24_minima_are_the_published_ones():
    found = parabolas(GRID, LAW)
    assert len(found) == 24 and all(p.optimum.refusal is None for p in found)
    for r, losses in PUBLISHED_MINIMA.items():
        assert [p.optimum.loss for p in found if p.r == r] == pytest.approx(losses, abs=1e-4)


def test_frontier_gaps():
    gaps = frontier_gaps([p.optimum for p in parabolas(GRID, LAW)])
    for r, first, last in ((2, 0.061, 0.030), (4, 0.083, 0.051), (8, 0.125, 0.093)):
        own = [g.gap for g in gaps if g.r == r]
        assert len(own) == 6 and (own[0], own[-1]) == pytest.approx((first, last), abs=0.003)


def test_exponents_of_n_and_d_three_ways():
    closed = {1: (0.566, 0.531), 2: (0.703, 0.417), 4: (0.756, 0.372), 8: (0.674, 0.438)}
    exact = {1: (0.496, 0.587), 2: (0.622, 0.479), 4: (0.667, 0.434), 8: (0.599, 0.486)}
    curved = {1: (0.535, 0.558), 2: (0.601, 0.502), 4: (0.619, 0.481), 8: (0.611, 0.484)}
    slopes = {1: 0.827, 2: 0.829, 4: 0.831, 8: 0.834}
    curves = parabolas(GRID, LAW)
    for r, own in fit_architectures(GRID, starts=200).items():
        widths = Widths.of(GRID, own.law, r)
        assert widths.exact and widths.slope == pytest.approx(slopes[r], abs=0.001)
        assert closed_form_exponents(own["alpha"], own["beta"], widths.slope) == pytest.approx(
            closed[r], abs=0.01
        )
        optima = [law_optimum(own.law, own.theta, widths, c) for c in np.unique(GRID.budget)]
        assert exponents(optima) == pytest.approx(exact[r], abs=0.01)
        assert exponents([p.optimum for p in curves if p.r == r]) == pytest.approx(curved[r], abs=0.01)


def test_flops_between_the_sampled_widths_are_those_of_the_accounting():
    d, t, vocabulary, r, layers = 1000.0, 2048, 32064, 4, 4
    layer = 12 * d * d + 2 * d
    matmul = 6 * (4 * layer + vocabulary * d) + 6 * r * (layers * layer + 2 * d * d)
    attention = (12 * 4 + 12 * r * layers) * d * t
    widths = Widths.of(GRID, LAW, r)
    assert widths.flops(np.array([d]))[0] == pytest.approx(matmul + attention, rel=1e-6)
    assert widths.width_of(float(widths.n_total(np.array([d]))[0])) == pytest.approx(d, rel=1e-5)


def test_the_closed_form_is_the_minimum_under_a_power_law_of_flops():
    theta = LAW.to_theta({"A": 30, "alpha": 0.25, "B": 900, "beta": 0.4, "E": 1.6, "phi": 0.0})
    runs = GRID.where("r=1")
    sizes = runs.n_total
    runs = dataclasses.replace(runs, flops_per_token=6.0 * sizes**0.9)
    widths = Widths.of(runs, LAW, 1.0)
    optima = [law_optimum(LAW, theta, widths, c) for c in (1e17, 1e18, 1e19)]
    assert not widths.exact and optima[0].method == "law with a smooth F(N)"
    assert exponents(optima) == pytest.approx(closed_form_exponents(0.25, 0.4, 0.9), abs=1e-4)


def test_a_minimum_outside_the_sampled_sizes_is_flagged():
    theta = LAW.to_theta(
        {"A": 28.13, "alpha": 0.1996, "B": 928.1, "beta": 0.3693, "E": 1.5697, "phi": 0.4332}
    )
    widths = Widths.of(GRID, LAW, 2.0)
    assert law_optimum(LAW, theta, widths, 1e19).refusal is None
    assert "outside the sampled" in law_optimum(LAW, theta, widths, 1e23).refusal


def cell(losses):
    runs = GRID.where("r=4", "budget=4.64e18").take(np.arange(len(losses)))
    return runs.with_loss(np.array(losses, dtype=float))


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([2.6, 2.7, 2.75, 2.7, 2.6], "opens downwards"),
        ([2.7, 2.6, 2.53, 2.49, 2.47], "outside the sampled"),
        ([2.6, 2.5], "2 sizes"),
    ],
)
def test_parabolas_without_an_interior_minimum_are_refused_with_the_reason(losses, reason):
    found = parabola(cell(losses), None)
    assert reason in found.optimum.refusal and found.optimum.n is None and found.optimum.loss is None


def test_a_parabola_gives_back_the_one_the_data_lie_on():
    runs = cell([0] * 5)
    u = np.log(runs.n_total)
    found = parabola(runs.with_loss(2.5 + 0.05 * (u - u[2] - 0.1) ** 2), Widths.of(GRID, LAW, 4.0))
    assert np.log(found.optimum.n) == pytest.approx(u[2] + 0.1) and found.optimum.loss == pytest.approx(2.5)
    assert found.coefficients[2] == pytest.approx(0.05)
    widths = Widths.of(GRID, LAW, 4.0)
    flops = widths.flops(np.array([widths.width_of(found.optimum.n)]))[0]
    assert found.optimum.tokens == pytest.approx(4.64e18 / flops)


def test_one_width_gives_no_f_of_n():
    with pytest.raises(FitError, match="Add another width"):
        Widths.of(GRID.where("d_model=768"), LAW, 2.0)
    with pytest.raises(FitError, match="no runs with r=3"):
        Widths.of(GRID, LAW, 3.0)
