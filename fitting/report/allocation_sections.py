"""What fit.json says about compute-optimal allocation, as sections. Nothing is computed here (F36)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fitting.report.document import Row, Section, Table
from fitting.report.tables import significant


def allocation_section(analysis: dict[str, Any]) -> Section:
    found = analysis["allocation"]
    rows: list[Row] = []

    def pair(values: Sequence[float] | None) -> list[str]:
        return ["-", "-"] if values is None else [f"{values[0]:.3f}", f"{values[1]:.3f}"]

    for row in found["per_r"]:
        if "refusal" in row:
            rows.append([f"{row['r']:g}", *["-"] * 9, row["refusal"]])
            continue
        own = row.get("from_own_chinchilla", {})
        notes = [f"own law: {own['status']}"] if own and own["status"] != "ok" else []
        if analysis["fit"]["status"] != "ok":
            notes.append(f"joint law: {analysis['fit']['status']}")
        outside = [o for o in (*own.get("optima", ()), *row["from_joint_law"]["optima"]) if o["refusal"]]
        rows.append(
            [
                f"{row['r']:g}", f"{row['flops_slope']:.3f}", *pair(own.get("closed_form_exponents")),
                *pair(own.get("exponents")), *pair(row["from_joint_law"]["exponents"]),
                *pair(row["from_parabolas"]["exponents"]),
                "; ".join([*notes, *([f"{len(outside)} minima outside the sampled N"] if outside else [])]),
            ]
        )  # fmt: skip
    header = [
        "r", "k of F~N^k", "closed form N*", "D*", "own law, exact F: N*", "D*", "joint law, exact F: "
        "N*", "D*",
        "parabolas N*", "D*", "note",
    ]  # fmt: skip
    parts: list[str | Table] = ["Exponents of N*(C) and D*(C):", Table(header, rows)]
    refused = [p["optimum"] for p in found["parabolas"] if p["optimum"]["refusal"]]
    minima: list[Row] = [
        [
            f"{o['r']:g}",
            f"{o['flops']:.3g}",
            significant(o["n"], 4),
            significant(o["tokens"], 4),
            f"{o['loss']:.4f}",
        ]
        for o in (p["optimum"] for p in found["parabolas"])
        if not o["refusal"]
    ]
    parts += ["Minima of the iso-FLOPs parabolas:", Table(["r", "budget", "N*", "D*", "L*"], minima)]
    if refused:
        listed = "; ".join(f"r={o['r']:g} at {o['flops']:.3g}: {o['refusal']}" for o in refused)
        parts.append(f"Refused: {listed}.")
    gaps = found["frontier_gaps"]["parabolas"]
    if gaps:
        budgets = sorted({g["flops"] for g in gaps})
        by = {(g["r"], g["flops"]): f"{g['gap']:+.4f}" for g in gaps}
        table_rows: list[Row] = [
            [f"{r:g}", *[by.get((r, c), "-") for c in budgets]] for r in sorted({g["r"] for g in gaps})
        ]
        header = ["r", *[f"{c:.3g}" for c in budgets]]
        parts += ["Frontier gap L*_r(C) - L*_1(C), nats, from parabolas:", Table(header, table_rows)]
    return Section("Compute-optimal allocation", parts)


def minima_section(analysis: dict[str, Any]) -> Section:
    """The width of the lowest loss in every cell, and whether wider and narrower ones were tried."""
    rows: list[Row] = []
    for m in analysis["minima"]:
        parabola = m["parabola"]
        fitted = f"{parabola['d_model']:.0f}" if parabola["d_model"] else "-"
        rows.append(
            [
                f"{m['r']:g}", f"{m['budget']:.3g}", ", ".join(f"{d:g}" for d in m["d_models"]), f"{m['d_model']:g}",
                f"{m['loss']:.4f}", f"{m['tokens']:.3g}", "yes" if m["interior"] else "no", fitted,
            ]
        )  # fmt: skip
    header = ["r", "budget", "widths", "lowest at", "its loss", "its tokens", "interior", "parabola's width"]
    inside = sum(m["interior"] for m in analysis["minima"])
    sentence = f"The lowest loss lies at neither end of the widths in {inside} of {len(rows)} cells."
    return Section("Lowest loss of each cell", [Table(header, rows), sentence])
