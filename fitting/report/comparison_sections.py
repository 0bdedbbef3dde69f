"""What a comparison says, as sections: the one source of the printed text and of report.md.

Nothing is computed here but means over matched runs: every other number comes from the comparison.
"""

from __future__ import annotations

from statistics import fmean

from fitting.estimation.results import recommended
from fitting.report.document import Row, Section, Table
from fitting.report.sections import excluded_table
from fitting.studies.comparison import Comparison

CHANNELS = ("difference", "token", "parameters", "capacity", "unexplained")


def comparison_sections(found: Comparison) -> list[Section]:
    """Every section for which the comparison has content."""
    channels = [_channels(found)] if found.channels else []
    extra = [_extra_runs(found)] if found.extra_runs else []
    return [_estimates(found), _readings(found), *extra, *channels, _data(found)]


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
    parts: list[str | Table] = [table, f"Verdict: {found.verdict}", *warnings]
    if found.claims:
        claims = [
            [
                c.richer,
                c.simpler,
                f"{c.gain:.4f}",
                f"{c.share:.1%}",
                f"{c.grids}",
                f"{c.noise.run:.4f}",
                f"{c.noise.cell:.4f}",
            ]
            for c in found.claims
        ]
        header = ["reading", "against", "gain", "as large by chance", "grids", "noise of runs", "of cells"]
        parts[1:1] = [
            Table(header, claims),
            "Gain: log of the ratio of objectives. By chance: the share of grids drawn from the reading it is held "
            "against, with the noise that this leaves in log-loss (of runs, and of cells of budget, r and arm), in "
            "which the gain is as large. A verdict needs less than 5%.",
        ]
    return Section("Readings of the difference", parts)


def _extra_runs(found: Comparison) -> Section:
    assert found.claims and found.extra_runs
    claim = next(claim for claim in found.claims if not claim.holds)
    rows: list[Row] = [
        [
            e.arm, f"{e.r:g}", f"{e.d_model:g}", f"{e.budget:.3g}", f"{e.tokens:.3g}", f"{e.difference:+.4f}",
            f"{e.separation:.2f}",
        ]
        for e in found.extra_runs
    ]  # fmt: skip
    header = ["arm", "r", "d_model", "budget", "tokens", "difference (nats)", "in standard deviations"]
    note = (
        f"Single runs whose losses '{claim.simpler}' and '{claim.richer}' (as fitted) predict most differently, "
        "against the noise of a run and the prediction's own error; 2.8 standard deviations tell the two apart "
        "in four of five cases."
    )
    if found.extra_runs[0].separation < 1:
        note += " None of these would do so alone: try larger --more-budgets, --more-widths, or repeats."
    return Section("Runs that would tell more", [Table(header, rows), note])


def _channels(found: Comparison) -> Section:
    rows = [
        [f"{r:g}", *(f"{means[name]:+.4f}" for name in CHANNELS)] for r, means in mean_channels(found).items()
    ]
    note = "Means over matched runs, nats, study - baseline; difference = token + parameters + capacity + unexplained."
    return Section("Channels", [Table(["r", *CHANNELS], rows), note])


def _data(found: Comparison) -> Section:
    budgets = ", ".join(f"{c:.3g}" for c in found.budgets)
    return Section("Data", [f"Shared budgets: {budgets}.", excluded_table(found.excluded, "left out")])
