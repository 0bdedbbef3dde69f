"""What the residuals say, and how laws compare on runs they have not seen.

Residuals are observed - predicted, in nats. Shapes: n runs, G groups held out in turn, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fitting.data.runs import Runs
from fitting.data.splits import Split
from fitting.errors import FitError
from fitting.estimation.fits import WORST_CONDITION, at_bounds, conditioning, fit
from fitting.estimation.resampling import refit
from fitting.estimation.results import FitResult
from fitting.laws.laws import JointLaw, Law
from fitting.laws.multipliers import (
    DriftingPower,
    FixedPower,
    LogGrowth,
    PerRecurrence,
    Power,
    Saturating,
    TokenDriftingPower,
)


def residual_summary(residuals: np.ndarray, labels: np.ndarray) -> list[dict[str, float]]:
    """Mean, largest size and RMSE of residuals (n,) for every distinct label (n,)."""
    rows = []
    for label in np.unique(labels):
        chosen = residuals[labels == label]
        rows.append(
            {
                "group": float(label),
                "runs": len(chosen),
                "mean": float(chosen.mean()),
                "max": float(np.abs(chosen).max()),
                "rmse": float(np.sqrt((chosen**2).mean())),
            }
        )
    return rows


@dataclass(frozen=True)
class Scatter:
    """Standard deviations of log-residuals: of a run within its cell, and of the cells' own offsets."""

    run: float
    cell: float
    cell_share_of_mean: float
    """Spread of the cells' means over the spread that independent runs would give them; 1 means no cell
    effect.
    """


def scatter(residuals: np.ndarray, cell: np.ndarray, parameters: int) -> Scatter:
    """One-way analysis of variance of residuals (n,) over cells (n,), degrees of freedom of the fit taken
    off. Raises `FitError` when no cell has two runs: the two cannot be told apart then.
    """
    cells, counts = np.unique(cell, return_counts=True)
    if counts.max() < 2:
        raise FitError(
            f"no cell of {len(cells)} has two runs, so scatter of runs and of cells cannot be told apart. Add "
            "another size to some (budget, architecture) cell"
        )
    means = np.array([residuals[cell == c].mean() for c in cells])
    within_freedom = max(len(residuals) - len(cells), 1)
    within = float(sum(((residuals[cell == c] - m) ** 2).sum() for c, m in zip(cells, means, strict=True)))
    within /= within_freedom
    between_freedom = max(len(cells) - parameters, 1)
    between = float((counts * means**2).sum()) / between_freedom
    size = float((counts.sum() - (counts**2).sum() / counts.sum()) / max(len(cells) - 1, 1))
    effect = max(0.0, (between - within) / size)
    ratio = float(np.sqrt(between / within)) if within > 0 else float("inf")
    return Scatter(float(np.sqrt(within)), float(np.sqrt(effect)), ratio)


