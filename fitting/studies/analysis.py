"""Everything that a report says about a fit, computed once and frozen: text, figures and page read nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fitting.data.plain import optional, plain
from fitting.data.provenance import Provenance
from fitting.data.runs import CELLS_BY_BUDGET, Exclusion, Runs
from fitting.data.splits import INJECTION_ONCE, PAPER, REGRESSED
from fitting.errors import FitError
from fitting.estimation import diagnostics
from fitting.estimation.calibration import check_grids
from fitting.estimation.diagnostics import (
    Attempt,
    GroupResidual,
    Half,
    LeftOut,
    RivalFit,
    RivalRefused,
    Scatter,
)
from fitting.estimation.fits import fit
from fitting.estimation.identification import (
    Judgement,
    LackOfFit,
    Limits,
    Sensitivity,
    judged,
    lack_of_fit,
    sensitivity,
)
from fitting.estimation.objective import DELTA
from fitting.estimation.profile import profile_curve
from fitting.estimation.resampling import bootstrap
from fitting.estimation.results import FitResult, FitSummary, Refused
from fitting.estimation.solver import LARGE
from fitting.laws import ChinchillaLaw, FixedPower, JointLaw, Law, OneTokenLaw, Power
from fitting.studies.allocation import Allocation, Minimum, allocate, minima, parabolas
from fitting.studies.curves import Curves, curves, effective_ratios, phi_path
from fitting.studies.matching import Matching, match
from fitting.studies.paper import Distance, distance

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How an analysis is computed: `starts` of every fit, the `seed` of starts and resamples, and the number of threads
    (`workers`, None: all cores; results do not depend on it)."""

    starts: int = 500
    seed: int = 0
    resamples: int = 200
    """Bootstrap resamples; 0 leaves intervals, profile and rival laws out."""
    rivals: bool = True
    """Whether other forms of the law are fitted and compared."""
    all_splits: bool = False
    """Whether phi is given under every split that is defined for the runs."""
    workers: int | None = None
    delta: float | None = DELTA
    """Where Huber's function turns linear, in log-loss; None: least squares."""
    limits: Limits | None = field(default_factory=Limits)
    """From where on a fit is doubted; None: only if the search failed, as in reports from before there were limits."""
    sensitivity: bool = True
    """Whether the law is also fitted with other thresholds of Huber's function."""
    grids: int = 200
    """Simulated grids behind each claim about rival laws and matching; 0 leaves only what needs none."""
    matching: bool = True
    """Whether phi is also read by matching."""


@dataclass(frozen=True)
class Point:
    """One run: parameters under the law's split, training FLOPs per token, losses and residual in nats per token."""

    source: str
    cell: int
    r: float
    d_model: float
    budget: float
    n: float
    n_once: float
    n_rec: float
    n_at_r1: float
    tokens: float
    flops_per_token: float
    loss: float
    predicted: float
    residual: float


@dataclass(frozen=True)
class Data:
    """The runs that were fitted, and those that were left out."""

    runs: int
    recurrences: tuple[float, ...]
    budgets: tuple[float, ...]
    cells: int
    tokens: float
    training_flops: float
    flops_convention: str
    architectures: tuple[str, ...]
    tokens_per_parameter: tuple[float, float]
    """Least and most."""
    excluded: tuple[Exclusion, ...]
    points: tuple[Point, ...]
    mixed: tuple[str, ...] | None = optional()
    """How the runs differ in what makes losses compare, where that was allowed."""
    cells_by: str | None = optional()
    """What makes a cell, if it is not budget and architecture."""


@dataclass(frozen=True)
class ProfileCurve:
    """The profile statistic T at values of the parameter of interest."""

    values: tuple[float, ...]
    statistic: tuple[float, ...]


