"""The paper's fits repeated on its grid, as plain JSON types, and the tables that put both side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fitting.data.runs import Runs
from fitting.data.splits import INJECTION_ONCE, PAPER, REGRESSED, Split
from fitting.estimation.diagnostics import residual_summary
from fitting.estimation.fits import fit, fit_architectures
from fitting.estimation.resampling import bootstrap
from fitting.laws.laws import JointLaw
from fitting.laws.multipliers import FixedPower, Multiplier, Power
from fitting.report.document import Row, Section, Table, interval_text
from fitting.report.tables import significant
from fitting.studies import allocation
from fitting.studies.curves import effective_ratios

LOWER_HALF, UPPER_HALF, FOUR_LOWER = "budget<=2.15e18", "budget>=4.64e18", "budget<=4.64e18"
_SPLITS = (PAPER, REGRESSED, INJECTION_ONCE)
_EVERY = (
    ("all runs", Power(), ()),
    ("lower half of the budgets", Power(), (LOWER_HALF,)),
    ("upper half of the budgets", Power(), (UPPER_HALF,)),
    ("four lower budgets", Power(), (FOUR_LOWER,)),
    ("phi = 0", FixedPower(0), ()),
    ("phi = 1", FixedPower(1), ()),
)


def published_fits(
    runs: Runs,
    *,
    starts: int,
    seed: int,
    resamples: int = 0,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Per-architecture fits, the joint law on all runs and on parts of them under three splits, minima,
    exponents.
    """
    progress("Chinchilla law per r")
    own = fit_architectures(runs, starts=starts, seed=seed, workers=workers)
    joint = []
    for split in _SPLITS:
        for name, multiplier, rules in _EVERY:
            if isinstance(multiplier, FixedPower) and split is INJECTION_ONCE:
                continue
            progress(f"{name}, split {split.name}")
            joint.append(
                _joint(runs.where(*rules), name, multiplier, split, starts, seed, resamples, workers)
            )
    curves = allocation.parabolas(runs, JointLaw())
    exponents = {}
    for r, result in own.items():
        widths = allocation.Widths.of(runs, result.law, r)
        exact = [allocation.law_optimum(result.law, result.theta, widths, c) for c in np.unique(runs.budget)]
        exponents[f"{r:g}"] = {
            "closed_form": allocation.closed_form_exponents(result["alpha"], result["beta"], widths.slope),
            "exact_flops": allocation.exponents(exact),
            "parabolas": allocation.exponents([c.optimum for c in curves if c.r == r]),
        }
    return {
        "chinchilla": {f"{r:g}": result.to_dict() for r, result in own.items()},
        "joint": joint,
        "minima": [{"r": c.r, "budget": c.budget, "n": c.optimum.n, "loss": c.optimum.loss} for c in curves],
        "exponents": exponents,
        "frontier_gaps": allocation.frontier_gaps([c.optimum for c in curves]),
    }


def _joint(
    runs: Runs, name: str, multiplier: Multiplier, split: Split, starts: int, seed: int, resamples: int,
    workers: int | None,
) -> dict[str, Any]:  # fmt: skip
    result = fit(runs, JointLaw(multiplier, split), starts=starts, seed=seed, workers=workers)
    if resamples and name == "all runs":
        result = bootstrap(runs, result, resamples=resamples, seed=seed, names=["phi"], workers=workers)
    return {
        "runs": name,
        "fit": result.to_dict(),
        "effective_ratios": effective_ratios(runs, result.law, result.theta, 640.0),
        "residuals_by_r": residual_summary(result.residuals, runs.r),
    }


def sections(found: dict[str, Any], published: dict[str, Any]) -> list[Section]:
    """Tables with fitted and published values side by side."""
    names = ["A", "alpha", "B", "beta", "E"]
    rows: list[Row] = []
    for r, fit_ in found["chinchilla"].items():
        ours = [significant(fit_["parameters"][n], 4) for n in names]
        theirs = [f"{published['chinchilla'][r][n]:g}" for n in names]
        rows.append([r, "fitted", *ours, f"{fit_['r_squared']:.4f}", fit_["status"]])
        rows.append([r, "published", *theirs, f"{published['chinchilla'][r]['r_squared']:.4f}", ""])
    chinchilla = Section("Chinchilla law per r", [Table(["r", "", *names, "R²", "status"], rows)])
    rows = []
    for row in found["joint"]:
        f = row["fit"]
        reference = published["joint"].get(row["runs"], {}) if f["split"] == "regressed" else {}
        values = {**f["parameters"], "r_squared": f["r_squared"]}
        shown = [
            f"{values[k]:.4f}" if k in values else "-" for k in ("phi", "alpha", "beta", "E", "r_squared")
        ]
        paper = ", ".join(f"{k} {v:g}" for k, v in reference.items() if k != "r_squared") or "-"
        interval = interval_text(f["intervals"].get("phi", ()))
        rows.append([f["split"], row["runs"], *shown, interval, f["status"], paper])
    header = ["split", "runs", "phi", "alpha", "beta", "E", "R²", "95% of phi", "status", "published"]
    ratios = [
        f"{row['fit']['split']}: "
        + ", ".join(f"r={e['r']:g} {e['effective']:.3f}" for e in row["effective_ratios"])
        for row in found["joint"]
        if row["runs"] == "all runs"
    ]
    joint = Section(
        "Joint law",
        [
            Table(header, rows),
            f"The published constants belong to the split regressed ({published['source']}).",
            "Effective size (N_once + r^phi N_rec)/N(r=1) at d_model 640, under " + "; ".join(ratios) + ".",
        ],
    )
    rows = [
        [
            r,
            *[
                f"{value:.3f}"
                for key in ("closed_form", "exact_flops", "parabolas")
                for value in exponents[key]
            ],
        ]
        for r, exponents in found["exponents"].items()
    ]
    header = ["r", "closed form N*", "D*", "exact F: N*", "D*", "parabolas: N*", "D*"]
    allocation_section = Section("Exponents of N*(C), D*(C)", [Table(header, rows)])
    budgets = sorted({g["flops"] for g in found["frontier_gaps"]})
    by = {(g["r"], g["flops"]): f"{g['gap']:.3f}" for g in found["frontier_gaps"]}
    rows = [
        [f"{r:g}", *[by[r, c] for c in budgets]] for r in sorted({g["r"] for g in found["frontier_gaps"]})
    ]
    gaps = Section("Frontier gap to r=1, nats", [Table(["r", *[f"{c:.3g}" for c in budgets]], rows)])
    return [chinchilla, joint, allocation_section, gaps]
