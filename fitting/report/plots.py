"""The report's figures, drawn from the analysis alone. Only the modules of figures load matplotlib.

Colours are Okabe and Ito's, safe for colour-blind readers; every r also has its own marker.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: E402

from fitting.studies.allocation import AllocationOfR, Optimum  # noqa: E402
from fitting.studies.analysis import Analysis  # noqa: E402

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "lines.linewidth": 1.2,
    "lines.markersize": 3.5, "figure.constrained_layout.use": True, "savefig.dpi": 200,
}  # fmt: skip
WIDTH = 6.6

Result = TypeVar("Result")
Figures = Sequence[tuple[Callable[[Result], Figure | None], str]]
"""Functions `_NAME` that draw NAME.png, or return None if there is nothing to draw, each with its caption."""


def figures(analysis: Analysis) -> dict[str, tuple[str, bytes]]:
    """Every figure the analysis has content for: file name -> (caption, PNG)."""
    return drawn(analysis, _FIGURES)


def drawn(result: Result, wanted: Figures[Result]) -> dict[str, tuple[str, bytes]]:
    """Those of the `wanted` figures that a result has content for: file name -> (caption, PNG)."""
    out = {}
    with plt.rc_context(_STYLE):  # type: ignore[arg-type]
        for draw, caption in wanted:
            figure = draw(result)
            if figure is None:
                continue
            buffer = io.BytesIO()
            # With fixed metadata, the same analysis gives the same bytes.
            figure.savefig(buffer, format="png", metadata={"Software": None})
            plt.close(figure)
            out[f"{draw.__name__.removeprefix('_')}.png"] = (caption, buffer.getvalue())
    return out


def look(index: int) -> dict[str, Any]:
    """Colour and marker of the r at `index` among the sorted ones."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def log_ticks(axis: Any) -> None:
    """Labels such as 30M at 1 and 3 of each decade only: the default ones overlap and take long to lay out."""
    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axis.set_minor_locator(NullLocator())


def _short(value: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 0.999 * unit <= value < 999 * unit:
            return f"{value / unit:.0f}{letter}"
    return f"{value:.0e}".replace("+", "")


def panels(budgets: Sequence[float], height: float) -> tuple[Figure, np.ndarray]:
    """A figure of losses over size with a panel of this height (inches) for each budget; its axes (rows, columns)."""
    columns = min(3, len(budgets))
    rows = -(-len(budgets) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height * rows), squeeze=False)
    for axis, budget in zip(axes.flat, budgets, strict=False):
        axis.set(xscale="log", title=f"C = {budget:.3g} FLOPs")
        log_ticks(axis.xaxis)
    for axis in axes.flat[len(budgets) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("loss (nats/token)")
    return figure, axes


def _legend_below(figure: Figure, axis: Any, title: str) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), title=title)


def _colour(analysis: Analysis, r: float) -> Any:
    return look(analysis.data.recurrences.index(r))["color"]


def _dots(axis: Any, analysis: Analysis, r: float, x: Any, y: Any) -> None:
    """Points in the colour and with the marker of their r."""
    axis.plot(x, y, linestyle="", label=f"r = {r:g}", **look(analysis.data.recurrences.index(r)))


def _points(analysis: Analysis, r: float) -> dict[str, np.ndarray]:
    chosen = [vars(p) for p in analysis.data.points if p.r == r]
    return {key: np.array([p[key] for p in chosen]) for key in chosen[0] if key != "source"}


def _minima(analysis: Analysis, r: float) -> list[Optimum]:
    """The minima of the parabolas that have one."""
    optima = (p.optimum for p in analysis.allocation.parabolas if p.r == r)
    return [optimum for optimum in optima if optimum.loss is not None]


