"""Fits a law to runs and says how far the result can be trusted."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize as scipy_minimize

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.objective import DELTA, huber, psi
from fitting.estimation.results import FitResult, SolverCheck, Status
from fitting.estimation.solver import LARGE, Problem, Solutions, minimise, multi_start, uniform_starts
from fitting.laws import ChinchillaLaw, Inputs, JointLaw, Law

WORST_CONDITION = 1e8
FEWEST_AGREEING = 5
SEARCHED = 1500
"""Runs that the starts of a fit to more than `LARGE` runs see."""
GRADIENT_TOLERANCE = 1e-4
FARTHEST_EXPONENT = 1e-3
"""Solvers whose exponents are further apart than this do not confirm each other."""
# The check solver sees the objective times this: its tolerances are partly absolute.
_CHECK_SCALE = 1e6
_CHECK_TRIES = 3


def fit(
    runs: Runs,
    law: Law | None = None,
    *,
    starts: int = 500,
    seed: int = 0,
    workers: int | None = None,
    delta: float = DELTA,
) -> FitResult:
    """Fit `law` (the joint law with phi free by default): the least sum of Huber losses of log L from many
    starts, as in arXiv 2604.21106. An infinite `delta` gives least squares. The number of `workers` (threads) does not
    change the result.

    Raises `FitError` when the runs cannot identify the law: they are too few, or have one budget, a single r, or
    several architectures at one r.
    """
    law = law if law is not None else JointLaw()
    refuse_mixed(runs)
    x = law.inputs(runs)
    return fit_inputs(law.bound_to(x), x, runs, starts=starts, seed=seed, workers=workers, delta=delta)


def fit_inputs(
    law: Law,
    x: Inputs,
    runs: Runs,
    *,
    starts: int,
    seed: int,
    workers: int | None,
    delta: float = DELTA,
) -> FitResult:
    """Fit a bound law to given inputs (a paired study brings its own). Raises `FitError`."""
    if starts < 1:
        raise FitError(
            f"{starts} starts find nothing. Give at least 1; below {FEWEST_AGREEING} a fit is doubtful"
        )
    if not delta > 0:
        raise FitError(f"delta is {delta:g}; it must be positive, or infinite for least squares")
    low, high = _box(law, x)
    refuse_unidentified(law, runs)
    observed = np.log(runs.val_loss)
    problem = Problem(law, x, observed, np.ones(len(runs)), low, high, delta)
    points = uniform_starts(law, starts, np.random.default_rng(seed))
    # Where the optimum is, some runs tell as well as very many; the last steps take all.
    searched = problem.of_runs(_spread_out(runs)) if len(runs) > LARGE else problem
    points = law.improve_starts(points, searched.x, searched.log_loss)
    search = multi_start(searched, points, workers=workers)
    best = search.best if searched is problem else minimise(problem, search.best.theta, workers=workers)
    theta, objective = best.theta[0], float(best.objective[0])
    if not np.isfinite(objective):
        raise FitError(
            f"The law {law.name} is not finite at any of {starts} starts. Check its bounds and gradient"
        )
    log_predicted, jacobian = (part[0] for part in law.log_loss_and_gradient(theta[None], x))
    residuals = runs.val_loss - np.exp(log_predicted)
    condition, correlations = conditioning(jacobian)
    spread = float(((runs.val_loss - runs.val_loss.mean()) ** 2).sum())
    result = FitResult(
        law=law,
        parameters=law.named(theta),
        theta=theta,
        objective=objective,
        r_squared=1 - float((residuals**2).sum()) / spread,
        rmse=float(np.sqrt((residuals**2).mean())),
        runs=len(runs),
        starts=starts,
        dropped=int(search.dropped[0]),
        agreeing=int(search.agreeing[0]),
        gradient_norm=float(np.abs(best.gradient[0]).max()),
        condition=condition,
        correlations=correlations,
        at_bound=at_bounds(law, theta),
        problems=(),
        check=_check(searched, search.best, objective, seed),
        seed=seed,
        residuals=residuals,
        log_residuals=observed - log_predicted,
        excluded=runs.excluded,
        delta=delta,
    )
    problems = _problems(result, float(best.predicted[0]))
    wrong = gradient_error(law, theta, x)
    return replace(result, problems=(*problems, (Status.WRONG_GRADIENT, wrong)) if wrong else problems)


def _spread_out(runs: Runs) -> np.ndarray:
    """Indices of `SEARCHED` runs spread evenly over r, budget and size."""
    order = np.lexsort((runs.n_total, runs.training_flops, runs.r))
    return np.sort(order[np.linspace(0, len(runs) - 1, SEARCHED).round().astype(int)])


def _check(searched: Problem, best: Solutions, objective: float, seed: int) -> SolverCheck:
    """The second solver on the problem that was searched; its objective relative to that of all runs."""
    own = float(best.objective[0])
    found = second_solver(searched, best.theta[0], own, seed)
    if len(searched.x) > SEARCHED or objective == own:
        return found
    return replace(
        found, solver=f"{found.solver} on {SEARCHED} runs", objective=found.objective * objective / own
    )


def fit_architectures(runs: Runs, **search: Any) -> dict[float, FitResult]:
    """A Chinchilla fit for every r, as in the paper's table, with keywords and errors of `fit`."""
    return {float(r): fit(runs.take(runs.r == r), ChinchillaLaw(), **search) for r in runs.recurrences}


