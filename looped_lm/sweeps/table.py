"""Tables of runs as text."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO

from fitting.records import architecture
from looped_lm.common.text import aligned, duration
from looped_lm.sweeps.files import CONFIG
from looped_lm.sweeps.place import Status
from looped_lm.sweeps.planning import PlannedRun
from looped_lm.sweeps.runs import Run

GIB = 2**30


def varying(runs: Sequence[Run]) -> list[str]:
    """Axes in which runs differ; `config` always."""
    axes = list(dict.fromkeys(key for run in runs for key in run.axes))
    return [key for key in axes if key == CONFIG or len({tuple(run.label([key])) for run in runs}) > 1]


def short(axes: Sequence[str]) -> list[str]:
    """Headings of axes: their last words."""
    return [axis.rpartition(".")[2] for axis in axes]


def plan_table(planned: Sequence[PlannedRun], rate: float | None) -> str:
    """One line per run: N, D, FLOPs, steps, rows and, at a rate in FLOPs/s, the time."""
    axes = varying([p.run for p in planned])
    with_memory = any(p.memory is not None for p in planned)
    header = ["hash", *short(axes), "N", "D", "D/N", "FLOPs/token", "steps", "FLOPs"]
    header += ["rows", "GiB"] if with_memory else []
    header += ["hours"] if rate else []
    rows = []
    for p in planned:
        row = [p.run.hash, *p.run.label(axes), f"{p.n:,}", f"{p.tokens:,.0f}", f"{p.tokens / p.n:.1f}"]
        row += [f"{p.flops_per_token:.4e}", f"{p.steps:,}", f"{p.flops:.3e}"]
        if with_memory:
            row += [
                "none fits" if p.batch_size is None else str(p.batch_size),
                f"{(p.memory or 0) / GIB:.1f}",
            ]
        row += [f"{p.flops / rate / 3600:.2f}"] if rate else []
        rows.append(row)
    return aligned(header, rows, left=1 + len(axes))


def status_table(statuses: Sequence[Status]) -> str:
    """One line per run: its state, how far it is, loss, time of training and attempts."""
    axes = varying([s.run for s in statuses])
    rows = []
    for s in statuses:
        record = s.record
        steps = "" if record is None else f"{record.steps:,}/{record.steps_planned:,}"
        loss = "" if record is None or record.val_loss is None else f"{record.val_loss:.4f}"
        seconds = "" if record is None else duration(record.wall_seconds)
        rows.append([s.hash, *s.run.label(axes), s.state.value, steps, loss, seconds, str(s.attempts)])
    return aligned(
        ["hash", *short(axes), "state", "steps", "val loss", "time", "attempts"], rows, 2 + len(axes)
    )


_DESIGN = (
    "r", "d_model", "flops_budget", "flops_per_token", "tokens", "n_once", "n_rec", "n_injection", "injection",
    "bptt", "run",
)  # fmt: skip


def design(planned: Sequence[PlannedRun]) -> str:
    """The runs as a CSV that `python -m fitting plan` reads."""
    text = StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_DESIGN)
    for p in planned:
        budget = "" if p.flops_budget is None else repr(p.flops_budget)
        numbers = [p.r, p.d_model, budget, repr(p.flops_per_token), repr(p.tokens), p.n_once, p.n_rec]
        writer.writerow([*numbers, p.n_injection, *architecture(p.components, p.r), p.run.id])
    return text.getvalue()