def _ratios(analysis: Analysis) -> Figure | None:
    rows = analysis.fit.effective_ratios
    if len(rows) < 2:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.6))
    r = [row.r for row in rows]
    left.plot(r, [row.unique for row in rows], "o-", color=COLOURS[0], label="unique")
    left.plot(r, [row.effective for row in rows], "s--", color=COLOURS[1], label="effective")
    left.set(xlabel="recurrences r", ylabel="parameters relative to r = 1", ylim=(0, 1.15))
    base = rows[0].flops_per_token / 3
    right.plot(r, [row.flops_per_token / 3 / base for row in rows], "^-", color=COLOURS[2])
    right.set(xlabel="recurrences r", ylabel="relative forward FLOPs/token", ylim=(0, 1.25))
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(r, [f"{value:g}" for value in r])
    left.legend()
    figure.suptitle(f"d_model {rows[0].d_model:g}, split {analysis.fit.split}", fontsize=8)
    return figure


def _frontier(analysis: Analysis) -> Figure | None:
    if analysis.restricted is None or not analysis.curves.per_r:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.9), sharey=True)
    budgets = analysis.curves.budgets
    for axis, key, title in zip(axes, ("law", "phi = 1"), ("fitted law", "fit with phi = 1"), strict=True):
        for row in analysis.curves.per_r:
            axis.plot(budgets, row.frontier[key], color=_colour(analysis, row.r))
        for r in analysis.data.recurrences:
            minima = _minima(analysis, r)
            _dots(axis, analysis, r, [o.flops for o in minima], [o.loss for o in minima])
        axis.set(xscale="log", xlabel="training FLOPs C", title=title)
        log_ticks(axis.xaxis)
    axes[0].set_ylabel("compute-optimal loss (nats/token)")
    axes[0].legend(title="points: parabola minima")
    return figure


def _isoflops(analysis: Analysis) -> Figure:
    budgets = analysis.data.budgets
    figure, axes = panels(budgets, 2.2)
    for axis, budget in zip(axes.flat, budgets, strict=False):
        for r in analysis.data.recurrences:
            cell = _points(analysis, r)
            inside = cell["budget"] == budget
            n, loss = cell["n"][inside], cell["loss"][inside]
            _dots(axis, analysis, r, n, loss)
            for p in analysis.allocation.parabolas:
                if (p.r, p.budget) != (r, budget) or p.coefficients is None:
                    continue
                u = np.linspace(np.log(n.min()), np.log(n.max()), 60)
                a, b, c = p.coefficients
                colour = _colour(analysis, r)
                axis.plot(np.exp(u), a + b * u + c * u * u, color=colour)
                if p.optimum.loss is not None:
                    star = {"marker": "*", "markersize": 8, "linestyle": "", "color": colour}
                    edge = {"markeredgecolor": "black", "markeredgewidth": 0.6}
                    axis.plot(p.optimum.n, p.optimum.loss, **star, **edge)
    for axis in axes[-1]:
        axis.set_xlabel("unique parameters N")
    _legend_below(figure, axes[0, 0], "stars: parabola minima")
    return figure


def _allocation(analysis: Analysis) -> Figure | None:
    rows = [row for row in analysis.allocation.per_r if isinstance(row, AllocationOfR)]
    if not rows:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.9))
    names = (("n", "N* (unique parameters)"), ("tokens", "D* (tokens)"))
    for axis, (key, label) in zip(axes, names, strict=True):
        for row in rows:
            law, minima = row.from_joint_law.optima, _minima(analysis, row.r)
            colour = _colour(analysis, row.r)
            axis.plot([o.flops for o in law], [getattr(o, key) for o in law], color=colour)
            _dots(axis, analysis, row.r, [o.flops for o in minima], [getattr(o, key) for o in minima])
        axis.set(xscale="log", yscale="log", xlabel="training FLOPs C", ylabel=label)
        log_ticks(axis.xaxis)
        log_ticks(axis.yaxis)
    _legend_below(figure, axes[0], "lines: joint law, exact F(N); points: parabola minima")
    return figure