@dataclass(frozen=True)
class Residuals:
    """What the residuals say, in nats; the scatter in log-loss."""

    by_r: tuple[GroupResidual, ...]
    by_budget: tuple[GroupResidual, ...]
    scatter: Scatter | dict[str, str]
    """Or {"refused": why it is not known}."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The content of fit.json. What the law or the settings leave out is None and has no key there."""

    settings: Settings
    data: Data
    parameter_of_interest: str
    with_excluded_runs: Attempt | None = optional()
    """The fit with the runs that --exclude takes out."""
    intervals_refused: str | None = optional()
    profile: ProfileCurve | None = optional()
    fit: FitSummary
    published: Distance | None = optional()
    splits: tuple[FitSummary | Refused, ...] | None = optional()
    restricted: tuple[FitSummary, ...] | None = optional()
    phi_path: tuple[dict[str, float], ...] | None = optional()
    chinchilla: tuple[FitSummary | Refused, ...]
    halves: tuple[Half, ...]
    leave_out: dict[str, tuple[LeftOut, ...]]
    judgement: Judgement | None = optional()
    lack_of_fit: LackOfFit | None = optional()
    """None without repeats."""
    sensitivity: tuple[Sensitivity, ...] | None = optional()
    residuals: Residuals
    laws: tuple[RivalFit | RivalRefused, ...] | None = optional()
    matching: Matching | None = optional()
    matching_refused: str | None = optional()
    """Why nothing could be matched, if so."""
    minima: tuple[Minimum, ...]
    allocation: Allocation
    curves: Curves
    provenance: Provenance | None = optional()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: the content of fit.json."""
        return {"schema_version": 1, "kind": "fit", **plain(self)}

    @property
    def doubts(self) -> list[str]:
        """Why the fit, or that under another split, is not to be trusted; empty if nothing is wrong."""
        found = [] if self.fit.status == "ok" else [self.fit.message]
        others = [split for split in self.splits or () if split.split != self.fit.split]
        wrong = [split for split in others if split.status not in ("ok", "undefined")]
        found += self.matching.doubts if self.matching else []
        return found + [f"split {split.split}: {split.message}" for split in wrong]


def analyse(
    runs: Runs,
    law: Law | None = None,
    settings: Settings | None = None,
    *,
    without_exclusions: Runs | None = None,
    progress: Progress = lambda _: None,
) -> Analysis:
    """Fit a law, question it and apply it.

    `without_exclusions` is the table before runs were excluded by a rule: the fit is then also made with them. Raises
    `FitError` if the runs do not identify the law.
    """
    law = law or JointLaw()
    settings = settings or Settings()
    check_grids(settings.grids)
    drawing: dict[str, Any] = {"seed": settings.seed, "workers": settings.workers}
    delta = math.inf if settings.delta is None else settings.delta
    search = {"starts": settings.starts, "delta": delta, **drawing}
    progress(f"fitting {law.name}, split {law.split.name}, {settings.starts} starts")
    result = fit(runs, law, **search)
    name = parameter_of_interest(result)
    # Fields that only some laws, runs and settings have.
    more: dict[str, Any] = {}
    if without_exclusions is not None and len(without_exclusions) != len(runs):
        progress("fitting again with the excluded runs")
        more["with_excluded_runs"] = diagnostics.attempt(without_exclusions, law, "not defined", search)
    if settings.resamples:
        cells = f"{runs.cell_count} cells and of {len(runs)} runs"
        progress(f"bootstrap, {settings.resamples} resamples of {cells}")
        try:
            result = bootstrap(runs, result, resamples=settings.resamples, **drawing)
        except FitError as error:
            more["intervals_refused"] = str(error)
        x, observed = result.law.inputs(runs), np.log(runs.val_loss)
        if len(runs) <= LARGE:
            curve = profile_curve(result, x, observed, name, settings.workers)
            more["profile"] = ProfileCurve(tuple(curve.values.tolist()), tuple(curve.statistic.tolist()))
    if settings.limits is not None:
        progress("leaving out every run in turn")
        result, more["judgement"] = judged(runs, result, name, settings.limits, settings.workers)
        more["lack_of_fit"] = lack_of_fit(runs, result)
    if settings.sensitivity:
        progress("other thresholds of Huber's function")
        others = {key: value for key, value in search.items() if key != "delta"}
        more["sensitivity"] = sensitivity(runs, law, delta, **others)
    restricted: dict[float, FitResult] = {}
    if isinstance(result.law, JointLaw) and type(result.law.multiplier) is Power:
        progress("the paper's runs under the same split")
        more["published"] = distance(result, **drawing)
        more["splits"] = _splits(runs, result, settings, progress)
        for phi in (0.0, 1.0):
            progress(f"restricted fit phi = {phi:g}")
            restricted[phi] = fit(runs, JointLaw(FixedPower(phi), law.split), **search)
        more["restricted"] = tuple(f.summary(phi=phi) for phi, f in restricted.items())
        if len(runs) <= LARGE:
            more["phi_path"] = phi_path(runs, result, settings.workers)
    progress("Chinchilla law per r")
    rows, alone = _chinchilla(runs, law.split.count, search)
    progress("budget halves and leaving groups out")
    by_half = diagnostics.halves(runs, law, **search)
    groups = {"budget": runs.budget, "r": runs.r, "cell": runs.cell}
    left_out = {
        group: diagnostics.leave_out(runs, result, labels, settings.workers)
        for group, labels in groups.items()
        if len(np.unique(labels)) > 2
    }
    by_r, by_budget = (
        diagnostics.residual_summary(result.residuals, labels) for labels in (runs.r, runs.budget)
    )
    scatter: Scatter | dict[str, str]
    try:
        scatter = diagnostics.scatter(result.log_residuals, runs.cell, len(result.theta))
    except FitError as error:
        scatter = {"refused": str(error)}
    if settings.rivals and settings.resamples and isinstance(result.law, JointLaw):
        progress("rival laws")
        more["laws"] = diagnostics.compare_laws(
            runs, diagnostics.rival_laws(law.split), grids=settings.grids, **search
        )
    if settings.matching and has_free_phi(result.law):
        asked = {"starts": settings.starts, "simulations": settings.grids, **drawing}
        try:
            more["matching"] = match(runs, result.law, joint=result, progress=progress, **asked)
        except FitError as error:
            more["matching_refused"] = str(error)
    progress("allocation")
    cells_curves = parabolas(runs, result.law)
    return Analysis(
        settings=settings,
        data=_data(runs, result),
        parameter_of_interest=name,
        fit=result.summary(effective_ratios=effective_ratios(runs, result.law, result.theta)),
        chinchilla=rows,
        halves=by_half,
        leave_out=left_out,
        residuals=Residuals(by_r, by_budget, scatter),
        minima=minima(runs, cells_curves),
        allocation=allocate(runs, result, alone, cells_curves),
        curves=curves(runs, result, restricted),
        **more,
    )


def has_free_phi(law: Law) -> bool:
    """Whether the law's multiplier is r^phi, so that matching estimates what it does."""
    inner = law.joint if isinstance(law, OneTokenLaw) else law
    return isinstance(inner, JointLaw) and type(inner.multiplier) is Power


