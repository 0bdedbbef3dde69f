"""What a plan, a forecast, equivalent sizes and the paper's repeated fits say, as sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fitting.report.document import Row, Section, Table, interval_text, significant
from fitting.report.sections import gaps_table
from fitting.studies.allocation import AllocationOfR
from fitting.studies.design import Design
from fitting.studies.paper import Replication
from fitting.studies.planner import Plan
from fitting.studies.prediction import Equivalent, Forecast

NEXT = 10
"""Runs to train next that a design lists with the interval after each."""


def plan_sections(plan: Plan) -> list[Section]:
    """How well a design would determine its parameter, and which single runs would help most."""
    simulated = ""
    if plan.simulated_half_width is not None:
        count = f"{plan.simulations} simulated grids, seed {plan.seed}"
        simulated = f", {plan.simulated_half_width:.4f} ({count})"
    parts: list[str | Table] = [
        f"{plan.runs} runs in {plan.cells} cells, noise of log-loss: {plan.noise.run:g} per run, "
        f"{plan.noise.cell:g} per cell; split {plan.split}.",
        f"Expected 95% half-width of {plan.parameter}: {plan.fisher_half_width:.4f} (Gauss-Newton){simulated}; "
        f"quoted as {plan.quoted_half_width:.4f}, widened for the number of cells; condition number "
        f"{plan.condition:.1e}.",
    ]
    if plan.candidates:
        rows = [
            [
                f"{c.r:g}", f"{c.d_model:g}", f"{c.budget:.3g}", f"{c.tokens_per_parameter:.1f}",
                f"{c.half_width:.4f}", f"{1 - c.half_width / plan.fisher_half_width:.2%}", f"{c.gain_per_flop:.2e}",
            ]
            for c in plan.candidates
        ]  # fmt: skip
        header = ["r", "d_model", "budget", "D/N", "half-width with it", "shrinks by", "per FLOP"]
        best = "Best single added runs, by shrinkage per FLOP (within the sampled D/N):"
        parts += [best, Table(header, rows)]
    return [Section("Plan", parts)]


def design_sections(design: Design) -> list[Section]:
    """The runs to train next, in order, with the interval that would be quoted after each of the first."""
    low, high = design.spread
    of = f"median of {design.simulated} simulated grids, 80% of them {low:.3f} to {high:.3f}"
    parts: list[str | Table] = [
        f"For a 95% half-width of phi of {design.target:g}: {len(design.runs)} runs in {design.cells} cells beside "
        f"{design.existing}, {design.training_flops:.3g} training FLOPs. Quoted half-width: {design.half_width:.4f} "
        f"({of}). Law: {design.law}, split {design.split}; noise of log-loss {design.noise.run:.4f} per run, "
        f"{design.noise.cell:.4f} per cell.",
    ]
    counted = Counter((c.r, c.d_model, c.budget) for c in design.runs)
    rows: list[Row] = [
        [f"{r:g}", f"{d:g}", f"{budget:.3g}", str(seeds)] for (r, d, budget), seeds in sorted(counted.items())
    ]
    parts += ["All of them:", Table(["r", "d_model", "FLOPs", "seeds"], rows)]
    first = [
        [
            f"{c.r:g}",
            f"{c.d_model:g}",
            f"{c.budget:.3g}",
            f"{c.tokens:.3g}",
            str(c.seed),
            f"{c.half_width:.3f}",
        ]
        for c in design.runs[:NEXT]
    ]
    header = ["r", "d_model", "FLOPs", "tokens", "repeat", "half-width after it"]
    parts += [f"The next {len(first)}, by what they give per FLOP:", Table(header, first)]
    return [Section("Design", parts)]


def forecast_sections(forecast: Forecast) -> list[Section]:
    """The compute-optimal model of every r at one budget, and the best r."""
    rows = [
        [
            f"{p.r:g}", f"{p.d_model:.0f}", significant(p.n, 4), significant(p.tokens, 4), f"{p.loss:.4f}",
            f"[{p.low:.4f}, {p.high:.4f}]", significant(p.forward_flops, 4), p.note,
        ]
        for p in forecast.predictions
    ]  # fmt: skip
    cap = forecast.inference_cap
    capped = "" if cap is None else f", at most {cap:.3g} forward FLOPs per token"
    law = f"law with exact F(N), split {forecast.split}"
    header = ["r", "d_model", "N", "D", "loss", "95% prediction", "forward FLOPs/token", "note"]
    parts: list[str | Table] = [
        f"Compute-optimal at {forecast.budget:.3g} training FLOPs{capped} ({law}):",
        Table(header, rows),
        *(f"r={r:g}: {reason}" for r, reason in forecast.refused),
        "No r is allowed." if forecast.best is None else f"Best r: {forecast.best:g}.",
    ]
    return [Section("Forecast", parts)]


def equivalent_section(n_at_r1: float, split: str, rows: Sequence[Equivalent]) -> Section:
    """Models as wide as the r=1 model of `n_at_r1` parameters."""
    width = f"{rows[0].d_model:.0f}"
    cells = [[f"{e.r:g}", significant(e.unique, 4), significant(e.effective, 4), e.note] for e in rows]
    head = f"As wide as an r=1 model of {n_at_r1:.4g} parameters (d_model {width}):"
    table = Table(["r", "unique", f"effective, split {split}", "note"], cells)
    return Section("Equivalent sizes", [head, table])


def replication_sections(found: Replication, published: dict[str, Any]) -> list[Section]:
    """Tables with fitted and published values side by side."""
    names = ["A", "alpha", "B", "beta", "E"]
    rows: list[Row] = []
    for r, own in found.chinchilla.items():
        paper = published["chinchilla"][r]
        ours = [significant(own.parameters[n], 4) for n in names]
        rows.append([r, "fitted", *ours, f"{own.r_squared:.4f}", own.status])
        rows.append([r, "published", *(f"{paper[n]:g}" for n in names), f"{paper['r_squared']:.4f}", ""])
    chinchilla = Section("Chinchilla law per r", [Table(["r", "", *names, "R²", "status"], rows)])
    rows, ratios = [], []
    for row in found.joint:
        fit = row.fit
        reference = published["joint"].get(row.runs, {}) if fit.split == "regressed" else {}
        told = ", ".join(f"{k} {v:g}" for k, v in reference.items() if k != "r_squared") or "-"
        values = {**fit.parameters, "r_squared": fit.r_squared}
        keys = ("phi", "alpha", "beta", "E", "r_squared")
        shown = [f"{values[k]:.4f}" if k in values else "-" for k in keys]
        rows.append([fit.split, row.runs, *shown, interval_text(fit, "phi"), fit.status, told])
        if row.runs == "all runs":
            effective = (f"r={e.r:g} {e.effective:.3f}" for e in row.effective_ratios)
            ratios.append(f"{fit.split}: {', '.join(effective)}")
    header = ["split", "runs", "phi", "alpha", "beta", "E", "R²", "95% of phi", "status", "published"]
    joint: list[str | Table] = [
        Table(header, rows),
        f"The published constants belong to the split regressed ({published['source']}).",
        f"Effective size (N_once + r^phi N_rec)/N(r=1) at d_model 640, under {'; '.join(ratios)}.",
    ]
    rows = []
    for e in found.allocation.per_r:
        if isinstance(e, AllocationOfR) and e.from_own_chinchilla:
            own_law = e.from_own_chinchilla
            pairs = (own_law.closed_form_exponents, own_law.exponents, e.from_parabolas["exponents"])
            shown = [f"{value:.3f}" if pair else "-" for pair in pairs for value in pair or (0, 0)]
            rows.append([f"{e.r:g}", *shown])
    header = ["r", "closed form N*", "D*", "exact F: N*", "D*", "parabolas: N*", "D*"]
    exponents = Section("Exponents of N*(C), D*(C)", [Table(header, rows)])
    gaps = gaps_table(found.allocation.frontier_gaps["parabolas"], ".3f")
    frontier = Section("Frontier gap to r=1, nats", [gaps])
    return [chinchilla, Section("Joint law", joint), exponents, frontier]
