"""What the figures and the page draw: effective sizes, the law along phi, and curves over width and budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.results import EffectiveRatio, FitResult
from fitting.estimation.solver import Problem, minimise
from fitting.laws import AdditiveLaw, Law
from fitting.studies.allocation import law_optimum
from fitting.studies.widths import Widths


def common_width(runs: Runs) -> float:
    """The width with the most runs among those that all r share (if there are none, among all)."""
    widths = np.unique(runs.d_model).tolist()
    shared = [d for d in widths if len(np.unique(runs.r[runs.d_model == d])) == len(runs.recurrences)]
    return float(max(shared or widths, key=lambda d: ((runs.d_model == d).sum(), -d)))


def effective_ratios(
    runs: Runs, law: Law, theta: np.ndarray, width: float | None = None
) -> tuple[EffectiveRatio, ...]:
    """A row for each r whose N(r=1) is known; none for a law without a size. The width is `common_width` by default."""
    if not isinstance(law, AdditiveLaw):
        return ()
    width = common_width(runs) if width is None else width
    x = law.inputs(runs)
    rows = []
    for r in runs.recurrences:
        found = np.flatnonzero((runs.r == r) & (runs.d_model == width))
        if not len(found):
            continue
        i = found[:1]
        size = np.exp(law.effective_size(theta[None, law.first_psi :], x.take(i))[0][0])
        # N(r=1) under the same split where such a run exists, so that r=1 has the ratio 1.
        plain = np.flatnonzero((runs.r == 1) & (runs.d_model == width))
        base = x.n_total[plain[:1]] if len(plain) else runs.n_at_r1[i]
        if not np.isfinite(base[0]):
            continue
        effective, unique = float(size[0] / base[0]), float(runs.n_total[i][0] / runs.n_at_r1[i][0])
        rows.append(EffectiveRatio(float(r), width, effective, unique, float(runs.flops_per_token[i][0])))
    return tuple(rows)


def phi_path(runs: Runs, result: FitResult, workers: int | None) -> tuple[dict[str, float], ...]:
    """For the slider, the law refitted with phi held at -0.5 to 1.5: parameters, `rmse` (nats) and `objective`."""
    law = result.law
    values = np.round(np.arange(-0.5, 1.5001, 0.025), 6)
    bounds = np.tile(np.asarray(law.bounds, dtype=float), (len(values), 1, 1))
    bounds[:, -1] = values[:, None]
    starts = np.tile(result.theta, (len(values), 1))
    starts[:, -1] = values
    observed, x = np.log(runs.val_loss), law.inputs(runs)
    problem = Problem(law, x, observed, np.ones(len(runs)), bounds[:, :, 0], bounds[:, :, 1], result.delta)
    found = minimise(problem, starts, workers=workers)
    loss = np.exp(law.log_loss_and_gradient(found.theta, x)[0])
    rmse = np.sqrt(((runs.val_loss - loss) ** 2).mean(axis=1))
    names = (*law.param_names, "rmse", "objective")
    rows = zip(law.to_reported(found.theta), rmse, found.objective, strict=True)
    return tuple(dict(zip(names, map(float, (*point, *rest)), strict=True)) for point, *rest in rows)


@dataclass(frozen=True)
class CurvesOfR:
    """Counts and FLOPs per token over the width (k,) at one r, and the compute-optimal loss of each law over C (m,)."""

    r: float
    d_model: tuple[float, ...]
    n_once: tuple[float, ...]
    n_rec: tuple[float, ...]
    flops_per_token: tuple[float, ...]
    frontier: dict[str, tuple[float | None, ...]]
    """Nats per token, by the name of the law."""


@dataclass(frozen=True)
class Curves:
    """What the figures draw; `budgets` (m,) are training FLOPs."""

    budgets: tuple[float, ...]
    per_r: tuple[CurvesOfR, ...]


def curves(runs: Runs, result: FitResult, restricted: Mapping[float, FitResult]) -> Curves:
    """Curves of the fitted law and of the fits `restricted` to a phi."""
    budgets = np.geomspace(runs.budget.min() / 1.5, runs.budget.max() * 1.5, 25)
    laws = {"law": (result.law, result.theta)}
    for phi, held in restricted.items():
        # Going through the reported values changes last digits; earlier reports did, so that `verify` needs it.
        laws[f"phi = {phi:g}"] = held.law, held.law.to_theta(held.parameters)
    rows = []
    for r in map(float, runs.recurrences):
        try:
            widths = Widths.of(runs, result.law, r)
        except FitError:
            continue
        d = np.geomspace(widths.sampled[0] / 1.3, widths.sampled[-1] * 1.3, 60)
        frontier = {
            name: tuple(law_optimum(law, theta, widths, c).loss for c in budgets)
            for name, (law, theta) in laws.items()
        }
        once, rec, flops = (tuple(column.tolist()) for column in (*widths.counts(d), widths.flops(d)))
        rows.append(CurvesOfR(r, tuple(d.tolist()), once, rec, flops, frontier))
    return Curves(tuple(budgets.tolist()), tuple(rows))
