"""Whether a fit identifies its parameter of interest, or only converged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.fits import fit
from fitting.estimation.objective import DELTA, psi, robust_scale
from fitting.estimation.resampling import refit, reported_range
from fitting.estimation.results import FitResult, Status
from fitting.estimation.solver import LARGE
from fitting.laws import Inputs, Law


@dataclass(frozen=True)
class Limits:
    """From where on a fit is doubted. Raises `FitError` for a limit that is not positive."""

    widest_interval: float = 1.0
    """Of the quoted interval of phi, if both sides were as long as the longer one."""
    least_r_squared: float = 0.9
    largest_misfit: float = 1.0
    """RMSE over the median spread (standard deviation) between r at equal budget and width."""
    outlier_mads: float = 6.0
    """Distance of a log-residual from the median, in standard deviations by the median absolute deviation."""
    least_spare_cells: int = 2
    """Cells beyond the number of parameters: with one, no resample but the whole grid can carry the law."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise FitError(f"--{name.replace('_', '-')} is {value:g}; it must be positive")


@dataclass(frozen=True)
class Outlier:
    """A run far from all others, in standard deviations of the bulk's log-residuals."""

    source: str
    loss: float
    predicted: float
    deviations: float


@dataclass(frozen=True)
class LeftOutRun:
    """A run, and the value of the parameter without it."""

    source: str
    value: float


@dataclass(frozen=True)
class Judgement:
    """What speaks for and against the fit's identification of `parameter`."""

    parameter: str
    spread_between_r: float | None
    """Median over (budget, width) of the standard deviation of losses between r, nats; None where r never differs."""
    misfit: float | None
    """RMSE over that spread."""
    most_moved: LeftOutRun
    """The run that moves the parameter most when it is left out."""
    outliers: tuple[Outlier, ...]


def spread_between_r(runs: Runs) -> float | None:
    """Median over (budget, width) of the standard deviation (n - 1) of losses between r; None if r never differs."""
    by_r: dict[tuple[float, float], dict[float, list[float]]] = {}
    columns = (runs.budget, runs.d_model, runs.r, runs.val_loss)
    for budget, width, r, loss in zip(*(column.tolist() for column in columns), strict=True):
        by_r.setdefault((budget, width), {}).setdefault(r, []).append(loss)
    groups = [[float(np.mean(losses)) for losses in group.values()] for group in by_r.values()]
    spreads = [float(np.std(means, ddof=1)) for means in groups if len(means) > 1]
    return float(np.median(spreads)) if spreads else None


def outliers(runs: Runs, result: FitResult, mads: float) -> tuple[Outlier, ...]:
    """Runs whose log-residual is further than `mads` robust standard deviations from the median, worst first."""
    residual = result.log_residuals - np.median(result.log_residuals)
    scale = robust_scale(result.log_residuals)
    away = np.abs(residual) / scale if scale > 0 else np.zeros(len(residual))
    chosen = [int(i) for i in np.argsort(-away) if away[i] > mads]
    predicted = runs.val_loss - result.residuals
    return tuple(
        Outlier(str(runs.source[i]), float(runs.val_loss[i]), float(predicted[i]), float(away[i]))
        for i in chosen
    )


def judged(
    runs: Runs, result: FitResult, name: str, limits: Limits, workers: int | None = None
) -> tuple[FitResult, Judgement]:
    """The result with a status for each limit that the parameter `name` is beyond, and the numbers behind it."""
    x, observed = result.law.inputs(runs), np.log(runs.val_loss)
    theta = _without_each(result, x, observed, workers)
    values = result.law.to_reported(theta)[:, result.law.param_names.index(name)]
    worst = int(np.abs(values - result[name]).argmax())
    without = LeftOutRun(str(runs.source[worst]), float(values[worst]))
    spread = spread_between_r(runs)
    far = outliers(runs, result, limits.outlier_mads)
    misfit = None if not spread else result.rmse / spread
    told = Judgement(name, spread, misfit, without, far)
    found = [*_of_interval(runs, result, name, limits), *_of_fit(result, told, limits)]
    quoted = result.recommended(name)
    if quoted is not None and not quoted.low <= without.value <= quoted.high:
        found.append(
            (
                Status.ONE_RUN_DECIDES,
                f"without {without.source} {name} is {without.value:.3f}, outside of its interval "
                f"[{quoted.low:.3f}, {quoted.high:.3f}]. Look at that run, or add others like it",
            )
        )
    return replace(result, problems=(*result.problems, *found)), told


def _without_each(result: FitResult, x: Inputs, observed: np.ndarray, workers: int | None) -> np.ndarray:
    """theta (n, P) without each run in turn."""
    if len(observed) <= LARGE:
        weights = 1.0 - np.eye(len(observed))
        return refit(result.law, x, observed, result.theta, weights, result.seed, workers, result.delta)
    # One run of very many: the step that its gradient makes, with the curvature of all.
    log_predicted, jacobian = (part[0] for part in result.law.log_loss_and_gradient(result.theta[None], x))
    residual = log_predicted - observed
    curvature = (jacobian * (np.abs(residual) <= result.delta)) @ jacobian.T
    scale = 1 / np.sqrt(np.diag(curvature))
    inverse = np.linalg.pinv(curvature * scale[:, None] * scale, hermitian=True) * scale[:, None] * scale
    return np.asarray(result.theta + (inverse @ (jacobian * psi(residual, result.delta))).T)


