"""What an analysis says, as sections: the one source of the printed text, report.md and report.html.

Nothing is computed here: every number comes from the analysis.
"""

from __future__ import annotations

from collections.abc import Sequence

from fitting.data.runs import Exclusion, Runs
from fitting.estimation.calibration import LEVEL
from fitting.estimation.diagnostics import Attempt, RivalFit, RivalRefused, Scatter
from fitting.estimation.identification import Judgement, LackOfFit, Sensitivity
from fitting.estimation.results import FitResult, FitSummary, Refused
from fitting.report.document import Row, Section, Table, interval_text, significant
from fitting.report.matching_sections import matching_section
from fitting.studies.allocation import Allocation, AllocationRefused, Exponents, Gap, Minimum
from fitting.studies.analysis import Analysis, Data, Residuals
from fitting.studies.paper import Distance, PaperRefit

_OF_CHINCHILLA = ("A", "alpha", "B", "beta", "E")


def sections(analysis: Analysis) -> list[Section]:
    """Every section for which the analysis has content."""
    found = [_fit(analysis), _intervals(analysis)]
    found += [_published(analysis.published)] if analysis.published else []
    found += [_splits(analysis.splits, analysis.data.recurrences)] if analysis.splits else []
    if analysis.restricted:
        rows = [(f"{f.phi:g}", f) for f in analysis.restricted]
        found.append(Section("Restricted fits, phi fixed", [_parameters("phi", rows)]))
    own = [(f"{f.r:g}", f) for f in analysis.chinchilla]
    found.append(Section("Chinchilla law per r", [_parameters("r", own)]))
    found += [_identification(analysis.judgement, analysis.lack_of_fit)] if analysis.judgement else []
    found += [_sensitivity(analysis.sensitivity)] if analysis.sensitivity else []
    found += [_stability(analysis), _residuals(analysis.residuals)]
    found += [_laws(analysis.laws)] if analysis.laws else []
    found += [matching_section(analysis.matching)] if analysis.matching else []
    if analysis.matching_refused:
        found.append(
            Section("Matching: phi without the law", [f"Not possible: {analysis.matching_refused}."])
        )
    allocation = _allocation(analysis.allocation, analysis.fit.status)
    return [*found, _minima(analysis.minima), allocation, _data(analysis.data)]


def fit_sections(result: FitResult) -> list[Section]:
    """What a fit alone says."""
    fit = result.summary()
    return [Section("Fit", [*_of_fit(fit), *_correlations(fit)])]


def excluded_table(excluded: Sequence[Exclusion], header: str) -> str | Table:
    """Every run that was left out, with its rule, or a sentence saying that there is none."""
    if not excluded:
        return f"No run was {header.removesuffix(' run')}."
    return Table([header, "rule"], [[gone.source, gone.rule] for gone in excluded])


def gaps_table(gaps: Sequence[Gap], form: str) -> Table:
    """Frontier gaps: a line for each r, a column for each budget."""
    budgets = sorted({g.flops for g in gaps})
    by = {(g.r, g.flops): f"{g.gap:{form}}" for g in gaps}
    rows = [[f"{r:g}", *(by.get((r, c), "-") for c in budgets)] for r in sorted({g.r for g in gaps})]
    return Table(["r", *(f"{c:.3g}" for c in budgets)], rows)


MIXED = "Mixed runs, whose losses may not compare"


def left_out_sections(runs: Runs) -> list[Section]:
    """Sections on the runs that were left out, and on how the others differ where that was allowed."""
    lines = [f"left out: {gone.source} ({gone.rule})" for gone in runs.excluded]
    found = [Section("Runs left out", ["\n".join(lines)])] if lines else []
    return [*found, *([Section(MIXED, list(runs.mixed))] if runs.mixed else [])]


def with_them_text(with_them: Attempt, name: str) -> str:
    """The value with the excluded runs and its status, or why there is none."""
    runs = f"{with_them.runs} runs"
    if not with_them.parameters:
        return f"with them ({runs}): not defined, because: {with_them.message}"
    if name not in with_them.parameters:
        return f"with them ({runs}): the law has no {name}"
    doubt = "" if with_them.status == "ok" else f", not to be trusted: {with_them.message}"
    return f"{with_them.parameters[name]:.4f} with them ({runs}{doubt})"


