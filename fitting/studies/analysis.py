"""Everything that a report says, computed once into plain JSON types (F36): text, figures and pages read
only this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fitting.data.runs import Runs
from fitting.data.splits import INJECTION_ONCE, PAPER, REGRESSED
from fitting.errors import FitError
from fitting.estimation import diagnostics
from fitting.estimation.fits import fit, fit_architectures
from fitting.estimation.profile import profile_curve
from fitting.estimation.resampling import bootstrap
from fitting.estimation.results import FitResult
from fitting.laws.laws import ChinchillaLaw, JointLaw, Law
from fitting.laws.multipliers import FixedPower, Power
from fitting.studies import allocation, curves
from fitting.studies.distance import distance
from fitting.studies.minima import minima

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How an analysis is computed: `starts` of every fit, the `seed` of starts and resamples, threads (`workers`, None:
    all cores; results do not depend on them).
    """

    starts: int = 500
    seed: int = 0
    resamples: int = 200
    """Bootstrap resamples; 0 leaves intervals, profile and rival laws out."""
    rivals: bool = True
    """Whether other forms of the law are fitted and compared."""
    all_splits: bool = False
    """Whether phi is given under every split that is defined for the runs."""
    workers: int | None = None


def analyse(
    runs: Runs,
    law: Law | None = None,
    settings: Settings | None = None,
    *,
    without_exclusions: Runs | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Fit, question and apply a law; returns the content of fit.json.

    `without_exclusions` is the table before runs were excluded by a rule: the fit is then also made with
    them (F38). Raises `FitError` when the law is not identified by the runs.
    """
    law = law if law is not None else JointLaw()
    settings = settings or Settings()
    search: dict[str, Any] = {"starts": settings.starts, "seed": settings.seed, "workers": settings.workers}
    progress(f"fitting {law.name}, split {law.split.name}, {settings.starts} starts")
    result = fit(runs, law, **search)
    out: dict[str, Any] = {"schema_version": 1, "kind": "fit", "settings": asdict(settings)}
    out["data"] = _data(runs, result)
    name = parameter_of_interest(result)
    out["parameter_of_interest"] = name
    if without_exclusions is not None and len(without_exclusions) != len(runs):
        progress("fitting again with the excluded runs")
        out["with_excluded_runs"] = with_excluded_runs(without_exclusions, law, search)
    if settings.resamples:
        progress(
            f"bootstrap, {settings.resamples} resamples of {runs.cell_count} cells and of {len(runs)} runs"
        )
        try:
            result = bootstrap(
                runs, result, resamples=settings.resamples, seed=settings.seed, workers=settings.workers
            )
        except FitError as error:
            out["intervals_refused"] = str(error)
        curve = profile_curve(result, result.law.inputs(runs), np.log(runs.val_loss), name, settings.workers)
        out["profile"] = {"values": curve.values.tolist(), "statistic": curve.statistic.tolist()}
    out["fit"] = result.to_dict() | _multipliers(result, runs)
    if _is_power(result.law):
        progress("the paper's runs under the same split")
        out["published"] = distance(result, settings.seed, settings.workers)
        out["splits"] = _splits(runs, result, settings, search, progress)
        out["restricted"] = _restricted(runs, result.law, search, progress)
        out["phi_path"] = curves.phi_path(runs, result, settings.workers)
    progress("Chinchilla law per r")
    out["chinchilla"] = _chinchilla(runs, search)
    progress("budget halves and leaving groups out")
    out["halves"] = diagnostics.halves(runs, law, **search)
    out["leave_out"] = {
        group: diagnostics.leave_out(runs, result, labels, settings.workers)
        for group, labels in (("budget", runs.budget), ("r", runs.r), ("cell", runs.cell))
        if len(np.unique(labels)) > 2
    }
    out["residuals"] = {
        "by_r": diagnostics.residual_summary(result.residuals, runs.r),
        "by_budget": diagnostics.residual_summary(result.residuals, runs.budget),
        "scatter": _scatter(runs, result),
    }
    if settings.rivals and settings.resamples and isinstance(result.law, JointLaw):
        progress("rival laws")
        rivals = diagnostics.rival_laws(law.split)
        out["laws"] = diagnostics.compare_laws(runs, rivals, **search)
    progress("allocation")
    parabolas = allocation.parabolas(runs, result.law)
    out["minima"] = [asdict(m) for m in minima(runs, parabolas)]
    out["allocation"] = _allocation(runs, result, out["chinchilla"], parabolas)
    out["curves"] = curves.curves(runs, result, out.get("restricted", []))
    return out


def with_excluded_runs(runs: Runs, law: Law, search: dict[str, Any]) -> dict[str, Any]:
    """The fit with the runs that --exclude takes out (F38), or why there is none."""
    row: dict[str, Any] = {"runs": len(runs)}
    try:
        found = fit(runs, law, **search)
    except FitError as error:
        return row | {"parameters": None, "status": "not defined", "message": str(error)}
    return row | {"parameters": found.parameters, "status": found.status.value, "message": found.message}


def _scatter(runs: Runs, result: FitResult) -> dict[str, Any]:
    try:
        return asdict(diagnostics.scatter(result.log_residuals, runs.cell, len(result.theta)))
    except FitError as error:
        return {"refused": str(error)}


def parameter_of_interest(result: FitResult) -> str:
    """phi where the law has one, else its last parameter."""
    return "phi" if "phi" in result.parameters else list(result.parameters)[-1]


def _is_power(law: Law) -> bool:
    return isinstance(law, JointLaw) and type(law.multiplier) is Power


def _data(runs: Runs, result: FitResult) -> dict[str, Any]:
    x = result.law.inputs(runs)
    predicted = runs.val_loss - result.residuals
    points = [
        {
            "source": str(runs.source[i]), "r": float(runs.r[i]), "d_model": float(runs.d_model[i]),
            "budget": float(runs.budget[i]), "n": float(runs.n_total[i]), "n_once": float(x.n_once[i]),
            "n_rec": float(x.n_rec[i]), "n_at_r1": float(runs.n_at_r1[i]), "tokens": float(runs.tokens[i]),
            "flops_per_token": float(runs.flops_per_token[i]), "loss": float(runs.val_loss[i]),
            "predicted": float(predicted[i]),
            "residual": float(result.residuals[i]), "cell": int(runs.cell[i]),
        }
        for i in range(len(runs))
    ]  # fmt: skip
    labels = list(dict.fromkeys(runs.architecture.tolist()))
    return {
        "runs": len(runs),
        "recurrences": runs.recurrences.tolist(),
        "budgets": np.unique(runs.budget).tolist(),
        "cells": runs.cell_count,
        "tokens": float(runs.tokens.sum()),
        "training_flops": float(runs.training_flops.sum()),
        "flops_convention": runs.flops_convention,
        "architectures": labels,
        "tokens_per_parameter": [float(f(runs.tokens / runs.n_total)) for f in (np.min, np.max)],
        "excluded": [asdict(gone) for gone in runs.excluded],
        "points": points,
    }


def _multipliers(result: FitResult, runs: Runs) -> dict[str, Any]:
    return {"effective_ratios": curves.effective_ratios(runs, result.law, result.theta)}


def _splits(
    runs: Runs, result: FitResult, settings: Settings, search: dict[str, Any], progress: Progress
) -> list[dict[str, Any]]:
    chosen = [PAPER, INJECTION_ONCE, REGRESSED] if settings.all_splits else []
    rows = []
    for split in [result.law.split, *[s for s in chosen if s is not result.law.split]]:
        row: dict[str, Any] = {"split": split.name, "description": split.description}
        try:
            if split is result.law.split:
                other = result
            else:
                progress(f"split {split.name}")
                other = fit(runs, JointLaw(split=split), **search)
                if settings.resamples:
                    # The same refusal as that of the main fit is told there.
                    with suppress(FitError):
                        other = bootstrap(
                            runs, other, resamples=settings.resamples, seed=settings.seed, names=["phi"],
                            workers=settings.workers,
                        )  # fmt: skip
            row |= other.to_dict() | {
                "effective_ratios": curves.effective_ratios(runs, other.law, other.theta)
            }
        except FitError as error:
            row |= {"status": "undefined", "message": str(error)}
        rows.append(row)
    return rows


def _restricted(runs: Runs, law: Law, search: dict[str, Any], progress: Progress) -> list[dict[str, Any]]:
    rows = []
    for phi in (0.0, 1.0):
        progress(f"restricted fit phi = {phi:g}")
        rows.append({"phi": phi} | fit(runs, JointLaw(FixedPower(phi), law.split), **search).to_dict())
    return rows


def _chinchilla(runs: Runs, search: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for r in runs.recurrences:
        try:
            alone = fit_architectures(runs.take(runs.r == r), **search)[float(r)]
            rows.append({"r": float(r), "theta": alone.theta.tolist()} | alone.to_dict())
        except FitError as error:
            rows.append({"r": float(r), "status": "not identified", "message": str(error)})
    return rows


def _allocation(
    runs: Runs,
    result: FitResult,
    chinchilla: list[dict[str, Any]],
    parabolas: list[allocation.Parabola],
) -> dict[str, Any]:
    budgets = np.unique(runs.budget)
    optima = [p.optimum for p in parabolas]
    rows: list[dict[str, Any]] = []
    joint_optima: list[allocation.Optimum] = []
    for own in chinchilla:
        r = own["r"]
        row: dict[str, Any] = {"r": r}
        try:
            widths = allocation.Widths.of(runs, result.law, r)
        except FitError as error:
            rows.append(row | {"refusal": str(error)})
            continue
        joint = [allocation.law_optimum(result.law, result.theta, widths, c) for c in budgets]
        joint_optima += joint
        row |= {
            "exact_flops": widths.exact,
            "flops_slope": widths.slope,
            "from_joint_law": {
                "optima": [asdict(o) for o in joint],
                "exponents": allocation.exponents(joint),
            },
            "from_parabolas": {"exponents": allocation.exponents([o for o in optima if o.r == r])},
        }
        if "theta" in own:
            law = ChinchillaLaw()
            alone = [allocation.law_optimum(law, np.array(own["theta"]), widths, c) for c in budgets]
            alpha, beta = own["parameters"]["alpha"], own["parameters"]["beta"]
            row["from_own_chinchilla"] = {
                "status": own["status"],
                "closed_form_exponents": allocation.closed_form_exponents(alpha, beta, widths.slope),
                "optima": [asdict(o) for o in alone],
                "exponents": allocation.exponents(alone),
            }
        rows.append(row)
    return {
        "parabolas": [asdict(p) for p in parabolas],
        "per_r": rows,
        "frontier_gaps": {
            "parabolas": allocation.frontier_gaps(optima),
            "joint_law": allocation.frontier_gaps(joint_optima),
        },
    }
