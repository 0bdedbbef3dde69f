"""What the figures and the page draw: effective sizes, the law along phi, and curves over width and
budget.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.results import FitResult
from fitting.estimation.solver import Problem, minimise
from fitting.laws.laws import AdditiveLaw, JointLaw, Law
from fitting.laws.multipliers import FixedPower
from fitting.studies import allocation


def common_width(runs: Runs) -> float:
    """The width with most runs among those that all r share (else among all)."""
    shared = [
        d
        for d in np.unique(runs.d_model)
        if len(np.unique(runs.r[runs.d_model == d])) == len(runs.recurrences)
    ]
    candidates = shared or np.unique(runs.d_model).tolist()
    return float(max(candidates, key=lambda d: ((runs.d_model == d).sum(), -d)))


def effective_ratios(
    runs: Runs, law: Law, theta: np.ndarray, width: float | None = None
) -> list[dict[str, float]]:
    """(N_once + m·N_rec)/N(r=1) at one width, per r: hardly depends on where the injection is counted.

    Empty for a law without a size; left out where N(r=1) is unknown.
    Also the unique-parameter ratio N(r)/N(r=1) and the FLOPs per token.
    """
    if not isinstance(law, AdditiveLaw):
        return []
    width = common_width(runs) if width is None else width
    x = law.inputs(runs)
    rows = []
    for r in runs.recurrences:
        found = np.flatnonzero((runs.r == r) & (runs.d_model == width))
        if not len(found):
            continue
        i = found[:1]
        size = np.exp(law.effective_size(theta[None, 5:], x.take(i))[0][0])
        # N(r=1) under the same split where such a run exists, so that r=1 has the ratio 1
        plain = np.flatnonzero((runs.r == 1) & (runs.d_model == width))
        base = x.n_total[plain[:1]] if len(plain) else runs.n_at_r1[i]
        if not np.isfinite(base[0]):
            continue
        rows.append(
            {
                "r": float(r),
                "d_model": width,
                "effective": float(size[0] / base[0]),
                "unique": float(runs.n_total[i][0] / runs.n_at_r1[i][0]),
                "flops_per_token": float(runs.flops_per_token[i][0]),
            }
        )
    return rows


def phi_path(runs: Runs, result: FitResult, workers: int | None) -> list[dict[str, float]]:
    """The law refitted with phi held at values from -0.5 to 1.5: what the report's slider shows."""
    law = result.law
    values = np.round(np.arange(-0.5, 1.5001, 0.025), 6)
    bounds = np.tile(np.asarray(law.bounds, dtype=float), (len(values), 1, 1))
    bounds[:, -1] = values[:, None]
    starts = np.tile(result.theta, (len(values), 1))
    starts[:, -1] = values
    observed, x = np.log(runs.val_loss), law.inputs(runs)
    problem = Problem(law, x, observed, np.ones(len(runs)), bounds[:, :, 0], bounds[:, :, 1])
    found = minimise(problem, starts, workers=workers)
    loss = np.exp(law.log_loss_and_gradient(found.theta, x)[0])
    rmse = np.sqrt(((runs.val_loss - loss) ** 2).mean(axis=1))
    rows = []
    for point, error, objective in zip(law.to_reported(found.theta), rmse, found.objective, strict=True):
        rows.append(
            dict(zip(law.param_names, map(float, point), strict=True))
            | {"rmse": float(error), "objective": float(objective)}
        )
    return rows


def curves(runs: Runs, result: FitResult, restricted: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and FLOPs over the width, and the law's compute-optimal loss over C, per r, for figures."""
    budgets = np.geomspace(runs.budget.min() / 1.5, runs.budget.max() * 1.5, 25)
    laws: list[tuple[str, Law, np.ndarray]] = [("law", result.law, result.theta)]
    for row in restricted:
        fixed = JointLaw(FixedPower(row["phi"]), result.law.split)
        laws.append((f"phi = {row['phi']:g}", fixed, fixed.to_theta(row["parameters"])))
    rows = []
    for r in runs.recurrences:
        try:
            widths = allocation.Widths.of(runs, result.law, float(r))
        except FitError:
            continue
        d = np.geomspace(widths.sampled[0] / 1.3, widths.sampled[-1] * 1.3, 60)
        once, rec = widths.counts(d)
        frontier = {
            name: [allocation.law_optimum(law, theta, widths, c).loss for c in budgets]
            for name, law, theta in laws
        }
        rows.append(
            {
                "r": float(r),
                "d_model": d.tolist(),
                "n_once": once.tolist(),
                "n_rec": rec.tolist(),
                "flops_per_token": widths.flops(d).tolist(),
                "frontier": frontier,
            }
        )
    return {"budgets": budgets.tolist(), "per_r": rows}
