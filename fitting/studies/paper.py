"""Beside the paper: its fits repeated on its grid, and the distance of a fitted phi from its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fitting.data.plain import optional
from fitting.data.runs import Runs
from fitting.data.splits import INJECTION_ONCE, PAPER, REGRESSED, Split
from fitting.errors import FitError
from fitting.estimation.diagnostics import GroupResidual, residual_summary
from fitting.estimation.fits import fit, fit_architectures
from fitting.estimation.resampling import bootstrap
from fitting.estimation.results import FitResult, FitSummary
from fitting.laws import FixedPower, JointLaw, Multiplier, Power
from fitting.published import load_grid, reference
from fitting.studies.allocation import (
    Exponents,
    Gap,
    closed_form_exponents,
    exponents,
    frontier_gaps,
    law_optimum,
    parabolas,
)
from fitting.studies.curves import EffectiveRatio, effective_ratios
from fitting.studies.widths import Widths

_STARTS = 100
LOWER_HALF, UPPER_HALF, FOUR_LOWER = "budget<=2.15e18", "budget>=4.64e18", "budget<=4.64e18"
_SPLITS = (PAPER, REGRESSED, INJECTION_ONCE)
_EVERY: tuple[tuple[str, Multiplier, tuple[str, ...]], ...] = (
    ("all runs", Power(), ()),
    ("lower half of the budgets", Power(), (LOWER_HALF,)),
    ("upper half of the budgets", Power(), (UPPER_HALF,)),
    ("four lower budgets", Power(), (FOUR_LOWER,)),
    ("phi = 0", FixedPower(0), ()),
    ("phi = 1", FixedPower(1), ()),
)


@dataclass(frozen=True)
class PaperRefit:
    """The paper's runs fitted under the split of another fit; without a phi where the split is undefined for them."""

    split: str
    status: str
    message: str
    phi: float | None = optional()
    runs: int | None = optional()
    difference: float | None = optional()
    """The other fit's phi minus this one."""
    inside_interval: bool | None = None
    """Whether the other fit's recommended interval holds this phi; None without an interval."""


@dataclass(frozen=True)
class Distance:
    """The published phi with its interval, and how far another fit's phi is from it, as in `PaperRefit`."""

    phi: float
    split: str
    interval: tuple[float, float]
    source: str
    difference: float
    inside_interval: bool | None
    refit: PaperRefit


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
        refit = PaperRefit(split.name, "undefined", str(error))
    else:
        phi, status = other["phi"], other.status.value
        apart = result["phi"] - phi
        refit = PaperRefit(split.name, status, other.message, phi, len(grid), apart, inside(phi))
    phi = float(published["joint"]["all runs"]["phi"])
    low, high = published["bootstrap"][REGRESSED.name]
    difference = result["phi"] - phi
    return Distance(phi, REGRESSED.name, (low, high), published["source"], difference, inside(phi), refit)


# ------------------------------------------------------------------------------------------ all of its fits


@dataclass(frozen=True)
class JointFit:
    """The joint law fitted to all or some of the grid's runs (`runs` says which)."""

    runs: str
    fit: FitSummary
    effective_ratios: tuple[EffectiveRatio, ...]
    residuals_by_r: tuple[GroupResidual, ...]


@dataclass(frozen=True)
class GridMinimum:
    """Minimum of one iso-FLOPs parabola of the grid; None where it is refused."""

    r: float
    budget: float
    n: float | None
    loss: float | None


@dataclass(frozen=True)
class ThreeExponents:
    """Exponents of N*(C) and D*(C) at one r, in three ways."""

    closed_form: Exponents
    exact_flops: Exponents | None
    parabolas: Exponents | None


@dataclass(frozen=True)
class Replication:
    """The paper's fits repeated; keys are r."""

    chinchilla: dict[str, FitSummary]
    joint: tuple[JointFit, ...]
    minima: tuple[GridMinimum, ...]
    exponents: dict[str, ThreeExponents]
    frontier_gaps: tuple[Gap, ...]


def replicate(
    runs: Runs,
    *,
    starts: int,
    seed: int,
    resamples: int = 0,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Replication:
    """Fit each r alone, and the joint law to all runs and to parts of them under three splits; find minima and
    exponents. `resamples` above 0 also gives the intervals of phi for all runs.
    """
    search: dict[str, Any] = {"starts": starts, "seed": seed, "workers": workers}
    progress("Chinchilla law per r")
    own = fit_architectures(runs, **search)
    joint = []
    for split in _SPLITS:
        for name, multiplier, rules in _EVERY:
            if isinstance(multiplier, FixedPower) and split is INJECTION_ONCE:
                continue
            progress(f"{name}, split {split.name}")
            count = resamples if name == "all runs" else 0
            joint.append(_joint(runs.where(*rules), name, multiplier, split, count, search))
    curves = parabolas(runs, JointLaw())
    found = {}
    for r, result in own.items():
        widths = Widths.of(runs, result.law, r)
        exact = [law_optimum(result.law, result.theta, widths, c) for c in np.unique(runs.budget)]
        closed = closed_form_exponents(result["alpha"], result["beta"], widths.slope)
        minima = [c.optimum for c in curves if c.r == r]
        found[f"{r:g}"] = ThreeExponents(closed, exponents(exact), exponents(minima))
    return Replication(
        {f"{r:g}": result.summary(FitSummary) for r, result in own.items()},
        tuple(joint),
        tuple(GridMinimum(c.r, c.budget, c.optimum.n, c.optimum.loss) for c in curves),
        found,
        frontier_gaps([c.optimum for c in curves]),
    )


def _joint(
    runs: Runs, name: str, multiplier: Multiplier, split: Split, resamples: int, search: dict[str, Any]
) -> JointFit:
    result = fit(runs, JointLaw(multiplier, split), **search)
    if resamples:
        again = {"resamples": resamples, "seed": search["seed"], "workers": search["workers"]}
        result = bootstrap(runs, result, names=["phi"], **again)
    ratios = effective_ratios(runs, result.law, result.theta, 640.0)
    return JointFit(name, result.summary(FitSummary), ratios, residual_summary(result.residuals, runs.r))