def _of_fit(fit: FitSummary) -> list[str | Table]:
    rows = []
    for name, value in fit.parameters.items():
        flag = "at bound" if name in fit.at_bound else ""
        rows.append([name, significant(value, 5), interval_text(fit, name), flag])
    return [
        f"Law: {fit.law}. Split: {fit.split}. Status: {fit.status} ({fit.message}).",
        Table(["parameter", "value", "95% interval", "flag"], rows),
        f"R² {fit.r_squared:.4f}, RMSE {fit.rmse:.4f} nats, objective {fit.objective:.5e}, {fit.runs} runs; "
        f"{fit.starts.agreeing} of {fit.starts.total} starts agree ({fit.starts.dropped_early} dropped early), "
        f"gradient norm {fit.gradient_norm:.0e}, condition number {significant(fit.condition, 2)}, seed {fit.seed}.",
    ]


def _correlations(fit: FitSummary) -> list[str | Table]:
    first, *others = fit.parameters
    if not others:
        return []
    columns = [first, *others[:-1]]
    rows = []
    for i, a in enumerate(others):
        known = [f"{fit.correlations[a][b] or 0:+.2f}" for b in columns[: i + 1]]
        rows.append([a, *known, *[""] * (len(columns) - len(known))])
    return ["Correlations (Gauss-Newton):", Table(["", *columns], rows)]


def _fit(analysis: Analysis) -> Section:
    fit = analysis.fit
    parts = _of_fit(fit)
    if fit.effective_ratios:
        rows = [[f"{e.r:g}", f"{e.unique:.3f}", f"{e.effective:.3f}"] for e in fit.effective_ratios]
        width = f"{fit.effective_ratios[0].d_model:g}"
        parts += [
            f"Effective size (N_once + m·N_rec)/N(r=1) at d_model {width}; it hardly depends on the split:",
            Table(["r", "unique", "effective"], rows),
        ]
    parts += _correlations(fit)
    if analysis.with_excluded_runs:
        name = analysis.parameter_of_interest
        with_them = with_them_text(analysis.with_excluded_runs, name)
        parts.append(f"{name} = {fit.parameters[name]:.4f} without the excluded runs, {with_them}.")
    return Section("Fit", parts)


def _intervals(analysis: Analysis) -> Section:
    name = analysis.parameter_of_interest
    found = analysis.fit.intervals.get(name, ())
    if not found:
        reason = analysis.intervals_refused or "no bootstrap was asked for"
        return Section(f"Uncertainty of {name}", [f"Not estimated: {reason}."])
    rows = []
    for i in found:
        method = i.method + (" (recommended)" if i.recommended else "")
        counts = "-" if i.at_or_below_zero is None else f"{i.at_or_below_zero} / {i.at_or_above_one}"
        drawn = ["-" if value is None else str(value) for value in (i.resamples, i.seed)]
        rows.append([method, f"[{i.low:.4f}, {i.high:.4f}]", *drawn, counts, i.assumes])
    header = ["interval (95%)", name, "resamples", "seed", f"{name} <= 0 / >= 1", "assumes"]
    trust = (
        "Trust the widened block bootstrap: runs of one (budget, architecture) cell share errors, which the "
        "run-level and profile intervals take for independent, so they are too narrow; the plain block bootstrap "
        "ignores the parameters that each resample fits."
    )
    return Section(f"Uncertainty of {name}", [Table(header, rows), trust])


def _published(found: Distance) -> Section:
    low, high = found.interval
    row = [f"published, split {found.split}", f"{found.phi:.3f}", f"[{low:.2f}, {high:.2f}]"]
    rows = [[*row, f"{found.difference:+.4f}", ""]]
    refit = found.refit
    if isinstance(refit, PaperRefit):
        row = [f"the paper's runs fitted here, split {refit.split}", f"{refit.phi:.4f}", "-"]
        rows.append([*row, f"{refit.difference:+.4f}", refit.status])
    note = (
        "phi depends on the split, so only a value under the same split compares with this one. Another scale, layout "
        "or corpus may have another phi."
    )
    header = ["phi of the paper's grid", "phi", "95% interval", "this phi - that", "status"]
    return Section("Beside the paper's phi", [Table(header, rows), note])


