"""A case study against its baseline: the change of phi, three ways, and the rival reading as a constant shift.

Both arms are cut to their shared budgets; r = 1 runs are shared. Cells are (budget, r); a resample draws both arms of a
cell together, so that what the arms have in common cancels. Which reading the runs prefer is judged on grids drawn from
the simpler one, in which each arm has cells of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fitting.data.plain import optional, plain
from fitting.data.provenance import Provenance
from fitting.data.runs import Exclusion, Runs
from fitting.data.splits import PAPER, Split
from fitting.estimation.calibration import (
    Claim,
    Fitted,
    check_grids,
    gain,
    noise_left,
    objectives,
    share,
    simulated_gains,
)
from fitting.estimation.diagnostics import aicc
from fitting.estimation.fits import fit_inputs
from fitting.estimation.resampling import draw_counts, percentile_interval, refit, widened
from fitting.estimation.results import FitResult, Interval
from fitting.estimation.solver import Problem, minimise
from fitting.laws import Inputs, JointLaw, Law, LossShift, Power, StudyPower
from fitting.studies.arms import Arms, Channels, channels, matched_pairs
from fitting.studies.extra_runs import ExtraRun, check_further, extra_runs

TELLING = 4.0
"""AICc difference from which one reading is preferred where no grids are drawn, as in older reports."""
EXTRA_RUNS = 5
"""So many of the runs that would tell the readings apart are listed."""


@dataclass(frozen=True)
class Estimate:
    """One estimate of phi_study - phi_baseline, with its intervals. It is never printed without the rival shift."""

    method: str
    phi_baseline: float
    phi_study: float
    delta_phi: float
    intervals: tuple[Interval, ...]


@dataclass(frozen=True)
class Reading:
    """One explanation of the study's losses, fitted to both arms at once."""

    name: str
    delta_phi: float | None
    shift: float | None
    objective: float
    aicc: float
    trusted: bool
    message: str
    parameters: dict[str, float] = field(default_factory=dict)
    """All of the law's; where the arms differ, the baseline's."""


@dataclass(frozen=True)
class Point:
    """One run as it was compared: `arm` is shared (r=1), baseline or study; the prediction is the paired law's."""

    source: str
    arm: str
    r: float
    d_model: float
    budget: float
    n: float
    tokens: float
    flops_per_token: float
    loss: float
    predicted: float


@dataclass(frozen=True)
class CompareSettings:
    """How a comparison is computed; see `fitting.Settings`."""

    starts: int
    seed: int
    resamples: int
    workers: int | None
    grids: int = 200
    """Simulated grids behind each claim; 0 prefers a reading by AICc alone."""
    more_budgets: tuple[float, ...] = ()
    more_widths: tuple[float, ...] = ()
    """Budgets and widths at which an extra run is possible, besides those of the runs."""


@dataclass(frozen=True)
class PairedWithExcluded:
    """The paired delta phi with the runs that --exclude takes out. If it is None, `message` says why."""

    delta_phi: float | None
    status: str
    message: str