def parameter_of_interest(result: FitResult) -> str:
    """phi where the law has one, else its last parameter."""
    return "phi" if "phi" in result.parameters else list(result.parameters)[-1]


def _data(runs: Runs, result: FitResult) -> Data:
    x = result.law.inputs(runs)
    predicted = runs.val_loss - result.residuals
    columns = (
        runs.r, runs.d_model, runs.budget, runs.n_total, x.n_once, x.n_rec, runs.n_at_r1, runs.tokens,
        runs.flops_per_token, runs.val_loss, predicted, result.residuals,
    )  # fmt: skip
    points = tuple(
        Point(str(source), int(cell), *map(float, numbers))
        for source, cell, *numbers in zip(runs.source, runs.cell, *columns, strict=True)
    )
    ratio = runs.tokens / runs.n_total
    return Data(
        runs=len(runs),
        recurrences=tuple(runs.recurrences.tolist()),
        budgets=tuple(np.unique(runs.budget).tolist()),
        cells=runs.cell_count,
        tokens=float(runs.tokens.sum()),
        training_flops=float(runs.training_flops.sum()),
        flops_convention=runs.flops_convention,
        architectures=tuple(dict.fromkeys(runs.architecture.tolist())),
        tokens_per_parameter=(float(ratio.min()), float(ratio.max())),
        excluded=runs.excluded,
        points=points,
        mixed=runs.mixed or None,
        cells_by=None if runs.cells_by == CELLS_BY_BUDGET else runs.cells_by,
    )


def _splits(
    runs: Runs, result: FitResult, settings: Settings, progress: Progress
) -> tuple[FitSummary | Refused, ...]:
    drawing: dict[str, Any] = {"seed": settings.seed, "workers": settings.workers}
    own = result.law.split
    chosen = [s.saying(own.count) for s in (PAPER, INJECTION_ONCE, REGRESSED)] if settings.all_splits else []
    rows: list[FitSummary | Refused] = []
    for split in [own, *[s for s in chosen if s != own]]:
        other = result
        try:
            if split != own:
                progress(f"split {split.name}")
                other = fit(
                    runs, JointLaw(split=split), starts=settings.starts, delta=result.delta, **drawing
                )
                if settings.resamples:
                    # If this is refused, so was the main fit's bootstrap, and its section says why.
                    with suppress(FitError):
                        count = settings.resamples
                        other = bootstrap(runs, other, resamples=count, names=["phi"], **drawing)
            ratios = effective_ratios(runs, other.law, other.theta)
        except FitError as error:
            what, why = split.description, str(error)
            rows.append(Refused(split=split.name, description=what, status="undefined", message=why))
        else:
            rows.append(other.summary(description=split.description, effective_ratios=ratios))
    return tuple(rows)


def _chinchilla(
    runs: Runs, count: str, search: dict[str, Any]
) -> tuple[tuple[FitSummary | Refused, ...], dict[float, FitResult]]:
    rows: list[FitSummary | Refused] = []
    alone = {}
    for r in map(float, runs.recurrences):
        try:
            alone[r] = fit(runs.take(runs.r == r), ChinchillaLaw(count), **search)
            rows.append(alone[r].summary(r=r, theta=tuple(alone[r].theta.tolist())))
        except FitError as error:
            rows.append(Refused(r=r, status="not identified", message=str(error)))
    return tuple(rows), alone
