"""What the residuals say, and how laws compare on runs they have not seen.

Residuals are observed - predicted, in nats. Shapes: n runs, G groups held out in turn, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fitting.data.plain import optional
from fitting.data.runs import Runs
from fitting.data.splits import Split
from fitting.errors import FitError
from fitting.estimation.calibration import Claim, Fitted, gain, noise_left, objectives, share, simulated_gains
from fitting.estimation.fits import WORST_CONDITION, at_bounds, conditioning, fit
from fitting.estimation.resampling import refit, refit_many
from fitting.estimation.results import FitResult
from fitting.estimation.solver import LARGE
from fitting.laws import Inputs, JointLaw, Law, multipliers


@dataclass(frozen=True)
class GroupResidual:
    """Residuals (nats) of the runs that share one r or budget (`group`); `max` is the largest absolute one."""

    group: float
    runs: int
    mean: float
    max: float
    rmse: float


def residual_summary(residuals: np.ndarray, labels: np.ndarray) -> tuple[GroupResidual, ...]:
    """Mean, largest absolute value and RMSE of residuals (n,) for every distinct label (n,)."""
    rows = []
    for label in np.unique(labels):
        chosen = residuals[labels == label]
        numbers = chosen.mean(), np.abs(chosen).max(), np.sqrt((chosen**2).mean())
        rows.append(GroupResidual(float(label), len(chosen), *map(float, numbers)))
    return tuple(rows)


@dataclass(frozen=True)
class Scatter:
    """Standard deviations of log-residuals: of a run within its cell, and of the cells' own offsets."""

    run: float
    cell: float
    cell_share_of_mean: float
    """Spread of the cells' means relative to that of independent runs; 1 means no cell effect."""


def no_cell_with_two_runs(cell: np.ndarray) -> str | None:
    """A phrase that says so if every cell (n,) has only one run, else None."""
    cells = len(np.unique(cell))
    return None if cells < len(cell) else f"no cell of {cells} has two runs"


def scatter(residuals: np.ndarray, cell: np.ndarray, parameters: int) -> Scatter:
    """One-way analysis of variance of residuals (n,) over cells (n,), corrected for the `parameters` of the fit.

    Raises `FitError` when no cell has two runs.
    """
    reason = no_cell_with_two_runs(cell)
    if reason:
        raise FitError(
            f"{reason}, so scatter of runs and of cells cannot be told apart. Add another size to some (budget, "
            "architecture) cell"
        )
    cells, counts = np.unique(cell, return_counts=True)
    means = np.array([residuals[cell == c].mean() for c in cells])
    within = float(sum(((residuals[cell == c] - m) ** 2).sum() for c, m in zip(cells, means, strict=True)))
    within /= max(len(residuals) - len(cells), 1)
    between = float((counts * means**2).sum()) / max(len(cells) - parameters, 1)
    size = float((counts.sum() - (counts**2).sum() / counts.sum()) / max(len(cells) - 1, 1))
    effect = max(0.0, (between - within) / size)
    ratio = float(np.sqrt(between / within)) if within > 0 else float("inf")
    return Scatter(float(np.sqrt(within)), float(np.sqrt(effect)), ratio)


@dataclass(frozen=True)
class Attempt:
    """A fit to some of the runs. If it was refused, `parameters` is None and `message` says why."""

    runs: int
    parameters: dict[str, float] | None
    status: str
    message: str


@dataclass(frozen=True)
class Half(Attempt):
    """The law fitted to one half of the budgets."""

    half: str
    budgets: tuple[float, ...]


def attempt(runs: Runs, law: Law, refused: str, search: dict[str, Any]) -> Attempt:
    """Fit with the keywords `search`; `refused` is the status of a fit that the runs cannot carry."""
    try:
        result = fit(runs, law, **search)
    except FitError as error:
        return Attempt(len(runs), None, refused, str(error))
    return Attempt(len(runs), result.parameters, result.status.value, result.message)