@dataclass(frozen=True, eq=False)
class Comparison:
    """What a case study changed: the content of comparison.json."""

    settings: CompareSettings
    split: str
    runs: tuple[int, int, int]
    """Shared r=1 runs, baseline runs and study runs with r>1."""
    budgets: tuple[float, ...]
    cells: int
    estimates: tuple[Estimate, ...]
    readings: tuple[Reading, ...]
    verdict: str
    preferred: str
    channels: tuple[Channels, ...]
    problems: tuple[str, ...]
    seed: int
    resamples: int
    intervals_refused: str | None = None
    """Why there are no intervals, if there are none."""
    excluded: tuple[Exclusion, ...] = ()
    """Runs of either arm that the comparison leaves out, each with its rule."""
    warnings: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()
    with_excluded_runs: PairedWithExcluded | None = optional()
    claims: tuple[Claim, ...] | None = optional()
    """What the verdict rests on: a change against none; if that holds, the better change against the other, and both
    against the better one. None: AICc decided."""
    extra_runs: tuple[ExtraRun, ...] | None = optional()
    """Where the runs cannot tell two readings apart: the added runs that would do most."""
    provenance: Provenance | None = optional()

    @property
    def paired(self) -> Estimate:
        """The paired estimate, in which one law is fitted to both arms."""
        return next(estimate for estimate in self.estimates if estimate.method == "paired")

    @property
    def trusted(self) -> bool:
        """Whether every fit behind it is to be trusted."""
        return not self.problems

    @property
    def status(self) -> str:
        """`trusted` in words."""
        return "ok" if self.trusted else "not to be trusted"

    @property
    def message(self) -> str:
        """Every reason for doubt."""
        return "; ".join(self.problems) or "every fit behind it is to be trusted"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: the content of comparison.json."""
        judged = {"trusted": self.trusted, "status": self.status, "message": self.message}
        return {"schema_version": 1, "kind": "comparison", **plain(self), **judged}


def compare(
    baseline: Runs,
    study: Runs,
    *,
    split: Split = PAPER,
    resamples: int = 200,
    starts: int = 500,
    seed: int = 0,
    workers: int | None = None,
    grids: int = 200,
    more_budgets: tuple[float, ...] = (),
    more_widths: tuple[float, ...] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Compare a study with its baseline on their shared budgets; the module's docstring says how.

    Raises `FitError` when nothing is shared, r = 1 is missing, an arm mixes architectures, or grids are too few.
    """
    check_grids(grids)
    check_further(more_budgets, more_widths)
    arms = Arms.of(baseline, study, split)
    search: dict[str, Any] = {"starts": starts, "seed": seed, "workers": workers}
    power, paired_law = JointLaw(Power(), split), JointLaw(StudyPower(), split)
    progress("separate fits")
    fits = [fit_inputs(power, arms.x.take(chosen), arms.runs.take(chosen), **search) for chosen in arms.sides]
    progress("paired fits: delta phi, shift, both, neither")
    laws: dict[str, Law] = {"neither": power, "delta phi": paired_law}
    laws |= {"shift": LossShift(power), "both": LossShift(paired_law)}
    found = {name: fit_inputs(law, arms.x, arms.runs, **search) for name, law in laws.items()}
    paired = found["delta phi"]
    transfer = _transfer(power, arms, fits[0].theta[None], np.ones((1, len(arms.runs))), workers)[0]
    points = {
        "separate": (fits[0]["phi"], fits[1]["phi"]),
        "paired": (paired["phi"], paired["phi"] + paired["delta_phi"]),
        "transfer": (fits[0]["phi"], float(transfer)),
    }
    intervals: dict[str, tuple[Interval, ...]] = {}
    no_intervals = arms.no_bootstrap(len(fits[0].theta), len(paired.theta), resamples)
    if not resamples:
        no_intervals = "no bootstrap was asked for"
    if not no_intervals:
        progress(f"{resamples} resamples of {arms.cells} cells, both arms drawn together")
        assumes = "cells (budget, r) are independent, both arms drawn together"
        for method, drawn in _draw(arms, fits, paired, resamples, seed, workers).items():
            phi0, phi1 = points[method]
            block = percentile_interval(drawn, "block bootstrap", assumes, seed)
            wide = widened(block, phi1 - phi0, arms.cells, len(paired.theta))
            intervals[method] = (wide, block)
    readings = []
    for name, r in found.items():
        changes = r.parameters.get("delta_phi"), r.parameters.get("shift")
        readings.append(Reading(name, *changes, r.objective, aicc(r), r.trusted, r.message, r.parameters))
    claims, extra = None, None
    if grids and all(math.isfinite(reading.aicc) for reading in readings):
        progress(f"readings, judged on {grids} grids drawn from each simpler one")
        fitted = {name: Fitted(r.law, r.theta, r.delta) for name, r in found.items()}
        claims = judge_readings(
            fitted,
            arms.x,
            np.log(arms.runs.val_loss),
            arms.own_cells,
            grids=grids,
            seed=seed,
            workers=workers,
        )
        untold = next((claim for claim in claims[:2] if not claim.holds), None)
        if untold:
            pair = fitted[untold.simpler], fitted[untold.richer]
            extra = extra_runs(arms, *pair, untold.noise, more_budgets, more_widths)[:EXTRA_RUNS]
    preferred, verdict = judge(tuple(readings), claims)
    pairs = matched_pairs(arms.x.study, arms.runs.r, arms.runs.d_model, arms.runs.budget)
    at = (arms.runs.val_loss, arms.runs.d_model, arms.runs.budget)
    parts = channels(pairs, arms.x, *at, paired.parameters, points["paired"]) if pairs else ()
    named = {"baseline alone": fits[0], "study alone": fits[1]}
    named |= {f"reading '{name}'": result for name, result in found.items()}
    doubts = [f"{name}: {result.message}" for name, result in named.items() if not result.trusted]
    return Comparison(
        settings=CompareSettings(starts, seed, resamples, workers, grids, more_budgets, more_widths),
        split=split.name,
        runs=arms.sizes,
        budgets=tuple(np.unique(arms.runs.budget).tolist()),
        cells=arms.cells,
        estimates=tuple(
            Estimate(method, phi0, phi1, phi1 - phi0, intervals.get(method, ()))
            for method, (phi0, phi1) in points.items()
        ),
        readings=tuple(readings),
        verdict=verdict,
        preferred=preferred,
        channels=parts,
        problems=tuple(doubts),
        seed=seed,
        resamples=resamples,
        intervals_refused=no_intervals,
        excluded=arms.dropped,
        warnings=arms.warnings,
        points=_points(arms, paired),
        claims=claims,
        extra_runs=extra,
    )


