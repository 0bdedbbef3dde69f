"""Fits of the shipped grid against the published values, and what makes a fit doubtful or impossible."""

import dataclasses

import numpy as np
import pytest

from fitting.data.splits import INJECTION_ONCE, PAPER, REGRESSED
from fitting.errors import FitError
from fitting.estimation import fits
from fitting.estimation.fits import _problems, conditioning, fit, fit_architectures, second_solver
from fitting.estimation.results import SolverCheck, Status
from fitting.estimation.solver import Problem
from fitting.laws import ChinchillaLaw, FixedPower, JointLaw, Law, Saturating
from fitting.published import load_grid, reference
from fitting.report.report import text

GRID = load_grid()
STARTS = 200


@pytest.fixture(scope="module")
def paper():
    return fit(GRID, starts=STARTS)


def test_per_architecture_fits_are_the_published_table():
    found = fit_architectures(GRID, starts=STARTS)
    for r, published in reference()["chinchilla"].items():
        result = found[float(r)]
        assert result.status is Status.OK
        for name, tolerance in (("alpha", 0.003), ("beta", 0.003), ("E", 0.01)):
            assert result[name] == pytest.approx(published[name], abs=tolerance)
        assert result.r_squared == pytest.approx(published["r_squared"], abs=3e-4)


def test_the_joint_fit_under_the_papers_split(paper):
    assert paper.status is Status.OK and paper.trusted
    expected = {
        "phi": (0.4332, 0.002),
        "alpha": (0.1996, 0.0005),
        "beta": (0.3693, 0.0005),
        "E": (1.570, 0.002),
    }
    for name, (value, tolerance) in expected.items():
        assert paper[name] == pytest.approx(value, abs=tolerance)
    assert paper.r_squared == pytest.approx(0.9972, abs=1e-4)


