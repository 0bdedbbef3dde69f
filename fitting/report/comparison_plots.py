"""The figures of a case study, drawn from the comparison alone."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fitting.estimation.results import recommended
from fitting.report.comparison_sections import CHANNELS, mean_channels
from fitting.report.plots import COLOURS, MARKERS, WIDTH, Figures, drawn, look, panels
from fitting.studies.comparison import Comparison


def figures(found: Comparison) -> dict[str, tuple[str, bytes]]:
    """Every figure the comparison has content for: file name -> (caption, PNG)."""
    return drawn(found, _FIGURES)


def _delta_phi(found: Comparison) -> Figure:
    figure, axis = plt.subplots(figsize=(WIDTH, 1.9))
    axis.axvline(0, color="0.5", linewidth=0.8)
    for i, e in enumerate(found.estimates):
        best = recommended(e.intervals)
        if best:
            axis.plot([best.low, best.high], [i, i], color=COLOURS[i], linewidth=2)
        axis.plot(e.delta_phi, i, marker=MARKERS[i], color=COLOURS[i], markersize=6, linestyle="")
    names = [e.method for e in found.estimates]
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set(xlabel=f"delta phi (split {found.split}, status {found.status})")
    return figure


def _losses(found: Comparison) -> Figure:
    points = found.points
    figure, axes = panels(found.budgets, 2.3)
    by_label: dict[str, Any] = {}
    for axis, budget in zip(axes.flat, found.budgets, strict=False):
        axis.set_xlabel("unique parameters N")
        for i, r in enumerate(sorted({p.r for p in points})):
            for arm in ("shared", "baseline", "study"):
                chosen = [p for p in points if (p.r, p.budget, p.arm) == (r, budget, arm)]
                chosen.sort(key=lambda p: p.n)
                if not chosen:
                    continue
                style = {"linestyle": "-", "markerfacecolor": look(i)["color"]}
                if arm == "study":
                    style = {"linestyle": "--", "markerfacecolor": "white"}
                n, loss = [p.n for p in chosen], [p.loss for p in chosen]
                label = f"r = {r:g}, {arm}"
                (by_label[label],) = axis.plot(n, loss, linewidth=0.8, label=label, **style, **look(i))
    figure.legend(list(by_label.values()), list(by_label), loc="outside lower center", ncols=4)
    return figure


def _channels(found: Comparison) -> Figure | None:
    if not found.channels:
        return None
    figure, axis = plt.subplots(figsize=(WIDTH, 2.5))
    means = mean_channels(found)
    width = 0.8 / len(CHANNELS)
    for i, name in enumerate(CHANNELS):
        at = [j + (i - (len(CHANNELS) - 1) / 2) * width for j in range(len(means))]
        axis.bar(at, [row[name] for row in means.values()], width, color=COLOURS[i], label=name)
    axis.axhline(0, color="0.5", linewidth=0.8)
    axis.set_xticks(range(len(means)), [f"r = {r:g}" for r in means])
    axis.set_ylabel("study - baseline (nats)")
    axis.legend(ncols=len(CHANNELS))
    return figure


_FIGURES: Figures[Comparison] = (
    (_delta_phi, "The three estimates of delta phi with their widened 95% intervals."),
    (
        _losses,
        "Loss against unique parameters for every shared budget; the study is dashed, with open markers.",
    ),
    (_channels, "Where the differences of matched runs come from, means for every r."),
)
