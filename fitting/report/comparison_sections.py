"""What a comparison says, as sections: the one source of the printed text and of report.md.

Nothing is computed here but means over matched runs: every other number comes from the comparison.
"""

from __future__ import annotations

from statistics import fmean

from fitting.estimation.results import recommended
from fitting.report.document import Section, Table
from fitting.report.sections import excluded_table
from fitting.studies.comparison import Comparison

CHANNELS = ("difference", "token", "parameters", "capacity", "unexplained")


def comparison_sections(found: Comparison) -> list[Section]:
    """Every section for which the comparison has content."""
    channels = [_channels(found)] if found.channels else []
    return [_estimates(found), _readings(found), *channels, _data(found)]


def mean_channels(found: Comparison) -> dict[float, dict[str, float]]:
    """r -> the mean of every channel over its matched runs, nats."""
    means = {}
    for r in sorted({row.r for row in found.channels}):
        rows = [row for row in found.channels if row.r == r]
        means[r] = {name: fmean(getattr(row, name) for row in rows) for name in CHANNELS}
    return means


def _estimates(found: Comparison) -> Section:
    shared, base, study = found.runs
    parts: list[str | Table] = [
        f"Split {found.split}; {base} baseline and {study} study runs with r>1, {shared} shared runs with r=1, "
        f"{len(found.budgets)} shared budgets, {found.cells} (budget, r) cells; {found.resamples} resamples, seed "
        f"{found.seed}. Status: {found.status} ({found.message})."
    ]
    rows = []
    for e in found.estimates:
        best = recommended(e.intervals)
        shown = f"[{best.low:+.4f}, {best.high:+.4f}]" if best else "not estimated"
        numbers = [f"{e.phi_baseline:.4f}", f"{e.phi_study:.4f}", f"{e.delta_phi:+.4f}"]
        rows.append([e.method, *numbers, shown])
    header = ["estimate", "phi baseline", "phi study", "delta phi", "95% interval (widened)"]
    parts.append(Table(header, rows))
    if found.intervals_refused:
        parts.append(f"Intervals: not estimated: {found.intervals_refused}")
    with_them = found.with_excluded_runs
    if with_them:
        other = f"not defined, because: {with_them.message}"
        if with_them.delta_phi is not None:
            other = f"{with_them.delta_phi:+.4f} ({with_them.status})"
        paired = f"{found.paired.delta_phi:+.4f} without the runs of --exclude"
        parts.append(f"Paired delta phi {paired}; with them: {other}")
    return Section("Change of phi", parts)


def _readings(found: Comparison) -> Section:
    def signed(value: float | None) -> str:
        return "-" if value is None else f"{value:+.4f}"

    rows = [
        [r.name, signed(r.delta_phi), signed(r.shift), f"{r.aicc:.1f}", "ok" if r.trusted else r.message]
        for r in found.readings
    ]
    table = Table(["reading", "delta phi", "shift (nats)", "AICc", "status"], rows)
    warnings = [f"Warning: {warning}" for warning in found.warnings]
    return Section("Readings of the difference", [table, f"Verdict: {found.verdict}", *warnings])


def _channels(found: Comparison) -> Section:
    rows = [
        [f"{r:g}", *(f"{means[name]:+.4f}" for name in CHANNELS)] for r, means in mean_channels(found).items()
    ]
    note = "Means over matched runs, nats, study - baseline; difference = token + parameters + capacity + unexplained."
    return Section("Channels", [Table(["r", *CHANNELS], rows), note])


def _data(found: Comparison) -> Section:
    budgets = ", ".join(f"{c:.3g}" for c in found.budgets)
    return Section("Data", [f"Shared budgets: {budgets}.", excluded_table(found.excluded, "left out")])