def judge_readings(
    fitted: Mapping[str, Fitted],
    x: Inputs,
    log_loss: np.ndarray,
    cell: np.ndarray,
    *,
    grids: int,
    seed: int,
    workers: int | None = None,
) -> tuple[Claim, ...]:
    """The claims about the four readings, fitted to log_loss (n,) with cells (n,), each on so many grids."""
    lowest = {
        name: objectives(law, theta[None], x, log_loss, delta) for name, (law, theta, delta) in fitted.items()
    }

    def claim(simpler: str, *richer: str) -> Claim:
        best = min(richer, key=lambda name: float(lowest[name][0]))
        rivals = [fitted[name] for name in richer]
        noise = noise_left(fitted[simpler], x, log_loss, cell)
        simulated = simulated_gains(fitted[simpler], rivals, x, cell, noise, grids, seed, workers).max(axis=0)
        seen = float(gain(lowest[simpler], lowest[best])[0])
        return Claim(simpler, best, seen, share(seen, simulated), grids, noise)

    change = claim("neither", "delta phi", "shift")
    if not change.holds:
        return (change,)
    best = change.richer
    other = "shift" if best == "delta phi" else "delta phi"
    return change, claim(other, best), claim(best, "both")


def judge(readings: tuple[Reading, ...], claims: tuple[Claim, ...] | None) -> tuple[str, str]:
    """(preferred reading, sentence): a change of phi, a constant shift, neither, or not to be told apart.

    Without claims AICc decides. The sentence names every reading whose fit is not to be trusted.
    """
    preferred, sentence = _by_grids(readings, claims) if claims else _by_aicc(readings)
    doubtful = [f"'{reading.name}'" for reading in readings if not reading.trusted]
    if doubtful:
        sentence += f"; not to be trusted, because of the status of {', '.join(doubtful)}"
    return preferred, sentence + "."


def _by_grids(readings: tuple[Reading, ...], claims: tuple[Claim, ...]) -> tuple[str, str]:
    by = {reading.name: reading for reading in readings}
    values = f"delta phi alone {by['delta phi'].delta_phi:+.4f}, shift alone {by['shift'].shift:+.4f} nats"
    change, *more = claims
    of = f"{change.grids} simulated grids"
    if not change.holds:
        text = f"no change is needed to explain the study: of {of} without one, {change.share:.1%} gain as much by"
        return "neither", f"{text} delta phi or a shift ({values})"
    apart, both = more
    sentence = f"a gain as large in {change.share:.1%} of {of} without a change"
    preferred = apart.richer if apart.holds else "undecided"
    lead = f"a lead as large in {apart.share:.1%} of those drawn from '{apart.simpler}'"
    if apart.holds:
        sentence = f"'{apart.richer}' explains it best: {sentence}, {lead} ({values})"
    else:
        sentence = f"the study differs ({sentence}), "
        sentence += f"but '{apart.richer}' leads '{apart.simpler}' by too little ({lead})"
        sentence += f": not to be told apart ({values})"
    if both.holds:
        sentence += (
            f"; both together gain more (as much in {both.share:.1%} of grids drawn from '{both.simpler}'; delta phi "
            f"{by['both'].delta_phi:+.4f} with shift {by['both'].shift:+.4f}), so neither alone is the whole story"
        )
    return preferred, sentence