def refuse_unidentified(law: Law, runs: Runs) -> None:
    """Raise `FitError` saying what cannot be identified."""
    count = len(law.param_names)
    if len(runs) <= count:
        raise FitError(
            f"{len(runs)} runs cannot identify the {count} parameters of {law.name} "
            f"({', '.join(law.param_names)}). Give at least {count + 1} runs, or a law with fewer parameters"
        )
    if np.ptp(runs.val_loss) == 0:
        raise FitError(
            f"All {len(runs)} runs have the val_loss {runs.val_loss[0]:g}: there is nothing to explain. Check the "
            "column val_loss"
        )
    if len(np.unique(runs.budget)) < 2:
        raise FitError(
            f"All {len(runs)} runs have one budget ({runs.budget[0]:.3g} FLOPs): size and tokens trade off along "
            "one line, so alpha, beta and E are not identified. Add runs of another budget"
        )
    if law.needs_several_r and len(runs.recurrences) < 2:
        raise FitError(
            f"All {len(runs)} runs have r={runs.recurrences[0]:g}: {law.param_names[-1]} is not identified. Add "
            "runs with another r, or fit the Chinchilla law (--law chinchilla)"
        )


def refuse_mixed(runs: Runs) -> None:
    """Raise `FitError` when one r has runs of several architectures: one law cannot describe them all."""
    for r in runs.recurrences:
        chosen = runs.r == r
        labels = np.unique(runs.architecture[chosen].astype(str))
        if len(labels) > 1:
            name, values = "injection", np.unique(runs.injection[chosen].astype(str))
            if len(values) == 1:
                name, values = "bptt", np.unique(runs.bptt[chosen].astype(str))
            raise FitError(
                f"The runs with r={r:g} are of several architectures ({'; '.join(labels)}), and one "
                f"law cannot describe them all. Leave some out, e.g. --where '{name}!={values[-1]}' (!= "
                "keeps r=1, which has neither injection nor truncation), or compare them as a case study"
            )