def _splits(splits: Sequence[FitSummary | Refused], recurrences: Sequence[float]) -> Section:
    rows: list[Row] = []
    for s in splits:
        if isinstance(s, Refused):
            rows.append([s.split, "-", "", "", s.status, s.message])
            continue
        effective = " ".join(f"{e.effective:.3f}" for e in s.effective_ratios)
        phi = [f"{s.parameters['phi']:.4f}", interval_text(s, "phi")]
        rows.append([s.split, *phi, effective, s.status, s.description])
    note = (
        "phi depends on where the injection is counted; the effective size does not, so quote it beside phi."
    )
    shown = ", ".join(f"{r:g}" for r in recurrences)
    header = ["split", "phi", "95% interval", f"effective size, r = {shown}", "status", "what it is"]
    return Section("phi by split", [Table(header, rows), note])


def _parameters(label: str, fits: Sequence[tuple[str, FitSummary | Refused]]) -> Table:
    rows: list[Row] = []
    for name, f in fits:
        if isinstance(f, Refused):
            rows.append([name, *["-"] * (len(_OF_CHINCHILLA) + 2), f"{f.status}: {f.message}"])
            continue
        values = [significant(f.parameters[n], 4) for n in _OF_CHINCHILLA]
        rows.append([name, *values, f"{f.objective * 1e5:.2f}", f"{f.r_squared:.4f}", f.status])
    return Table([label, *_OF_CHINCHILLA, "objective ×1e5", "R²", "status"], rows)


def _stability(analysis: Analysis) -> Section:
    name = analysis.parameter_of_interest
    halves = []
    for h in analysis.halves:
        value = f"{h.parameters[name]:.4f}" if h.parameters else "-"
        halves.append([h.half, str(h.runs), value, h.status])
    parts: list[str | Table] = [Table(["budgets", "runs", name, "status"], halves)]
    spans: dict[str, float] = {}
    rows: list[Row] = []
    for group, left in analysis.leave_out.items():
        values = [row.parameters[name] for row in left]
        spans[group] = max(values) - min(values)
        if group == "cell":
            doubtful = sum(row.status != "ok" for row in left)
            status = f"{doubtful} doubtful" if doubtful else "ok"
            span = f"{min(values):.4f} to {max(values):.4f}"
            rows.append([f"without one cell ({len(left)} times)", "", span, "", status])
            continue
        for row in left:
            numbers = [str(row.runs), f"{row.parameters[name]:.4f}", f"{row.held_out_rmse:.4f}"]
            rows.append([f"without {group} = {row.left_out:g}", *numbers, row.status])
    if rows:
        parts.append(Table(["left out", "runs", name, "RMSE on them (nats)", "status"], rows))
        widest = max(spans, key=lambda g: spans[g])
        moves = ", ".join(f"one {g}: {span:.4f}" for g, span in spans.items())
        parts.append(f"Leaving out moves {name} by (range) {moves}. Leaving out one {widest} moves it most.")
    return Section("Stability", parts)


def _identification(told: Judgement, repeats: LackOfFit | None) -> Section:
    """What the status rests on besides the search."""
    parts: list[str | Table] = []
    if told.misfit is not None:
        parts.append(
            f"RMSE is {told.misfit:.2f} times the spread between r at equal budget and width, "
            f"{told.spread_between_r:.4f} nats (median standard deviation)."
        )
    parts.append(
        f"The run that moves {told.parameter} most when it is left out is {told.most_moved.source}: "
        f"{told.most_moved.value:.4f} without it."
    )
    if told.outliers:
        rows = [
            [o.source, f"{o.loss:.4f}", f"{o.predicted:.4f}", f"{o.deviations:.1f}"] for o in told.outliers
        ]
        parts.append(Table(["run far from all others", "loss", "predicted", "robust deviations"], rows))
    if repeats is None:
        parts.append(
            "No run was repeated with another seed, so noise and misfit of the law cannot be told apart."
        )
        return Section("Identification", parts)
    parts.append(
        f"Repeats with other seeds ({repeats.repeated} settings) scatter by {repeats.pure_error:.4f} in log-loss, and "
        f"the law misses their means by {repeats.misfit:.4f} beyond that: F = {repeats.ratio:.1f} with "
        f"{repeats.degrees[0]} and {repeats.degrees[1]} degrees of freedom, p = {repeats.p:.2g} without misfit."
    )
    return Section("Identification", parts)