def halves(
    runs: Runs, law: Law, *, starts: int, seed: int, workers: int | None = None
) -> list[dict[str, Any]]:
    """The law fitted to the lower and to the upper half of the budgets; a half that cannot carry it says
    why.
    """
    budgets = np.unique(runs.budget)
    cut = budgets[(len(budgets) - 1) // 2]
    rows = []
    for name, chosen in (("lower half", runs.budget <= cut), ("upper half", runs.budget > cut)):
        part = runs.take(chosen)
        row: dict[str, Any] = {"half": name, "runs": len(part), "budgets": np.unique(part.budget).tolist()}
        try:
            result = fit(part, law, starts=starts, seed=seed, workers=workers)
            row |= {"parameters": result.parameters, "status": result.status.value, "message": result.message}
        except FitError as error:
            row |= {"parameters": None, "status": "not identified", "message": str(error)}
        rows.append(row)
    return rows


def leave_out(
    runs: Runs, result: FitResult, groups: np.ndarray, workers: int | None = None
) -> list[dict[str, Any]]:
    """Refit without each group (n,) in turn; the reported parameters and the RMSE on what was left out."""
    labels = np.unique(groups)
    x = result.law.inputs(runs)
    observed = np.log(runs.val_loss)
    weights = np.array([(groups != label).astype(float) for label in labels])
    theta = refit(result.law, x, observed, result.theta, weights, result.seed, workers)
    log_predicted, jacobian = result.law.log_loss_and_gradient(theta, x)
    predicted = np.exp(log_predicted)
    rows = []
    for label, point, loss, slope in zip(labels, theta, predicted, jacobian, strict=True):
        out = groups == label
        values = result.law.to_reported(point)
        rows.append(
            {
                "left_out": label.item() if hasattr(label, "item") else label,
                "runs": int(out.sum()),
                "parameters": dict(zip(result.law.param_names, map(float, values), strict=True)),
                "held_out_rmse": float(np.sqrt(((runs.val_loss - loss)[out] ** 2).mean())),
                "status": _refit_status(result.law, point, slope[:, ~out]),
            }
        )
    return rows


def _refit_status(law: Law, theta: np.ndarray, jacobian: np.ndarray) -> str:
    """What can be said of a refit without a search of its own: at the box's edge, or ill-conditioned."""
    found = []
    near = at_bounds(law, theta)
    if near:
        found.append(f"at bound: {', '.join(near)}")
    # Held parameters are not estimated, so that they do not count for the condition of the others.
    free = np.array([name not in near for name in law.param_names])
    if free.any() and conditioning(jacobian[free])[0] > WORST_CONDITION:
        found.append("ill-conditioned")
    return "; ".join(found) or "ok"


def rival_laws(split: Split) -> list[Law]:
    """The joint law and its rivals, under one split."""
    forms = (
        Power(), FixedPower(0), FixedPower(1), PerRecurrence(), Saturating(), LogGrowth(),
        DriftingPower(), TokenDriftingPower(),
    )  # fmt: skip
    return [JointLaw(form, split) for form in forms]


def aicc(result: FitResult) -> float:
    """2n·log Q + 2k + 2k(k+1)/(n-k-1) with k = parameters + 1: lower is better, differences are what
    counts.
    """
    n, k = result.runs, len(result.parameters) + 1
    if n - k - 1 <= 0 or result.objective <= 0:
        return float("nan")
    return 2 * n * float(np.log(result.objective)) + 2 * k + 2 * k * (k + 1) / (n - k - 1)


def compare_laws(
    runs: Runs, laws: Sequence[Law], *, starts: int, seed: int, workers: int | None = None
) -> list[dict[str, Any]]:
    """Every law fitted to the same runs: AICc and held-out RMSE by budget, by cell and by r (nats).

    A parameter for one r alone cannot be learnt without that r, so `PerRecurrence` has no held-out error by
    r.
    """
    rows: list[dict[str, Any]] = []
    for law in laws:
        try:
            result = fit(runs, law, starts=starts, seed=seed, workers=workers)
        except FitError as error:
            rows.append(
                {"law": law.name, "parameters": None, "aicc": float("nan"), "status": "not estimated",
                 "message": str(error)}
            )  # fmt: skip
            continue

        def held_out(groups: np.ndarray, result: FitResult = result) -> float:
            out = leave_out(runs, result, groups, workers)
            total = sum(row["runs"] * row["held_out_rmse"] ** 2 for row in out)
            return float(np.sqrt(total / len(runs)))

        by_r = (
            not isinstance(getattr(result.law, "multiplier", None), PerRecurrence)
            and len(runs.recurrences) > 2
        )
        rows.append(
            {
                "law": result.law.name,
                "parameters": result.parameters,
                "count": len(result.parameters),
                "aicc": aicc(result),
                "rmse": result.rmse,
                "r_squared": result.r_squared,
                "held_out_by_budget": held_out(runs.budget),
                "held_out_by_cell": held_out(runs.cell),
                "held_out_by_r": held_out(runs.r) if by_r else None,
                "status": result.status.value,
                "message": result.message,
            }
        )
    best = min((row["aicc"] for row in rows if np.isfinite(row["aicc"])), default=float("nan"))
    return [row | {"aicc_difference": row["aicc"] - best} for row in rows]