def halves(runs: Runs, law: Law, **search: Any) -> tuple[Half, ...]:
    """The law fitted to each half of the budgets, with the keywords `search` of `fit`."""
    budgets = np.unique(runs.budget)
    cut = budgets[(len(budgets) - 1) // 2]
    rows = []
    for name, chosen in (("lower half", runs.budget <= cut), ("upper half", runs.budget > cut)):
        part = runs.take(chosen)
        found = attempt(part, law, "not identified", search)
        rows.append(Half(**vars(found), half=name, budgets=tuple(np.unique(part.budget).tolist())))
    return tuple(rows)


@dataclass(frozen=True)
class LeftOut:
    """A refit without the budget, r or cell `left_out`, and its RMSE, in nats, on the runs left out."""

    left_out: float
    runs: int
    parameters: dict[str, float]
    held_out_rmse: float
    status: str


def leave_out(
    runs: Runs, result: FitResult, groups: np.ndarray, workers: int | None = None
) -> tuple[LeftOut, ...]:
    """Refit without each group (n,) in turn."""
    labels = np.unique(groups)
    x = result.law.inputs(runs)
    observed = np.log(runs.val_loss)
    if len(runs) > LARGE:
        blocks = np.searchsorted(labels, groups)
        theta = refit_many(result, x, observed, blocks, 1.0 - np.eye(len(labels)), workers)
    else:
        weights = np.array([(groups != label).astype(float) for label in labels])
        theta = refit(result.law, x, observed, result.theta, weights, result.seed, workers, result.delta)
    log_predicted, jacobian = result.law.log_loss_and_gradient(theta, x)
    predicted = np.exp(log_predicted)
    rows = []
    for label, point, loss, slope in zip(labels, theta, predicted, jacobian, strict=True):
        out = groups == label
        rmse = float(np.sqrt(((runs.val_loss - loss)[out] ** 2).mean()))
        near = at_bounds(result.law, point)
        doubts = [f"at bound: {', '.join(near)}"] if near else []
        # Parameters held at a bound do not count towards the condition of the others.
        free = np.array([name not in near for name in result.law.param_names])
        if free.any() and conditioning(slope[:, ~out][free])[0] > WORST_CONDITION:
            doubts.append("ill-conditioned")
        status = "; ".join(doubts) or "ok"
        rows.append(LeftOut(label.item(), int(out.sum()), result.law.named(point), rmse, status))
    return tuple(rows)


def rival_laws(split: Split) -> list[Law]:
    """The joint law and its rivals, under one split."""
    m = multipliers
    powers = (m.Power(), m.FixedPower(0), m.FixedPower(1))
    rivals = (m.PerRecurrence(), m.Saturating(), m.LogGrowth(), m.DriftingPower(), m.TokenDriftingPower())
    return [JointLaw(form, split) for form in (*powers, *rivals)]


def aicc(result: FitResult) -> float:
    """2n·log Q + 2k + 2k(k+1)/(n-k-1), k = parameters + 1. Lower is better; only differences count."""
    n, k = result.runs, len(result.parameters) + 1
    if n - k - 1 <= 0 or result.objective <= 0:
        return float("nan")
    return 2 * n * float(np.log(result.objective)) + 2 * k + 2 * k * (k + 1) / (n - k - 1)


@dataclass(frozen=True)
class RivalFit:
    """One form of the law fitted to the same runs as the others; errors are RMSE in nats."""

    law: str
    parameters: dict[str, float]
    count: int
    aicc: float
    rmse: float
    r_squared: float
    held_out_by_budget: float
    held_out_by_cell: float
    held_out_by_r: float | None
    status: str
    message: str
    aicc_difference: float = math.nan
    """AICc above that of the best form."""
    claim: Claim | None = optional()
    """That of this form and the first the one with more parameters is better; of two with as many, this one."""
    share_of_any: float | None = optional()
    """Share of grids drawn from the first form in which the best claim of any rival is as strong as this one's."""


@dataclass(frozen=True)
class RivalRefused:
    """A form of the law that these runs cannot identify, and why."""

    law: str
    message: str
    status: str = "not estimated"
    parameters: None = None
    aicc: float = math.nan
    aicc_difference: float = math.nan


def compare_laws(
    runs: Runs, laws: Sequence[Law], *, grids: int = 0, **search: Any
) -> tuple[RivalFit | RivalRefused, ...]:
    """Every law fitted to the same runs with the keywords `search` of `fit`, its held-out errors, and whether it is
    better than the first law, judged on so many simulated grids (of no more than `LARGE` runs).

    `PerRecurrence` has no held-out error by r: its parameters cannot be learnt without their r.
    """

    def held_out(result: FitResult, groups: np.ndarray) -> float:
        rows = leave_out(runs, result, groups, search.get("workers"))
        return float(np.sqrt(sum(row.runs * row.held_out_rmse**2 for row in rows) / len(runs)))

    rows: list[RivalFit | RivalRefused] = []
    results: dict[int, FitResult] = {}
    for i, law in enumerate(laws):
        try:
            result = fit(runs, law, **search)
        except FitError as error:
            rows.append(RivalRefused(law.name, str(error)))
            continue
        results[i] = result
        free = isinstance(getattr(result.law, "multiplier", None), multipliers.PerRecurrence)
        by_r = held_out(result, runs.r) if not free and len(runs.recurrences) > 2 else None
        errors = (held_out(result, runs.budget), held_out(result, runs.cell), by_r)
        quality = (aicc(result), result.rmse, result.r_squared)
        doubt = (result.status.value, result.message)
        parameters = result.parameters
        rows.append(RivalFit(result.law.name, parameters, len(parameters), *quality, *errors, *doubt))
    best = min((row.aicc for row in rows if math.isfinite(row.aicc)), default=math.nan)
    rows = [replace(row, aicc_difference=row.aicc - best) for row in rows]
    if grids and 0 in results and len(runs) <= LARGE:
        first = Fitted(results[0].law, results[0].theta, results[0].delta)
        rivals = {i: Fitted(result.law, result.theta, result.delta) for i, result in results.items() if i}
        drawing = {"grids": grids, "seed": search.get("seed", 0), "workers": search.get("workers")}
        for i, more in judge_rivals(
            first, rivals, first.law.inputs(runs), np.log(runs.val_loss), runs.cell, **drawing
        ).items():
            rows[i] = replace(rows[i], **more)
    return tuple(rows)


def judge_rivals(
    first: Fitted,
    rivals: Mapping[int, Fitted],
    x: Inputs,
    log_loss: np.ndarray,
    cell: np.ndarray,
    *,
    grids: int,
    seed: int,
    workers: int | None = None,
) -> dict[int, dict[str, Any]]:
    """`claim` and `share_of_any` for every rival of the first law; those with fewer parameters have only the claim.

    The grids have the noise that the simpler law leaves: with the richer one's, up to 18 of 200 true nulls are rejected
    in place of 10. All rivals of the first law see the same grids: the smallest share that any of them has on one grid
    says how often chance gives that much to one of so many (Westfall and Young's single step).
    """

    def gains(simpler: Fitted, richer: Sequence[Fitted]) -> np.ndarray:
        return simulated_gains(
            simpler, richer, x, cell, noise_left(simpler, x, log_loss, cell), grids, seed, workers
        )

    def lowest(one: Fitted) -> np.ndarray:
        return objectives(one.law, one.theta[None], x, log_loss, one.delta)[0]

    richer = [i for i, rival in rivals.items() if len(rival.theta) >= len(first.theta)]
    drawn = gains(first, [rivals[i] for i in richer]) if richer else np.empty((0, grids))
    simulated = dict(zip(richer, drawn, strict=True))
    claims = {}
    for i, rival in rivals.items():
        pair = (first, rival) if i in simulated else (rival, first)
        by_chance = simulated[i] if i in simulated else gains(rival, [first])[0]
        seen = float(gain(*map(lowest, pair)))
        claims[i] = Claim(
            pair[0].law.name,
            pair[1].law.name,
            seen,
            share(seen, by_chance),
            grids,
            noise_left(pair[0], x, log_loss, cell),
        )
    found: dict[int, dict[str, Any]] = {i: {"claim": claim} for i, claim in claims.items()}
    if simulated:
        # The share that each grid would have among the others, and the smallest of any rival.
        shares = [(len(d) - np.searchsorted(np.sort(d), d)) / len(d) for d in simulated.values()]
        smallest = np.min(shares, axis=0)
        for i in simulated:
            as_small = int((smallest <= claims[i].share).sum())
            found[i]["share_of_any"] = (1 + as_small) / (1 + grids)
    return found
