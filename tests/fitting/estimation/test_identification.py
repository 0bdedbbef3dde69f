"""A converged fit that does not identify phi says so; the numbers behind it against plain loops."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fitting import JointLaw, bootstrap, fit, load_grid
from fitting.__main__ import main
from fitting.data.runs import Runs, concatenate
from fitting.errors import FitError
from fitting.estimation.identification import (
    Limits,
    judged,
    lack_of_fit,
    outliers,
    sensitivity,
    spread_between_r,
)
from fitting.estimation.objective import huber, normal_psi_moments, psi
from fitting.estimation.results import FitResult, Interval, Status

GRID = load_grid()


@pytest.fixture(scope="module")
def result() -> FitResult:
    return bootstrap(GRID, fit(GRID, starts=60), resamples=100, names=["phi"])


def statuses(runs: Runs, found: FitResult, **limits: float) -> set[Status]:
    return {status for status, _ in judged(runs, found, "phi", Limits(**limits))[0].problems}


def quoted(found: FitResult, low: float, high: float) -> FitResult:
    return replace(found, intervals={"phi": (Interval("m", low, high, "a", recommended=True),)})


def test_the_papers_grid_is_identified(result: FitResult) -> None:
    found, told = judged(GRID, result, "phi", Limits())
    assert found.status is Status.OK and told.outliers == ()
    spreads = []
    for budget in set(GRID.budget.tolist()):
        for width in set(GRID.d_model.tolist()):
            losses = GRID.val_loss[(GRID.budget == budget) & (GRID.d_model == width)]
            if len(losses) > 1:
                spreads.append(math.sqrt(sum((losses - losses.mean()) ** 2) / (len(losses) - 1)))
    assert told.spread_between_r == spread_between_r(GRID) == pytest.approx(np.median(spreads))
    assert told.misfit == pytest.approx(0.21, abs=0.005)
    # One run left out, by a whole search.
    rest = GRID.take(GRID.source != told.most_moved.source)
    assert told.most_moved.value == pytest.approx(fit(rest, starts=60)["phi"], abs=1e-6)


def test_every_limit_has_its_status(result: FitResult) -> None:
    assert statuses(GRID, quoted(result, 0.0, 1.2)) == {Status.NOT_IDENTIFIED}
    assert statuses(GRID, quoted(result, 0.0, 1.2), widest_interval=1.6) == set()
    assert statuses(GRID, quoted(result, -3.0, -2.5)) == {Status.NOT_IDENTIFIED, Status.ONE_RUN_DECIDES}
    assert statuses(GRID, quoted(result, result["phi"], result["phi"])) == {Status.ONE_RUN_DECIDES}
    assert statuses(GRID, result, least_r_squared=0.999) == {Status.POOR_FIT}
    assert statuses(GRID, result, largest_misfit=0.2) == {Status.POOR_FIT}
    with pytest.raises(FitError, match="--widest-interval is 0; it must be positive"):
        Limits(widest_interval=0.0)


def test_cells_that_are_too_few_say_how_many_are_needed() -> None:
    runs = GRID.where("budget<=1e18").take(np.arange(19))
    runs = concatenate(runs, GRID.where("budget>1e19", "r=1", "d_model>=768"))
    found = fit(runs, starts=60)
    told, _ = judged(runs, found, "phi", Limits())
    assert runs.cell_count <= 6 and Status.NOT_IDENTIFIED in dict(told.problems)
    assert f"{runs.cell_count} cells (budget, architecture)" in told.message
    assert "at least 8 are needed" in told.message
    more = judged(runs, found, "phi", Limits(least_spare_cells=9))[0].message
    assert "at least 15 are needed" in more


def table(path: Path, change: dict[int, float], rows: slice = slice(None)) -> Path:
    lines = ["r,d_model,flops_budget,flops_per_token,tokens,val_loss"]
    runs = GRID.take(np.arange(len(GRID))[rows])
    for i in range(len(runs)):
        loss = change.get(i, runs.val_loss[i])
        numbers = runs.r[i], runs.d_model[i], runs.flops_per_token[i], runs.tokens[i], loss
        r, d, flops, tokens, loss = map(float, numbers)
        lines.append(f"{r:g},{d:g},,{flops!r},{tokens!r},{loss!r}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_mistyped_loss_is_named_and_the_exit_status_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "one_loss_of_9.9.csv", {40: 9.9})
    options = ["--quiet", "--no-rivals", "--starts", "60", "--bootstrap", "50"]
    assert main(["fit", str(path), *options, "--json"]) == 1
    out, err = capsys.readouterr()
    assert "poor fit: R² is" in err and f"{path}:42 (loss 9.9, predicted" in err
    numbers = json.loads(out)
    assert numbers["fit"]["status"] == "poor fit"
    (far,) = numbers["judgement"]["outliers"]
    assert far["source"] == f"{path}:42" and far["deviations"] > 100


def test_seven_runs_for_six_parameters_identify_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "seven_runs.csv", {}, slice(0, None, 17))
    assert main(["fit", str(path), "--quiet", "--no-rivals", "--starts", "60", "--bootstrap", "50"]) == 1
    out, err = capsys.readouterr()
    assert "not identified" in err and "at least 8 are needed" in err and "Identification" in out
    # Amplitudes stay positive, phi inside its box.
    low, high = (float(x) for x in out.split("  phi ")[1].split("[")[1].split("]")[0].split(", "))
    assert -3 <= low <= high <= 3


def test_outliers_are_counted_in_deviations_of_the_bulk(result: FitResult) -> None:
    residual = result.log_residuals.copy()
    residual[7] = 0.5
    away = np.abs(residual - np.median(residual)) / stats.median_abs_deviation(residual, scale="normal")
    (far,) = outliers(GRID, replace(result, log_residuals=residual), 6.0)
    assert far.source == GRID.source[7] and far.deviations == pytest.approx(away[7], rel=1e-5)


def test_huber_of_any_delta_is_its_formula_and_infinite_is_squares() -> None:
    x = np.linspace(-2, 2, 401)
    for delta in (1e-3, 0.3, 5.0):
        expected = [0.5 * v * v if abs(v) <= delta else delta * (abs(v) - delta / 2) for v in x]
        assert np.allclose(huber(x, delta), expected, rtol=1e-14, atol=0)
        assert np.array_equal(psi(x, delta), np.clip(x, -delta, delta))
    assert np.array_equal(huber(x, math.inf), 0.5 * x * x)
    assert normal_psi_moments(0.3, math.inf) == (1.0, pytest.approx(0.09))
    assert normal_psi_moments(0.3, 50.0) == pytest.approx((1.0, 0.09))


def test_least_squares_is_scipys() -> None:
    from scipy.optimize import least_squares

    ours = fit(GRID, starts=60, delta=math.inf)
    x, law = JointLaw().inputs(GRID), JointLaw()

    def residual(theta: np.ndarray) -> np.ndarray:
        return np.asarray(law.log_loss_and_gradient(theta[None], x)[0][0] - np.log(GRID.val_loss))

    def jacobian(theta: np.ndarray) -> np.ndarray:
        return np.asarray(law.log_loss_and_gradient(theta[None], x)[1][0].T)

    start = law.to_theta({"A": 20, "alpha": 0.2, "B": 500, "beta": 0.35, "E": 1.6, "phi": 0.4})
    theirs = least_squares(residual, start, jac=jacobian, method="lm", xtol=1e-15, ftol=1e-15)
    assert np.allclose(ours.theta, theirs.x, rtol=1e-5) and ours.objective == pytest.approx(theirs.cost)
    rows = sensitivity(GRID, JointLaw(), starts=60)
    assert [row.delta for row in rows] == [1e-4, 1e-3, 1e-2, 1e-1, 1.0, None]
    assert rows[-1].parameters == ours.parameters
    assert rows[1].parameters["phi"] == pytest.approx(0.4332, abs=1e-4)
    with pytest.raises(FitError, match="delta is 0; it must be positive"):
        fit(GRID, delta=0.0)


def test_repeats_split_noise_from_misfit() -> None:
    """Against the classical F of a plain loop, on a grid of three seeds."""
    law, rng = fit(GRID, starts=60), np.random.default_rng(0)
    parts = []
    for seed in range(3):
        noisy = np.exp(np.log(GRID.val_loss) + 0.002 * rng.standard_normal(len(GRID)))
        parts.append(replace(GRID.with_loss(noisy), seed=np.full(len(GRID), float(seed))))
    runs = concatenate(concatenate(parts[0], parts[1]), parts[2])
    result = fit(runs, starts=60)
    told = lack_of_fit(runs, result)
    assert told is not None
    by_run = result.log_residuals.reshape(3, -1)
    error = sum(((row - by_run.mean(axis=0)) ** 2).sum() for row in by_run) / (2 * len(GRID))
    misfit = 3 * (by_run.mean(axis=0) ** 2).sum() / (len(GRID) - 6)
    assert told.degrees == (len(GRID) - 6, 2 * len(GRID)) and told.repeated == len(GRID)
    assert told.pure_error == pytest.approx(math.sqrt(error), rel=1e-6)
    assert told.pure_error == pytest.approx(0.002, rel=0.15)
    assert told.ratio == pytest.approx(misfit / error, rel=1e-6)
    assert told.p == pytest.approx(stats.f.sf(misfit / error, *told.degrees)) and told.p < 0.01
    assert told.misfit == pytest.approx(math.sqrt((misfit - error) / 3), rel=1e-6)
    assert lack_of_fit(GRID, law) is None