def _predicted(analysis: Analysis) -> Figure:
    recurrences = analysis.data.recurrences
    figure, axes = plt.subplots(
        1, len(recurrences), figsize=(WIDTH, 2.3), sharex=True, sharey=True, squeeze=False
    )
    for axis, r in zip(axes[0], recurrences, strict=True):
        p = _points(analysis, r)
        both = np.concatenate([p["loss"], p["predicted"]])
        span = [both.min(), both.max()]
        axis.plot(span, span, color="0.5", linewidth=0.8)
        _dots(axis, analysis, r, p["predicted"], p["loss"])
        rmse = np.sqrt((p["residual"] ** 2).mean())
        axis.set(title=f"r = {r:g}: RMSE {rmse:.4f}", xlabel="predicted loss")
    axes[0, 0].set_ylabel("observed loss (nats/token)")
    return figure


def _residuals(analysis: Analysis) -> Figure:
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.7), sharey=True)
    for axis, key, label in zip(axes, ("n", "tokens"), ("unique parameters N", "tokens D"), strict=True):
        axis.axhline(0, color="0.5", linewidth=0.8)
        for r in analysis.data.recurrences:
            p = _points(analysis, r)
            _dots(axis, analysis, r, p[key], p["residual"])
        axis.set(xscale="log", xlabel=label)
        log_ticks(axis.xaxis)
    axes[0].set_ylabel("observed - predicted (nats)")
    axes[1].legend(ncols=2)
    return figure


def _profile(analysis: Analysis) -> Figure | None:
    name, curve = analysis.parameter_of_interest, analysis.profile
    if curve is None:
        return None
    figure, axis = plt.subplots(figsize=(WIDTH, 3.0))
    values, statistic = np.array(curve.values), np.array(curve.statistic)
    intervals = analysis.fit.intervals.get(name, ())
    top = 3.84 * 2.6
    axis.plot(values, statistic, color="black", label="profile T")
    axis.axhline(3.84, color="0.5", linestyle=":", linewidth=1)
    axis.annotate("3.84", (0.005, 3.84), xycoords=("axes fraction", "data"), va="bottom", fontsize=7)
    axis.axvline(analysis.fit.parameters[name], color="0.5", linewidth=0.8)
    for i, interval in enumerate(intervals):
        height = -0.9 * (i + 1)
        axis.plot(
            [interval.low, interval.high], [height, height], color=COLOURS[i],
            linewidth=3.5 if interval.recommended else 2,
            label=interval.method + (" (recommended)" if interval.recommended else ""),
        )  # fmt: skip
    # If no interval could be made, the axis goes as far as the curve.
    shown = values[statistic < top] if (statistic < top).any() else values
    low = min((i.low for i in intervals), default=float(shown.min()))
    high = max((i.high for i in intervals), default=float(shown.max()))
    margin = 0.35 * (high - low)
    axis.set(
        xlabel=f"{name} (split {analysis.fit.split})", ylabel="T (below 0: intervals)",
        ylim=(-0.9 * (len(intervals) + 1), top), xlim=(low - margin, high + margin),
    )  # fmt: skip
    axis.set_yticks([0, 3.84, 7.68], ["0", "", "7.7"])
    figure.legend(loc="outside lower center", ncols=3)
    return figure


_FIGURES: Figures[Analysis] = (
    (
        _ratios,
        "Unique parameters and effective size (N_once + m·N_rec) relative to r = 1 at one width; "
        "forward FLOPs.",
    ),
    (
        _frontier,
        "Compute-optimal loss against training FLOPs: parabola minima, the fitted law, and the law with "
        "phi = 1.",
    ),
    (_isoflops, "Loss against unique parameters for every budget, with parabolas and their minima."),
    (_allocation, "Compute-optimal size and tokens against training FLOPs."),
    (_predicted, "Observed against predicted loss for every r."),
    (_residuals, "Residuals against size and tokens."),
    (_profile, "Profile likelihood of the parameter of interest, and all intervals."),
)
