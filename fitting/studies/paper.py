"""The paper's fits repeated on its grid, and the distance of a fitted phi from the published one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fitting.data.runs import Runs
from fitting.data.splits import INJECTION_ONCE, PAPER, REGRESSED
from fitting.errors import FitError
from fitting.estimation.diagnostics import GroupResidual, residual_summary
from fitting.estimation.fits import fit, fit_architectures
from fitting.estimation.resampling import bootstrap
from fitting.estimation.results import EffectiveRatio, FitResult, FitSummary, Refused
from fitting.laws import FixedPower, JointLaw, Multiplier, Power
from fitting.published import load_grid, reference
from fitting.studies.allocation import Allocation, allocate, parabolas
from fitting.studies.curves import effective_ratios

_STARTS = 100
_SPLITS = (PAPER, REGRESSED, INJECTION_ONCE)
_EVERY: tuple[tuple[str, Multiplier, tuple[str, ...]], ...] = (
    ("all runs", Power(), ()),
    ("lower half of the budgets", Power(), ("budget<=2.15e18",)),
    ("upper half of the budgets", Power(), ("budget>=4.64e18",)),
    ("four lower budgets", Power(), ("budget<=4.64e18",)),
    ("phi = 0", FixedPower(0), ()),
    ("phi = 1", FixedPower(1), ()),
)


@dataclass(frozen=True)
class PaperRefit:
    """The paper's runs fitted under the split of another fit."""

    split: str
    status: str
    message: str
    phi: float
    runs: int
    difference: float
    """The other fit's phi minus this one."""
    inside_interval: bool | None
    """Whether the other fit's recommended interval holds this phi; None without an interval."""


@dataclass(frozen=True)
class Distance:
    """The published phi with its interval, and how far another fit's phi is from it and from that of `refit`."""

    phi: float
    split: str
    interval: tuple[float, float]
    source: str
    difference: float
    """The other fit's phi minus the published one."""
    inside_interval: bool | None
    """Whether the other fit's recommended interval holds the published phi; None without an interval."""
    refit: PaperRefit | Refused


def distance(result: FitResult, seed: int = 0, workers: int | None = None) -> Distance:
    """How far phi of `result` is from the published value, and from a fit of the paper's runs under the same split."""
    published, split = reference(), result.law.split

    def inside(phi: float) -> bool | None:
        best = result.recommended("phi")
        return None if best is None else best.low <= phi <= best.high

    try:
        grid = load_grid()
        other = fit(grid, JointLaw(split=split), starts=_STARTS, seed=seed, workers=workers)
    except FitError as error:
        refit: PaperRefit | Refused = Refused(split=split.name, status="undefined", message=str(error))
    else:
        phi, status = other["phi"], other.status.value
        apart = result["phi"] - phi
        refit = PaperRefit(split.name, status, other.message, phi, len(grid), apart, inside(phi))
    phi = float(published["joint"]["all runs"]["phi"])
    low, high = published["bootstrap"][REGRESSED.name]
    difference = result["phi"] - phi
    return Distance(phi, REGRESSED.name, (low, high), published["source"], difference, inside(phi), refit)


@dataclass(frozen=True)
class JointFit:
    """The joint law fitted to all or some of the grid's runs (`runs` says which)."""

    runs: str
    fit: FitSummary
    effective_ratios: tuple[EffectiveRatio, ...]
    residuals_by_r: tuple[GroupResidual, ...]


@dataclass(frozen=True)
class Replication:
    """The paper's fits repeated: each r alone (by r), the joint law, and the allocation that follows from both."""

    chinchilla: dict[str, FitSummary]
    joint: tuple[JointFit, ...]
    allocation: Allocation


def replicate(
    runs: Runs,
    *,
    starts: int,
    seed: int,
    resamples: int = 0,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Replication:
    """Fit each r alone, and the joint law to all runs and to parts of them under three splits.

    `resamples` above 0 also gives the intervals of phi for all runs.
    """
    drawing: dict[str, Any] = {"seed": seed, "workers": workers}
    search = {"starts": starts, **drawing}
    progress("Chinchilla law per r")
    own = fit_architectures(runs, **search)
    joint, whole = [], []
    for split in _SPLITS:
        for name, multiplier, rules in _EVERY:
            if isinstance(multiplier, FixedPower) and split is INJECTION_ONCE:
                continue
            progress(f"{name}, split {split.name}")
            part = runs.where(*rules)
            result = fit(part, JointLaw(multiplier, split), **search)
            if resamples and name == "all runs":
                result = bootstrap(runs, result, resamples=resamples, names=["phi"], **drawing)
            whole.append(result)
            ratios = effective_ratios(part, result.law, result.theta, 640.0)
            residuals = residual_summary(result.residuals, part.r)
            joint.append(JointFit(name, result.summary(), ratios, residuals))
    alone = {f"{r:g}": result.summary() for r, result in own.items()}
    first = whole[0]
    return Replication(alone, tuple(joint), allocate(runs, first, own, parabolas(runs, first.law)))