def _sensitivity(rows: Sequence[Sensitivity]) -> Section:
    names = list(rows[0].parameters)
    table = []
    for row in rows:
        values = [significant(row.parameters[name], 4) for name in names]
        shown = "least squares" if row.delta is None else f"{row.delta:g}"
        table.append([shown, *values, f"{row.rmse:.4f}", row.status])
    note = "Below delta, in log-loss, residuals count by their square, beyond it by their size; the paper's is 0.001."
    return Section("Other losses of the fit", [Table(["delta", *names, "RMSE", "status"], table), note])


def _residuals(residuals: Residuals) -> Section:
    parts: list[str | Table] = []
    for groups, label in ((residuals.by_r, "r"), (residuals.by_budget, "budget")):
        rows = [
            [f"{g.group:g}", str(g.runs), f"{g.mean:+.4f}", f"{g.max:.4f}", f"{g.rmse:.4f}"] for g in groups
        ]
        parts.append(Table([label, "runs", "mean", "largest", "RMSE"], rows))
    s, what = residuals.scatter, "Residuals are observed - predicted, in nats."
    if not isinstance(s, Scatter):
        refused = f"Scatter of runs and cells: not estimated: {s['refused']}."
        return Section("Residuals", [*parts, f"{what} {refused}"])
    sentence = (
        f"{what} In log-loss, runs scatter by {s.run:.4f} within their cell and the cells themselves by "
        f"{s.cell:.4f}; cell means spread {s.cell_share_of_mean:.1f} times as far as independent runs would let them."
    )
    if s.cell_share_of_mean > 1.3:
        sentence += (
            " The residuals are dominated by misfit of the law's shape, not by seed noise: the intervals describe the "
            "fit of this law to this design, and an extrapolation needs its prediction interval."
        )
    return Section("Residuals", [*parts, sentence])


def _laws(laws: Sequence[RivalFit | RivalRefused]) -> Section:
    rows: list[Row] = []
    fitted = [law for law in laws if isinstance(law, RivalFit)]
    judged = [law for law in fitted if law.claim]
    for law in sorted(fitted, key=lambda law: law.aicc_difference):
        own = {k: v for k, v in law.parameters.items() if k not in _OF_CHINCHILLA}
        shown = ", ".join(f"{k} {significant(v, 3)}" for k, v in own.items()) or "-"
        by_r = "-" if law.held_out_by_r is None else f"{law.held_out_by_r:.4f}"
        held_out = [f"{law.held_out_by_budget:.4f}", f"{law.held_out_by_cell:.4f}", by_r]
        chance = []
        if judged:
            chance = ["-", "-"] if not law.claim else [f"{law.claim.gain:+.3f}", f"{law.claim.share:.1%}"]
        row = [
            law.law,
            shown,
            f"{law.aicc_difference:.1f}",
            *chance,
            f"{law.rmse:.4f}",
            *held_out,
            law.status,
        ]
        rows.append(row)
    columns = ["gain", "by chance"] if judged else []
    header = [
        "law",
        "its parameters",
        "AICc - best",
        *columns,
        "RMSE",
        "held out: budget",
        "cell",
        "r",
        "status",
    ]
    note = (
        f"{len(laws)} forms were tried on the same runs: a small win among many forms means little. Reference points "
        "of the drifting forms are geometric means of the data."
    )
    doubts = [f"{law.law}: {law.message}." for law in laws if law.status != "ok"]
    return Section("Rival laws", [Table(header, rows), *doubts, *([_judged(judged)] if judged else []), note])


def _judged(laws: Sequence[RivalFit]) -> str:
    """Whether any rival is better than the first law, by the simulated grids."""
    rivals = [law for law in laws if law.share_of_any is not None]
    claims = [law.claim for law in laws if law.claim]
    text = (
        f"Gain: log of the ratio of objectives, of the law with fewer parameters over that with more. By chance: the "
        f"share of {claims[0].grids} grids drawn from the former, with the noise of runs and cells that it leaves, "
        "in which the gain is as large. "
    )
    if not rivals:
        return text.strip()
    best = min(rivals, key=lambda law: law.share_of_any or 0.0)
    assert best.claim and best.share_of_any is not None
    told = f"{best.share_of_any:.1%} of grids drawn from '{best.claim.simpler}'"
    if best.share_of_any < LEVEL:
        return f"{text}'{best.law}' explains the runs better: one of {len(rivals)} rivals does as well in only {told}."
    lead = f"'{best.law}' comes closest, and one of {len(rivals)} rivals does as well in {told}"
    return f"{text}No rival is better than chance would make it: {lead}."