def _box(law: Law, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Low and high ends (P,) of a law's box. Raises `FitError` unless names, bounds and shapes are those of a `Law`.

    An error that the law itself raises is a bug and passes through.
    """
    label = law.name or type(law).__name__
    names = getattr(law, "param_names", None)
    if not isinstance(names, tuple | list) or not names or not all(isinstance(n, str) for n in names):
        raise FitError(
            f"The law {label} has param_names {names!r}. Give the names of its parameters, e.g. ('E', 'B')"
        )
    way_out = f"Give an array of shape ({len(names)}, 2)"
    # A property that fails is there: its error may be an AttributeError, too.
    if inspect.getattr_static(law, "bounds", None) is None and not hasattr(law, "bounds"):
        raise FitError(f"The law {label} has no bounds. {way_out}")
    given = law.bounds
    try:
        bounds = np.asarray(given, dtype=float)
    except (TypeError, ValueError) as error:
        raise FitError(f"The law {label} has no usable bounds ({error}). {way_out}") from None
    if bounds.shape != (len(names), 2):
        raise FitError(
            f"The law {label} has bounds of shape {bounds.shape}, expected ({len(names)}, 2): a low and a high "
            "end for each of its parameters"
        )
    if not (np.isfinite(bounds).all() and (bounds[:, 0] <= bounds[:, 1]).all()):
        raise FitError(f"The law {label} has bounds {bounds.tolist()}. Give finite ends, the low one first")
    low, high = bounds.T
    theta = low + np.array([[0.25], [0.5]]) * (high - low)
    runs = len(x)
    for name, expected in (("predict", (2, runs)), ("gradient", (2, len(names), runs))):
        with np.errstate(all="ignore"):
            shape = np.shape(getattr(law, name)(theta, x))
        if shape != expected:
            raise FitError(
                f"The method {name} of the law {label} returned shape {shape} for theta of shape {theta.shape} "
                f"and {runs} runs, expected {expected}"
            )
    return low, high


def gradient_error(law: Law, theta: np.ndarray, x: Inputs) -> str | None:
    """Says where the gradient at `theta` (P,) is more than 1e-4 (relative) off finite differences; None if nowhere."""
    low, high = np.asarray(law.bounds, dtype=float).T
    step = np.diag(np.maximum(1e-6 * (high - low), 1e-12))
    points = np.concatenate([np.maximum(theta - step, low), np.minimum(theta + step, high)])
    with np.errstate(all="ignore"):
        log_loss = law.log_loss_and_gradient(points, x)[0]
        gradient = law.log_loss_and_gradient(theta[None], x)[1][0]
    for i, name in enumerate(law.param_names):
        moved = points[len(theta) + i, i] - points[i, i]
        if moved <= 0:
            continue
        difference = (log_loss[len(theta) + i] - log_loss[i]) / moved
        largest = max(np.abs(difference).max(), np.abs(gradient[i]).max())
        off = float(np.abs(difference - gradient[i]).max())
        # The last term is the rounding error of the differences themselves.
        if not off <= GRADIENT_TOLERANCE * largest + 1e-14 / moved:
            return (
                f"the derivative by {name} is off by {off / largest:.1e} of its size against finite "
                "differences of predict: correct the law's gradient"
            )
    return None


def at_bounds(law: Law, theta: np.ndarray) -> tuple[str, ...]:
    """The parameters whose coordinate in `theta` (P,) is at an end of the law's box."""
    low, high = np.asarray(law.bounds, dtype=float).T
    near = (theta - low < 1e-6 * (high - low)) | (high - theta < 1e-6 * (high - low))
    return tuple(name for name, flag in zip(law.param_names, near, strict=True) if flag)


def conditioning(jacobian: np.ndarray) -> tuple[float, np.ndarray]:
    """Condition number (infinite for a parameter without effect) and correlations (P, P).

    Both are those of the Gauss-Newton matrix scaled to a unit diagonal; `jacobian` (P, n) is that of log L.
    """
    matrix = jacobian @ jacobian.T
    diagonal = np.diag(matrix)
    if (diagonal <= 0).any():
        return float("inf"), np.full_like(matrix, np.nan)
    scale = 1 / np.sqrt(diagonal)
    values, vectors = np.linalg.eigh(matrix * scale[:, None] * scale)
    condition = float(values[-1] / values[0]) if values[0] > 0 else float("inf")
    covariance = (vectors / np.maximum(values, 1e-300)) @ vectors.T
    spread = np.sqrt(np.diag(covariance))
    return condition, covariance / spread[:, None] / spread


def second_solver(problem: Problem, theta: np.ndarray, objective: float, seed: int) -> SolverCheck:
    """scipy's truncated Newton (TNC) from points near `theta` (P,): does it end at the same place?

    It shares no step rule with the batched solver and, unlike scipy's L-BFGS-B, calls no threaded linear
    algebra. In its coordinates the Gauss-Newton matrix is the identity; parameters at a bound are held.
    """
    law, x = problem.law, problem.x
    width = problem.upper - problem.lower
    free = (theta - problem.lower > 1e-6 * width) & (problem.upper - theta > 1e-6 * width)
    jacobian = law.log_loss_and_gradient(theta[None], x)[1][0][free]
    matrix = jacobian @ jacobian.T
    matrix[np.diag_indices_from(matrix)] *= 1 + 1e-10
    try:
        back = np.linalg.inv(np.linalg.cholesky(matrix)).T
    except np.linalg.LinAlgError:
        back = np.diag(width[free])

    def point(z: np.ndarray) -> np.ndarray:
        moved = theta.copy()
        moved[free] += back @ z
        return np.clip(moved, problem.lower, problem.upper)

    def scaled(z: np.ndarray) -> tuple[float, np.ndarray]:
        log_loss, slope = law.log_loss_and_gradient(point(z)[None], x)
        residual = log_loss[0] - problem.log_loss
        value = float((problem.weights * huber(residual, problem.delta)).sum())
        gradient = slope[0] @ (problem.weights * psi(residual, problem.delta))
        return _CHECK_SCALE * value, _CHECK_SCALE * (back.T @ gradient[free])

    exponents = np.array([name not in law.log_parameters for name in law.param_names]) & free
    rng = np.random.default_rng(seed + 1)
    best = SolverCheck("scipy TNC", float("inf"), 0.0)
    options = {"maxfun": 3000, "ftol": 1e-15, "gtol": 1e-9, "xtol": 0}
    start = None
    for _ in range(_CHECK_TRIES):
        if start is None:
            start = np.linalg.solve(back, 0.01 * (width * rng.standard_normal(len(theta)))[free])
        with np.errstate(all="ignore"):
            found = scipy_minimize(scaled, start, jac=True, method="TNC", options=options)
        difference = np.abs(point(found.x) - theta)[exponents]
        value = float(found.fun) / _CHECK_SCALE
        if value < best.objective:
            best = SolverCheck(best.solver, value, float(difference.max(initial=0.0)))
        close = value <= objective * (1 + 1e-6) + 1e-20
        if close and best.largest_difference <= FARTHEST_EXPONENT:
            break
        # If it stopped short of the optimum, go on from there; if it ended elsewhere, start anew.
        start = found.x if close else None
    return best


def _problems(result: FitResult, predicted: float) -> tuple[tuple[Status, str], ...]:
    """Reasons to doubt a result; `predicted` is the decrease that the solver still expects."""
    found: dict[Status, str] = {}
    negligible = 1e-20 * result.runs
    if predicted > 1e-8 * result.objective + negligible:
        found[Status.NOT_CONVERGED] = f"gradient norm {result.gradient_norm:.1e}, still decreasing"
    if result.at_bound:
        names = ", ".join(result.at_bound)
        found[Status.AT_BOUND] = f"{names} not identified: the best value is an end of the box"
    if result.condition > WORST_CONDITION:
        number = f"condition number {result.condition:.1e} (limit {WORST_CONDITION:.0e})"
        reason = "a combination of the parameters is not identified by these runs"
        found[Status.ILL_CONDITIONED] = f"{number}: {reason}"
    if result.agreeing < FEWEST_AGREEING:
        reached = f"{result.agreeing} of {result.starts} starts reached the best objective within 1e-6"
        found[Status.STARTS_DISAGREE] = f"{reached} (want {FEWEST_AGREEING}); raise the number of starts"
    check = result.check
    if check is not None and result.objective > negligible:
        relative = check.objective / result.objective - 1
        if relative < -1e-6 or relative > 1e-4 or check.largest_difference > FARTHEST_EXPONENT:
            ends = f"{check.solver} ends at {check.objective:.6e} against {result.objective:.6e}"
            apart = f"exponents up to {check.largest_difference:.1e} apart"
            found[Status.SOLVERS_DISAGREE] = f"{ends}, {apart}"
    return tuple(found.items())