@pytest.mark.parametrize(
    ("split", "all_runs", "low", "high", "four"),
    [
        (PAPER, 0.4332, 0.4196, 0.4671, 0.4293),
        (REGRESSED, 0.4589, 0.4442, 0.4922, 0.4539),
        (INJECTION_ONCE, 0.4578, 0.4415, 0.4887, 0.4520),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_phi_under_every_split_and_on_parts_of_the_budgets(split, all_runs, low, high, four):
    parts = (((), all_runs, 0.002), (("budget<=2.15e18",), low, 0.004), (("budget>=4.64e18",), high, 0.004))
    for rules, expected, tolerance in (*parts, (("budget<=4.64e18",), four, 0.004)):
        assert fit(GRID.where(*rules), JointLaw(split=split), starts=STARTS)["phi"] == pytest.approx(
            expected, abs=tolerance
        )


@pytest.mark.parametrize(
    ("split", "phi", "r_squared"),
    [(PAPER, 0, 0.9857), (PAPER, 1, 0.9480), (REGRESSED, 0, 0.9858), (REGRESSED, 1, 0.9552)],
    ids=lambda value: getattr(value, "name", None),
)
def test_restricted_fits(split, phi, r_squared):
    result = fit(GRID, JointLaw(FixedPower(phi), split), starts=STARTS)
    assert result.r_squared == pytest.approx(r_squared, abs=5e-4)


@pytest.mark.parametrize("grids", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_a_second_solver_agrees_on_the_grid_and_on_noisy_synthetic_ones(paper, grids):
    assert paper.check.largest_difference < 1e-3
    assert paper.check.objective == pytest.approx(paper.objective, rel=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(grids):
        losses = (GRID.val_loss - paper.residuals) * np.exp(0.003 * rng.standard_normal(len(GRID)))
        result = fit(GRID.with_loss(losses), starts=60)
        assert result.check.largest_difference < 1e-3
        assert Status.SOLVERS_DISAGREE not in {status for status, _ in result.problems}


def test_a_wrong_winner_is_found_out(paper):
    law, x = paper.law, paper.law.inputs(GRID)
    problem = Problem(law, x, np.log(GRID.val_loss), np.ones(len(GRID)), *np.asarray(law.bounds).T)
    wrong = paper.theta + np.array([0, 0, 0, 0, 0, 0.2])
    value = 1.2 * paper.objective
    check = second_solver(problem, wrong, value, seed=0)
    claimed = dataclasses.replace(paper, theta=wrong, objective=value, check=check)
    assert Status.SOLVERS_DISAGREE in {status for status, _ in fits._problems(claimed, 0.0)}
    assert Status.NOT_CONVERGED in {status for status, _ in fits._problems(claimed, 1e-6)}


def test_a_form_that_is_not_identified_says_so():
    result = fit(GRID, JointLaw(Saturating()), starts=STARTS)
    assert not result.trusted and result.status in (Status.AT_BOUND, Status.ILL_CONDITIONED)
    assert "not identified" in result.message and "not identified" in text(result)


def test_sixty_starts_are_enough_for_every_published_fit():
    for rules in ((), ("budget<=2.15e18",), ("budget>=4.64e18",)):
        for split in (PAPER, REGRESSED, INJECTION_ONCE):
            assert fit(GRID.where(*rules), JointLaw(split=split), starts=60).status is Status.OK


def test_few_starts_are_doubtful_and_said_to_be():
    result = fit(GRID, starts=3)
    assert result.status is Status.STARTS_DISAGREE and "raise the number of starts" in result.message


def test_conditioning_finds_parameters_that_the_data_cannot_tell_apart():
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 50))
    fine, _ = conditioning(np.stack([first, 1e6 * second]))
    assert fine < 2
    bad, correlations = conditioning(np.stack([first, first + 1e-6 * second]))
    assert bad > fits.WORST_CONDITION and abs(correlations[0, 1]) > 0.999
    assert conditioning(np.stack([first, 0 * second]))[0] == np.inf


def test_what_cannot_be_identified_is_refused_with_the_reason():
    with pytest.raises(FitError, match="r=4: phi is not identified"):
        fit(GRID.where("r=4"))
    with pytest.raises(FitError, match="one budget"):
        fit(GRID.where("budget=1e18"))
    with pytest.raises(FitError, match="6 runs cannot identify the 6 parameters"):
        fit(GRID.where("d_model=768").take(np.arange(6)))
    mixed = dataclasses.replace(GRID, bptt=np.where(np.arange(116) % 2, "full", "truncated").astype(object))
    with pytest.raises(FitError, match="several architectures.*--where"):
        fit(mixed)
    with pytest.raises(FitError, match="0 starts"):
        fit(GRID, starts=0)


def test_results_are_deterministic_and_plain(paper):
    import json

    again = fit(GRID, starts=STARTS, workers=1)
    assert (again.theta == paper.theta).all()
    assert json.loads(json.dumps(paper.to_dict()))["parameters"]["phi"] == paper["phi"]
    assert "Split: paper" in text(paper) and "not estimated" in text(paper)


def test_the_chinchilla_law_needs_no_second_r():
    assert fit(GRID.where("r=2"), ChinchillaLaw(), starts=STARTS).status is Status.OK


class Tokens(Law):
    name = "tokens"
    param_names = ("E", "B", "beta")
    bounds = np.array([[0.5, 4.0], [0.0, 3.0], [0.0, 1.0]])

    def predict(self, theta, x):
        return theta[:, :1] + theta[:, 1:2] * (x.tokens / 1e9) ** -theta[:, 2:]

    def gradient(self, theta, x):
        power = (x.tokens / 1e9) ** -theta[:, 2:]
        slope = -theta[:, 1:2] * power * np.log(x.tokens / 1e9)
        return np.stack([np.ones_like(power), power, slope], axis=1)


def test_a_wrong_gradient_is_a_status():
    class Wrong(Tokens):
        def gradient(self, theta, x):
            return super().gradient(theta, x) * np.array([1.0, 1.001, 1.0])[:, None]

    grid = load_grid()
    assert fit(grid, Tokens(), starts=40).status is not Status.WRONG_GRADIENT
    found = fit(grid, Wrong(), starts=40)
    assert found.status is Status.WRONG_GRADIENT and "derivative by B" in found.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"param_names": None}, "tokens has param_names None"),
        ({"bounds": np.zeros((2, 2))}, r"bounds of shape \(2, 2\), expected \(3, 2\)"),
        ({"bounds": None}, "bounds of shape"),
        ({"bounds": np.full((3, 2), np.nan)}, "finite"),
        ({"predict": lambda self, theta, x: theta[0] * 2}, r"predict.*tokens.*\(3,\).*expected \(2, 116\)"),
        ({"gradient": lambda self, theta, x: theta}, r"gradient.*\(2, 3\).*expected \(2, 3, 116\)"),
    ],
)
def test_laws_of_the_wrong_form_are_one_message(change, words):
    with pytest.raises(FitError, match=words):
        fit(load_grid(), type("Bad", (Tokens,), change)(), starts=40)


def test_a_bug_inside_a_law_keeps_its_own_error():
    broken = type("Broken", (Tokens,), {"predict": lambda self, theta, x: theta[:, 7]})
    with pytest.raises(IndexError):
        fit(load_grid(), broken(), starts=40)
    mistyped = type("Mistyped", (Tokens,), {"bounds": property(lambda self: self.lowest)})
    with pytest.raises(AttributeError, match="lowest"):
        fit(load_grid(), mistyped(), starts=40)


def test_a_law_without_bounds_is_one_message():
    form = {name: getattr(Tokens, name) for name in ("name", "param_names", "predict", "gradient")}
    with pytest.raises(FitError, match=r"tokens has no bounds. Give an array of shape \(3, 2\)"):
        fit(load_grid(), type("Bare", (Law,), form)(), starts=40)
    with pytest.raises(FitError, match="no usable bounds"):
        fit(load_grid(), type("Named", (Tokens,), {"bounds": "ABC"})(), starts=40)


def test_constant_losses_are_refused():
    with pytest.raises(FitError, match="val_loss 2.5: there is nothing to explain"):
        fit(load_grid().with_loss(np.full(116, 2.5)), starts=40)


def test_solvers_whose_exponents_differ_do_not_confirm_each_other():
    result = fit(load_grid(), starts=60)
    assert result.trusted
    apart = SolverCheck("other", result.objective * (1 + 1e-7), 2e-3)
    problems = _problems(dataclasses.replace(result, check=apart), 0.0)
    assert [status for status, _ in problems] == [Status.SOLVERS_DISAGREE]
