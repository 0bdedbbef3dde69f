"""What matching says, as sections."""

from __future__ import annotations

from fitting.report.document import Row, Section, Table, significant
from fitting.studies.matching import LEVEL, Matching
from fitting.studies.readings import BELOW, BEYOND, OUTSIDE, Group, Reading

_EACH = {"r": "{:g}", "d_model": "{:g}", "tokens": "{:.3g}", "budget": "{:.3g}"}
_ONE_NUMBER = 0.05
"""Below this p phi is not one number."""


def matching_section(found: Matching) -> Section:
    """Phi by r, width and tokens or budget, whether it is one number, and whether it contradicts the joint fit."""
    parts: list[str | Table] = [f"Split: {found.split}. Intervals are of 95%."]
    for reading in found.readings:
        parts += _of_reading(reading)
    if found.agreement:
        parts.append(f"Beside the joint fit: {found.agreement.message}. A share below {LEVEL:g} is a doubt.")
    elif found.not_compared:
        parts.append(f"Not compared with the joint fit: {found.not_compared}.")
    return Section("Matching: phi without the law", parts)


def matching_sections(found: Matching) -> list[Section]:
    """The same, and every pair."""
    return [matching_section(found), *(_pairs(reading) for reading in found.readings)]


def expected_section(reading: Reading) -> Section:
    """What a planned design will let matching tell: errors, not values."""
    assert reading.noise is not None
    rows: list[Row] = []
    for p in reading.pairs:
        note = p.note or ("" if p.low is not None and p.high is not None else "may lie beyond the curve")
        rows.append([f"{p.r:g}", f"{p.d_model:g}", f"{p.tokens:.3g}", str(p.seeds), _plain(p.error), note])
    table = Table(["r", "d_model", "tokens", "seeds", "standard error of phi", "note"], rows)
    groups = "; ".join(
        f"{name} {', '.join(f'{_EACH[name].format(g.value or 0)}: {_plain(g.error)}' for g in of)}"
        for name, of in reading.groups.items()
    )
    head = (
        f"Matching at equal tokens, noise of log-loss {reading.noise.run:.4f} per run, {reading.noise.cell:.4f} that "
        f"seeds share: expected standard error of phi {_plain(reading.pooled.error)} over all {reading.pooled.pairs} "
        f"pairs; by {groups}."
    )
    slope = (
        f"Of its slope per factor of ten in tokens: {_plain(reading.trend.error)}." if reading.trend else ""
    )
    return Section("Matching", [head, *([slope] if slope else []), table])


def _of_reading(reading: Reading) -> list[str | Table]:
    statistic = "median" if reading.constants else "mean with fixed weights"
    noise = "unknown noise of log-loss, so without errors"
    if reading.noise:
        noise = f"noise of log-loss {reading.noise.run:.4f} per run and {reading.noise.cell:.4f} per cell"
    constants = ", ".join(f"{name} {significant(value)}" for name, value in (reading.constants or {}).items())
    parts: list[str | Table] = [
        f"At {reading.method}{f' ({constants})' if constants else ''}: phi {_value(reading.pooled)}, {statistic} of "
        f"{reading.pooled.pairs} pairs (median {_plain(reading.pooled.median)}); {noise}."
    ]
    rows = [
        [f"{name} = {_EACH[name].format(g.value or 0)}", str(g.pairs), *_numbers(g), _plain(g.median)]
        for name, of in reading.groups.items()
        for g in of
    ]
    parts.append(Table(["pairs with", "pairs", "phi", "error", "interval", "median"], rows))
    if reading.heterogeneity is not None:
        uneven = reading.heterogeneity < _ONE_NUMBER
        said = "phi is not one number" if uneven else "the pairs do not contradict one number"
        parts.append(
            f"Of simulated grids with one phi, {reading.heterogeneity:.3f} scatter as much between pairs: {said}."
        )
    if reading.trend:
        t = reading.trend
        what = "D" if t.over == "tokens" else "C"
        parts.append(
            f"phi({what}) = {t.at_centre:.3f} {t.slope:+.3f}·log10({what}/{t.centre:.3g}); error of the slope "
            f"{t.error:.3f}."
        )
    for note in (OUTSIDE, BELOW, BEYOND):
        there = [p for p in reading.pairs if p.note == note]
        if there:
            named = ", ".join(f"r={p.r:g} d={p.d_model:g} D={p.tokens:.3g}" for p in there)
            hint = (
                ". Add r=1 runs, smaller or larger, until their losses enclose it" if note == OUTSIDE else ""
            )
            parts.append(f"{note}, {len(there)} pairs: {named}{hint}.")
    return parts


def _pairs(reading: Reading) -> Section:
    rows: list[Row] = []
    for p in reading.pairs:
        ends = "-" if p.error is None else f"[{_plain(p.low)}, {_plain(p.high)}]"
        size = "-" if p.size is None else f"{p.size:.4g}"
        budget = [] if reading.constants is None else [_EACH["budget"].format(p.budget or 0)]
        what = [f"{p.r:g}", f"{p.d_model:g}", *budget, f"{p.tokens:.3g}", str(p.seeds), f"{p.loss:.4f}", size]
        rows.append([*what, _plain(p.phi), _plain(p.error), ends, p.note])
    header = ["r", "d_model", *([] if reading.constants is None else ["budget"]), "tokens", "seeds", "loss"]
    header += ["size at r=1", "phi", "error", "95% interval", "note"]
    open_end = "An end that is - is open."
    return Section(f"Pairs at {reading.method}", [Table(header, rows), open_end])


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _numbers(group: Group) -> list[str]:
    ends = "-" if group.low is None else f"[{_plain(group.low)}, {_plain(group.high)}]"
    return [_plain(group.phi), _plain(group.error), ends]


def _value(group: Group) -> str:
    phi, error, ends = _numbers(group)
    return phi if error == "-" else f"{phi} ± {error} {ends}"