def _by_aicc(readings: tuple[Reading, ...]) -> tuple[str, str]:
    by = {reading.name: reading for reading in readings}
    untold = [f"'{name}'" for name in ("neither", "delta phi", "shift") if not math.isfinite(by[name].aicc)]
    if untold:
        few = f"AICc of {', '.join(untold)} does not exist: too few runs for that many parameters"
        return "undecided", f"not to be told apart; {few}"
    rivals = (by[name] for name in ("neither", "delta phi", "shift"))
    best, second, _ = sorted(rivals, key=lambda reading: reading.aicc)
    lead = second.aicc - best.aicc
    values = f"delta phi alone {by['delta phi'].delta_phi:+.4f}, shift alone {by['shift'].shift:+.4f} nats"
    if best.name == "neither":
        preferred, sentence = "neither", f"no change is needed to explain the study ({values})"
    elif lead < TELLING:
        preferred = "undecided"
        sentence = (
            f"'{best.name}' leads '{second.name}' by only {lead:.1f} in AICc: not to be told apart ({values})"
        )
    else:
        preferred = best.name
        sentence = f"'{best.name}' explains it best, {lead:.1f} in AICc ahead ({values})"
    gain = best.aicc - by["both"].aicc
    if gain > TELLING and best.name != "neither":
        sentence += (
            f"; both together gain another {gain:.1f} (delta phi {by['both'].delta_phi:+.4f} with shift "
            f"{by['both'].shift:+.4f}), so neither alone is the whole story"
        )
    return preferred, sentence


def _points(arms: Arms, paired: FitResult) -> tuple[Point, ...]:
    runs = arms.runs
    named = np.where(runs.r == 1, "shared", np.where(arms.x.study == 1, "study", "baseline"))
    losses = runs.val_loss, runs.val_loss - paired.residuals
    columns = runs.r, runs.d_model, runs.budget, runs.n_total, runs.tokens, runs.flops_per_token, *losses
    rows = zip(runs.source, named, *columns, strict=True)
    return tuple(Point(str(source), str(arm), *map(float, numbers)) for source, arm, *numbers in rows)


def _transfer(
    law: JointLaw, arms: Arms, theta: np.ndarray, weights: np.ndarray, workers: int | None
) -> np.ndarray:
    """phi (S,) of the study's r>1 runs with all else fixed at the baseline fits theta (S, P), weights (S, n)."""
    chosen = arms.sides[1] & (arms.runs.r > 1)
    lower, upper = theta.copy(), theta.copy()
    lower[:, -1], upper[:, -1] = law.bounds[-1]
    observed = np.log(arms.runs.val_loss[chosen])
    problem = Problem(law, arms.x.take(chosen), observed, weights[:, chosen], lower, upper)
    return minimise(problem, theta, workers=workers).theta[:, -1]


def _draw(
    arms: Arms, fits: list[FitResult], paired: FitResult, resamples: int, seed: int, workers: int | None
) -> dict[str, np.ndarray]:
    counts = draw_counts(arms.cells, resamples, np.random.default_rng(seed))
    weights = counts[:, arms.cell]
    observed = np.log(arms.runs.val_loss)
    separate = [
        refit(one.law, arms.x.take(side), observed[side], one.theta, weights[:, side], seed, workers)
        for one, side in zip(fits, arms.sides, strict=True)
    ]
    both = refit(paired.law, arms.x, observed, paired.theta, weights, seed, workers)
    law = fits[0].law
    assert isinstance(law, JointLaw)
    return {
        "separate": separate[1][:, -1] - separate[0][:, -1],
        "paired": both[:, -1],
        "transfer": _transfer(law, arms, separate[0], weights, workers) - separate[0][:, -1],
    }
