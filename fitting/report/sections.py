"""fit.json turned into sections of sentences and tables: the one source of the printed text, report.md and
report.html.

Nothing is computed here: every number comes from the analysis (F36).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fitting.report.allocation_sections import allocation_section, minima_section
from fitting.report.document import Row, Section, Table, interval_text
from fitting.report.tables import significant


def sections(analysis: dict[str, Any]) -> list[Section]:
    """Every section for which the analysis has content."""
    builders = (
        ("fit", _fit), ("fit", _intervals), ("published", _published), ("splits", _splits),
        ("restricted", _restricted), ("chinchilla", _chinchilla), ("halves", _stability),
        ("residuals", _residuals), ("laws", _laws), ("minima", minima_section),
        ("allocation", allocation_section), ("data", _data),
    )  # fmt: skip
    return [build(analysis) for key, build in builders if key in analysis]


def _fit(analysis: dict[str, Any]) -> Section:
    fit = analysis["fit"]
    rows: list[Row] = [
        [name, significant(value, 5), interval_text(fit["intervals"].get(name, ())),
         "at bound" if name in fit["at_bound"] else ""]
        for name, value in fit["parameters"].items()
    ]  # fmt: skip
    parts: list[str | Table] = [
        f"Law: {fit['law']}. Split: {fit['split']}. Status: {fit['status']} ({fit['message']}).",
        Table(["parameter", "value", "95% interval", "flag"], rows),
        f"R² {fit['r_squared']:.4f}, RMSE {fit['rmse']:.4f} nats, objective {fit['objective']:.5e}, "
        f"{fit['runs']} runs; {fit['starts']['agreeing']} of {fit['starts']['total']} starts agree "
        f"({fit['starts']['dropped_early']} dropped early), gradient norm {fit['gradient_norm']:.0e}, "
        "condition "
        f"number {significant(fit['condition'], 2)}, seed {fit['seed']}.",
    ]
    if fit["effective_ratios"]:
        parts += [
            "Effective size (N_once + m·N_rec)/N(r=1) at d_model "
            f"{fit['effective_ratios'][0]['d_model']:g}; "
            "it hardly depends on the split:",
            Table(
                ["r", "unique", "effective"],
                [
                    [f"{e['r']:g}", f"{e['unique']:.3f}", f"{e['effective']:.3f}"]
                    for e in fit["effective_ratios"]
                ],
            ),
        ]
    names = list(fit["parameters"])
    if len(names) > 1:
        correlations: list[Row] = [
            [
                a,
                *[
                    f"{fit['correlations'][a][b] or 0:+.2f}" if j < i else ""
                    for j, b in enumerate(names[:-1])
                ],
            ]
            for i, a in enumerate(names)
            if i
        ]
        parts += ["Correlations (Gauss-Newton):", Table(["", *names[:-1]], correlations)]
    with_them = analysis.get("with_excluded_runs")
    if with_them:
        name = analysis["parameter_of_interest"]
        parts.append(
            f"{name} = {fit['parameters'][name]:.4f} without the excluded runs, {with_them_text(with_them, name)}."
        )
    return Section("Fit", parts)


def with_them_text(with_them: dict[str, Any], name: str) -> str:
    """The value with the excluded runs, with its status, or why there is none."""
    runs = f"{with_them['runs']} runs"
    if not with_them["parameters"]:
        return f"with them ({runs}): not defined, because: {with_them['message']}"
    if name not in with_them["parameters"]:
        return f"with them ({runs}): the law has no {name}"
    doubt = "" if with_them["status"] == "ok" else f", not to be trusted: {with_them['message']}"
    return f"{with_them['parameters'][name]:.4f} with them ({runs}{doubt})"


def _intervals(analysis: dict[str, Any]) -> Section:
    name = analysis["parameter_of_interest"]
    found = analysis["fit"]["intervals"].get(name, [])
    if not found:
        reason = analysis.get("intervals_refused", "no bootstrap was asked for")
        return Section(f"Uncertainty of {name}", [f"Not estimated: {reason}."])
    rows: list[Row] = [
        [
            i["method"] + (" (recommended)" if i["recommended"] else ""),
            f"[{i['low']:.4f}, {i['high']:.4f}]",
            "-" if i["resamples"] is None else str(i["resamples"]),
            "-" if i["seed"] is None else str(i["seed"]),
            "-" if i["at_or_below_zero"] is None else f"{i['at_or_below_zero']} / {i['at_or_above_one']}",
            i["assumes"],
        ]
        for i in found
    ]
    header = ["interval (95%)", name, "resamples", "seed", f"{name} <= 0 / >= 1", "assumes"]
    trust = (
        "Trust the widened block bootstrap: runs of one (budget, architecture) cell share errors, which "
        "the "
        "run-level and profile intervals take for independent, so they are too narrow; the plain block "
        "bootstrap "
        "ignores the parameters that each resample fits."
    )
    return Section(f"Uncertainty of {name}", [Table(header, rows), trust])


def _published(analysis: dict[str, Any]) -> Section:
    found = analysis["published"]
    rows: list[Row] = [
        [f"published, split {found['split']}", f"{found['phi']:.3f}",
         f"[{found['interval'][0]:.2f}, {found['interval'][1]:.2f}]", f"{found['difference']:+.4f}", ""],
    ]  # fmt: skip
    refit = found["refit"]
    if "phi" in refit:
        rows.append(
            [
                f"the paper's runs fitted here, split {refit['split']}", f"{refit['phi']:.4f}", "-",
                f"{refit['difference']:+.4f}", refit["status"],
            ]
        )  # fmt: skip
    note = (
        "phi depends on the split, so only a value under the same split compares with this one. Another scale, layout "
        "or corpus may have another phi."
    )
    header = ["phi of the paper's grid", "phi", "95% interval", "this phi - that", "status"]
    return Section("Beside the paper's phi", [Table(header, rows), note])


def _splits(analysis: dict[str, Any]) -> Section:
    rows: list[Row] = []
    for s in analysis["splits"]:
        if "parameters" not in s:
            rows.append([s["split"], "-", "", "", s["status"], s["message"]])
            continue
        effective = " ".join(f"{e['effective']:.3f}" for e in s["effective_ratios"])
        phi = f"{s['parameters']['phi']:.4f}"
        rows.append(
            [
                s["split"],
                phi,
                interval_text(s["intervals"].get("phi", ())),
                effective,
                s["status"],
                s["description"],
            ]  # fmt: skip
        )
    recurrences = ", ".join(f"{r:g}" for r in analysis["data"]["recurrences"])
    note = (
        "phi depends on where the injection is counted; the effective size does not, so quote it beside phi."
    )
    header = ["split", "phi", "95% interval", f"effective size, r = {recurrences}", "status", "what it is"]
    return Section("phi by split", [Table(header, rows), note])


def _parameter_rows(fits: Sequence[dict[str, Any]], label: str) -> Table:
    names = ["A", "alpha", "B", "beta", "E"]
    rows: list[Row] = []
    for f in fits:
        if "parameters" not in f:
            rows.append([f"{f[label]:g}", *["-"] * (len(names) + 2), f"{f['status']}: {f['message']}"])
            continue
        values = [significant(f["parameters"][n], 4) for n in names]
        rows.append(
            [f"{f[label]:g}", *values, f"{f['objective'] * 1e5:.2f}", f"{f['r_squared']:.4f}", f["status"]]
        )
    return Table([label, *names, "objective ×1e5", "R²", "status"], rows)


def _restricted(analysis: dict[str, Any]) -> Section:
    return Section("Restricted fits, phi fixed", [_parameter_rows(analysis["restricted"], "phi")])


def _chinchilla(analysis: dict[str, Any]) -> Section:
    return Section("Chinchilla law per r", [_parameter_rows(analysis["chinchilla"], "r")])


def _stability(analysis: dict[str, Any]) -> Section:
    name = analysis["parameter_of_interest"]
    rows: list[Row] = [
        [h["half"], str(h["runs"]), f"{h['parameters'][name]:.4f}" if h["parameters"] else "-", h["status"]]
        for h in analysis["halves"]
    ]
    parts: list[str | Table] = [Table(["budgets", "runs", name, "status"], rows)]
    spans: dict[str, float] = {}
    rows = []
    for group, left in analysis["leave_out"].items():
        values = [row["parameters"][name] for row in left]
        spans[group] = max(values) - min(values)
        if group != "cell":
            rows += [
                [f"without {group} = {row['left_out']:g}", str(row["runs"]), f"{row['parameters'][name]:.4f}",
                 f"{row['held_out_rmse']:.4f}", row["status"]]
                for row in left
            ]  # fmt: skip
        else:
            doubtful = sum(row["status"] != "ok" for row in left)
            rows.append(
                [f"without one cell ({len(left)} times)", "", f"{min(values):.4f} to {max(values):.4f}", "",
                 f"{doubtful} doubtful" if doubtful else "ok"]
            )  # fmt: skip
    if rows:
        parts.append(Table(["left out", "runs", name, "RMSE on them (nats)", "status"], rows))
        widest = max(spans, key=lambda g: spans[g])
        moves = ", ".join(f"one {g}: {span:.4f}" for g, span in spans.items())
        parts.append(f"Leaving out moves {name} by (range) {moves}. Leaving out one {widest} moves it most.")
    return Section("Stability", parts)


def _residuals(analysis: dict[str, Any]) -> Section:
    residuals, parts = analysis["residuals"], []
    for key, label in (("by_r", "r"), ("by_budget", "budget")):
        rows: list[Row] = [
            [f"{g['group']:g}", str(g["runs"]), f"{g['mean']:+.4f}", f"{g['max']:.4f}", f"{g['rmse']:.4f}"]
            for g in residuals[key]
        ]
        parts.append(Table([label, "runs", "mean", "largest", "RMSE"], rows))
    s = residuals["scatter"]
    if "refused" in s:
        refused = f"Scatter of runs and cells: not estimated: {s['refused']}."
        return Section("Residuals", [*parts, f"Residuals are observed - predicted, in nats. {refused}"])
    sentence = (
        f"Residuals are observed - predicted, in nats. In log-loss, runs scatter by {s['run']:.4f} "
        "within their "
        f"cell and the cells themselves by {s['cell']:.4f}; cell means spread "
        f"{s['cell_share_of_mean']:.1f} times "
        "as far as independent runs would let them."
    )
    if s["cell_share_of_mean"] > 1.3:
        sentence += (
            " The residuals are dominated by misfit of the law's shape, not by seed noise: the intervals "
            "describe "
            "the fit of this law to this design, and an extrapolation needs its prediction interval."
        )
    return Section("Residuals", [*parts, sentence])


def _laws(analysis: dict[str, Any]) -> Section:
    rows: list[Row] = []
    fitted = [law for law in analysis["laws"] if law["parameters"] is not None]
    for law in sorted(fitted, key=lambda row: row["aicc_difference"]):
        by_r = "-" if law["held_out_by_r"] is None else f"{law['held_out_by_r']:.4f}"
        own = {k: v for k, v in law["parameters"].items() if k not in ("A", "alpha", "B", "beta", "E")}
        rows.append(
            [
                law["law"], ", ".join(f"{k} {significant(v, 3)}" for k, v in own.items()) or "-",
                f"{law['aicc_difference']:.1f}", f"{law['rmse']:.4f}", f"{law['held_out_by_budget']:.4f}",
                f"{law['held_out_by_cell']:.4f}", by_r, law["status"],
            ]
        )  # fmt: skip
    header = ["law", "its parameters", "AICc - best", "RMSE", "held out: budget", "cell", "r", "status"]
    note = (
        f"{len(analysis['laws'])} forms were tried on the same runs: a small win among many forms means little. "
        "Reference points "
        "of the drifting forms are geometric means of the data."
    )
    doubts = [f"{law['law']}: {law['message']}." for law in analysis["laws"] if law["status"] != "ok"]
    return Section("Rival laws", [Table(header, rows), *doubts, note])


def _data(analysis: dict[str, Any]) -> Section:
    data = analysis["data"]
    low, high = data["tokens_per_parameter"]
    parts: list[str | Table] = [
        f"{data['runs']} runs, r = {', '.join(f'{r:g}' for r in data['recurrences'])}, "
        f"{len(data['budgets'])} budgets "
        f"from {data['budgets'][0]:.3g} to {data['budgets'][-1]:.3g} training FLOPs (convention "
        f"{data['flops_convention']}), {data['cells']} cells, D/N from {low:.3g} to {high:.3g}. "
        "Architectures: "
        f"{'; '.join(data['architectures'])}."
    ]
    if data["excluded"]:
        rows: list[Row] = [[gone["source"], gone["rule"]] for gone in data["excluded"]]
        parts.append(Table(["excluded run", "rule"], rows))
    else:
        parts.append("No run was excluded.")
    return Section("Data", parts)