def _of_interval(runs: Runs, result: FitResult, name: str, limits: Limits) -> list[tuple[Status, str]]:
    quoted, need = result.recommended(name), len(result.theta) + limits.least_spare_cells
    if runs.cell_count < need:
        cells = f"{runs.cell_count} cells ({runs.cells_by}, architecture) are too few to say how far {name} is known"
        return [(Status.NOT_IDENTIFIED, f"{cells}; at least {need} are needed. Add budgets or architectures")]
    if quoted is None:
        return []  # No bootstrap was asked for.
    (low, high), _ = reported_range(result.law, name)
    shown = f"the interval of {name}, [{quoted.low:.2f}, {quoted.high:.2f}],"
    more = "Add runs: `python -m fitting plan` says which"
    if quoted.low <= low or quoted.high >= high:
        return [(Status.NOT_IDENTIFIED, f"{shown} reaches the end of the box [{low:g}, {high:g}]. {more}")]
    longer = max(quoted.high - result[name], result[name] - quoted.low)
    if name == "phi" and 2 * longer > limits.widest_interval:
        reach = f"reaches {longer:.2f} from the estimate, more than half of {limits.widest_interval:g}"
        return [(Status.NOT_IDENTIFIED, f"{shown} {reach}. {more}")]
    return []


def _of_fit(result: FitResult, told: Judgement, limits: Limits) -> list[tuple[Status, str]]:
    reasons = []
    if not result.r_squared >= limits.least_r_squared:
        reasons.append(f"R² is {result.r_squared:.3f}, below {limits.least_r_squared:g}")
    if told.misfit is not None and told.misfit > limits.largest_misfit:
        reasons.append(
            f"runs are off by {result.rmse:.3f} nats (RMSE), {told.misfit:.2f} times the spread between r at equal "
            f"budget and width ({told.spread_between_r:.3f})"
        )
    if not reasons:
        return []
    far = ", ".join(
        f"{run.source} (loss {run.loss:g}, predicted {run.predicted:.3f})" for run in told.outliers[:5]
    )
    named = f"; far from all others: {far}" if far else ""
    return [(Status.POOR_FIT, "; ".join(reasons) + named)]


@dataclass(frozen=True)
class Sensitivity:
    """The law fitted with another threshold of Huber's function; None is least squares."""

    delta: float | None
    parameters: dict[str, float]
    rmse: float
    status: str


DELTAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, math.inf)
"""Thresholds of the sensitivity table; the paper's is 1e-3."""


def sensitivity(runs: Runs, law: Law, own: float = DELTA, **search: int | None) -> tuple[Sensitivity, ...]:
    """The law fitted with each of `DELTAS` and with the fit's `own`, with the keywords `search` of `fit`."""
    rows = []
    for delta in sorted({*DELTAS, own}):
        found = fit(runs, law, delta=delta, **search)  # type: ignore[arg-type]
        shown = None if math.isinf(delta) else delta
        rows.append(Sensitivity(shown, found.parameters, found.rmse, found.status.value))
    return tuple(rows)


@dataclass(frozen=True)
class LackOfFit:
    """Scatter between repeats (other seeds of one run) against the law's misfit, in log-loss.

    `ratio` is F, the mean square of the misfit over that of repeats, and `p` its probability without misfit, for normal
    noise.
    """

    repeated: int
    """Groups of runs that differ in the seed alone."""
    pure_error: float
    """Standard deviation of a run about its repeats."""
    misfit: float
    """Standard deviation of groups about the law beyond what pure error explains."""
    ratio: float
    degrees: tuple[int, int]
    p: float


def lack_of_fit(runs: Runs, result: FitResult) -> LackOfFit | None:
    """The classical test of misfit against repeats; None without repeats, or with too few groups for it."""
    from scipy.stats import f as f_distribution

    columns = (runs.architecture, runs.d_model, runs.budget, np.round(np.log(runs.tokens), 3))
    keys = list(zip(*(column.tolist() for column in columns), strict=True))
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group = np.array([index[key] for key in keys])
    counts = np.bincount(group)
    means = np.bincount(group, result.log_residuals) / counts
    within = int((counts - 1).sum())
    between = len(counts) - len(result.theta)
    if not within or between < 1:
        return None
    error = float(((result.log_residuals - means[group]) ** 2).sum()) / within
    square = float((counts * means**2).sum()) / between
    size = float(counts.mean())
    beyond = math.sqrt(max(0.0, (square - error) / size))
    ratio = square / error if error > 0 else math.inf
    p = float(f_distribution.sf(ratio, between, within))
    return LackOfFit(int((counts > 1).sum()), math.sqrt(error), beyond, ratio, (between, within), p)
