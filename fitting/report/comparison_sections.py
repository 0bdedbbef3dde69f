"""comparison.json turned into sections: the one source of the printed text and of report.md.

Nothing is computed here but means over matched runs: every number comes from the analysis (F36).
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from fitting.report.document import Row, Section, Table, recommended

CHANNELS = ("difference", "token", "parameters", "capacity", "unexplained")


def comparison_sections(analysis: dict[str, Any]) -> list[Section]:
    """Every section for which the analysis has content."""
    found = [_estimates(analysis), _readings(analysis)]
    if analysis["channels"]:
        found.append(_channels(analysis))
    return [*found, _data(analysis)]


def mean_channels(analysis: dict[str, Any]) -> dict[float, dict[str, float]]:
    """r -> the mean of every channel over its matched runs, nats."""
    rows = analysis["channels"]
    return {
        r: {name: fmean(row[name] for row in rows if row["r"] == r) for name in CHANNELS}
        for r in sorted({row["r"] for row in rows})
    }


def _estimates(analysis: dict[str, Any]) -> Section:
    shared, base, study = analysis["runs"]
    parts: list[str | Table] = [
        f"Split {analysis['split']}; {base} baseline and {study} study runs with r>1, {shared} shared runs with r=1, "
        f"{len(analysis['budgets'])} shared budgets, {analysis['cells']} (budget, r) cells; {analysis['resamples']} "
        f"resamples, seed {analysis['seed']}. Status: {analysis['status']} ({analysis['message']})."
    ]
    rows: list[Row] = []
    for e in analysis["estimates"]:
        best = recommended(e["intervals"])
        shown = f"[{best['low']:+.4f}, {best['high']:+.4f}]" if best else "not estimated"
        rows.append(
            [
                e["method"], f"{e['phi_baseline']:.4f}", f"{e['phi_study']:.4f}", f"{e['delta_phi']:+.4f}", shown,
            ]
        )  # fmt: skip
    parts.append(
        Table(["estimate", "phi baseline", "phi study", "delta phi", "95% interval (widened)"], rows)
    )
    if analysis["intervals_refused"]:
        parts.append(f"Intervals: not estimated: {analysis['intervals_refused']}")
    with_them = analysis.get("with_excluded_runs")
    if with_them:
        paired = next(e for e in analysis["estimates"] if e["method"] == "paired")
        other = (
            f"not defined, because: {with_them['message']}"
            if with_them["delta_phi"] is None
            else f"{with_them['delta_phi']:+.4f} ({with_them['status']})"
        )
        parts.append(
            f"Paired delta phi {paired['delta_phi']:+.4f} without the runs of --exclude; with them: {other}"
        )
    return Section("Change of phi", parts)


def _readings(analysis: dict[str, Any]) -> Section:
    rows: list[Row] = [
        [
            r["name"], "-" if r["delta_phi"] is None else f"{r['delta_phi']:+.4f}",
            "-" if r["shift"] is None else f"{r['shift']:+.4f}", f"{r['aicc']:.1f}",
            "ok" if r["trusted"] else r["message"],
        ]
        for r in analysis["readings"]
    ]  # fmt: skip
    parts: list[str | Table] = [
        Table(["reading", "delta phi", "shift (nats)", "AICc", "status"], rows),
        f"Verdict: {analysis['verdict']}",
        *[f"Warning: {warning}" for warning in analysis["warnings"]],
    ]
    return Section("Readings of the difference", parts)


def _channels(analysis: dict[str, Any]) -> Section:
    rows: list[Row] = [
        [f"{r:g}", *[f"{means[name]:+.4f}" for name in CHANNELS]]
        for r, means in mean_channels(analysis).items()
    ]
    note = "Means over matched runs, nats, study - baseline; difference = token + parameters + capacity + unexplained."
    return Section("Channels", [Table(["r", *CHANNELS], rows), note])


def _data(analysis: dict[str, Any]) -> Section:
    budgets = ", ".join(f"{c:.3g}" for c in analysis["budgets"])
    if not analysis["excluded"]:
        return Section("Data", [f"Shared budgets: {budgets}.", "No run was left out."])
    rows: list[Row] = [[gone["source"], gone["rule"]] for gone in analysis["excluded"]]
    return Section("Data", [f"Shared budgets: {budgets}.", Table(["left out", "rule"], rows)])