def _minima(minima: Sequence[Minimum]) -> Section:
    """The width of the lowest loss in every cell, and whether wider and narrower ones were tried."""
    rows: list[Row] = []
    for m in minima:
        fitted = f"{m.parabola.d_model:.0f}" if m.parabola.d_model else "-"
        lowest = [f"{m.d_model:g}", f"{m.loss:.4f}", f"{m.tokens:.3g}", "yes" if m.interior else "no", fitted]
        rows.append([f"{m.r:g}", f"{m.budget:.3g}", ", ".join(f"{d:g}" for d in m.d_models), *lowest])
    header = ["r", "budget", "widths", "lowest at", "its loss", "its tokens", "interior", "parabola's width"]
    inside = sum(m.interior for m in minima)
    sentence = f"The lowest loss lies at neither end of the widths in {inside} of {len(rows)} cells."
    return Section("Lowest loss of each cell", [Table(header, rows), sentence])


def _allocation(found: Allocation, joint_status: str) -> Section:
    def pair(values: Exponents | None) -> list[str]:
        return ["-", "-"] if values is None else [f"{value:.3f}" for value in values]

    rows: list[Row] = []
    for row in found.per_r:
        if isinstance(row, AllocationRefused):
            rows.append([f"{row.r:g}", *["-"] * 9, row.refusal])
            continue
        own = row.from_own_chinchilla
        notes = [f"own law: {own.status}"] if own and own.status != "ok" else []
        notes += [f"joint law: {joint_status}"] if joint_status != "ok" else []
        optima = [*(own.optima if own else ()), *row.from_joint_law.optima]
        outside = sum(o.refusal is not None for o in optima)
        notes += [f"{outside} minima outside the sampled N"] if outside else []
        from_own = [*pair(own.closed_form_exponents), *pair(own.exponents)] if own else ["-"] * 4
        others = [*pair(row.from_joint_law.exponents), *pair(row.from_parabolas["exponents"])]
        rows.append([f"{row.r:g}", f"{row.flops_slope:.3f}", *from_own, *others, "; ".join(notes)])
    header = [
        "r", "k of F~N^k", "closed form N*", "D*", "own law, exact F: N*", "D*", "joint law, exact F: N*", "D*",
        "parabolas N*", "D*", "note",
    ]  # fmt: skip
    parts: list[str | Table] = ["Exponents of N*(C) and D*(C):", Table(header, rows)]
    rows, refused = [], []
    for o in (p.optimum for p in found.parabolas):
        if o.refusal:
            refused.append(f"r={o.r:g} at {o.flops:.3g}: {o.refusal}")
            continue
        sizes = significant(o.n), significant(o.tokens)
        rows.append([f"{o.r:g}", f"{o.flops:.3g}", *sizes, f"{o.loss:.4f}"])
    parts += ["Minima of the iso-FLOPs parabolas:", Table(["r", "budget", "N*", "D*", "L*"], rows)]
    parts += [f"Refused: {'; '.join(refused)}."] if refused else []
    gaps = found.frontier_gaps["parabolas"]
    if gaps:
        parts += ["Frontier gap L*_r(C) - L*_1(C), nats, from parabolas:", gaps_table(gaps, "+.4f")]
    return Section("Compute-optimal allocation", parts)


def _data(data: Data) -> Section:
    low, high = data.tokens_per_parameter
    recurrences = ", ".join(f"{r:g}" for r in data.recurrences)
    sentence = (
        f"{data.runs} runs, r = {recurrences}, {len(data.budgets)} budgets from {data.budgets[0]:.3g} to "
        f"{data.budgets[-1]:.3g} training FLOPs (convention {data.flops_convention}), {data.cells} cells, D/N from "
        f"{low:.3g} to {high:.3g}. Architectures: {'; '.join(data.architectures)}."
    )
    if data.cells_by:
        sentence += (
            f" The runs are not iso-FLOPs: cells of the bootstrap are by {data.cells_by} and architecture."
        )
    if data.mixed:
        sentence += f" **{MIXED}**: {'; '.join(data.mixed)}."
    return Section("Data", [sentence, excluded_table(data.excluded, "excluded run")])
