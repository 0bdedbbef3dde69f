"""Results of an evaluation: rows, averages over the axes, the JSON file and the printed table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from looped_lm.common.text import aligned
from looped_lm.evaluation.lens import DepthRow, ExitRow
from looped_lm.evaluation.suite import AXES

FORMAT, VERSION = "looped_lm evaluation", 1


def parsed(text: str) -> dict[str, Any] | None:
    """Content of a results file, from its text; None if the text is something else."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


class _Row:
    """Replaces a loss that is not finite, which neither JSON nor a mean can hold, by a reason."""

    loss: float | None

    def __post_init__(self) -> None:
        if self.loss is not None and not math.isfinite(self.loss):
            for name, value in (("refused", f"the loss is {self.loss}"), ("loss", None), ("accuracy", None)):
                object.__setattr__(self, name, value)


@dataclass(frozen=True)
class LossRow(_Row):
    """Validation loss (nats per token) at one number of recurrences, or why it was refused.

    A refusal is `expected` if nobody asked for that number of recurrences. A loss that is not finite is refused.
    """

    recurrences: int
    loss: float | None = None
    tokens: int | None = None
    refused: str | None = None
    expected: bool = False


@dataclass(frozen=True)
class TaskRow(_Row):
    """One probe or task at one number of recurrences, or why it was refused, as is a loss that is not finite.

    Args:
        axis: axis of the suite; None: the task is not part of it.
        loss: loss of the gold continuations, in nats per token, over the `tokens` of all `examples`.
        accuracy: share of gold continuations that greedy decoding gives, or a task's `metric`.
        shots: solved examples that a prompt should show.
        cut: number of examples whose prompt was too long and lost its beginning.
        metrics: everything that lm-eval reports.
    """

    task: str
    axis: str | None
    recurrences: int
    loss: float | None = None
    accuracy: float | None = None
    metric: str | None = None
    examples: int | None = None
    tokens: int | None = None
    shots: int | None = None
    cut: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None


@dataclass(frozen=True)
class Axis:
    """Macro-average of an axis at these recurrences, over the `tasks` that were measured out of `of`."""

    axis: str
    recurrences: int
    loss: float | None
    accuracy: float | None
    tasks: int
    of: int


@dataclass
class Results:
    """All rows of one evaluation, and `about`: what was evaluated, and how, in plain JSON types.

    It is `finished` when everything that was asked for has been tried.
    """

    about: dict[str, Any]
    losses: list[LossRow] = field(default_factory=list)
    tasks: list[TaskRow] = field(default_factory=list)
    depths: list[DepthRow] = field(default_factory=list)
    exits: list[ExitRow] = field(default_factory=list)
    finished: bool = False

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was measured."""
        missing = any(row.refused and not row.expected for row in self.losses)
        return self.finished and not missing and not any(row.refused for row in self.tasks)

    def axes(self) -> list[Axis]:
        """Macro-averages: tasks have the same weight, however many examples they have."""
        found = []
        for axis, names in AXES.items():
            for r in dict.fromkeys(row.recurrences for row in self.tasks if row.axis == axis):
                rows = [t for t in self.tasks if (t.axis, t.recurrences) == (axis, r) and t.refused is None]
                loss, accuracy = mean([t.loss for t in rows]), mean([t.accuracy for t in rows])
                found.append(Axis(axis, r, loss, accuracy, len(rows), len(names)))
        return found

    def to_json(self) -> str:
        """The JSON text of the file."""
        data = {
            "format": FORMAT,
            "format_version": VERSION,
            "complete": self.complete,
            "finished": self.finished,
            **self.about,
            "validation_loss": [asdict(row) for row in self.losses],
            "after_each_recurrence": [asdict(row) for row in self.depths],
            "exits": [asdict(row) for row in self.exits],
            "tasks": [asdict(row) for row in self.tasks],
            "axes": [asdict(axis) for axis in self.axes()],
        }
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def table(self) -> str:
        """All rows as text, then what was not measured, with the reasons."""
        losses = [
            [str(row.recurrences), number(row.loss), f"{row.tokens:,}"]
            for row in self.losses
            if row.loss is not None
        ]
        tasks = [
            [t.task, str(t.recurrences), number(t.loss), number(t.accuracy), t.metric or "-"]
            + [str(t.examples), str(t.shots), str(t.cut)]
            for t in self.tasks
            if t.refused is None
        ]
        axes = [
            [a.axis, str(a.recurrences), number(a.loss), number(a.accuracy), f"{a.tasks} of {a.of}"]
            for a in self.axes()
            if a.tasks
        ]
        depths = [
            [str(d.recurrences), number(d.loss), number(d.agreement), number(d.kl)] for d in self.depths
        ]
        exits = [[f"{e.threshold:g}", f"{e.mean_exit:.2f}", number(e.loss)] for e in self.exits]
        tables = (
            (["recurrences", "validation loss", "tokens"], losses, 0),
            (["read after", "loss", "same top token", "KL to the last"], depths, 0),
            (["exit threshold", "mean exit", "loss"], exits, 0),
            (["task", "r", "loss", "accuracy", "by", "examples", "shots", "cut"], tasks, 1),
            (["axis (macro-average)", "r", "loss", "accuracy", "tasks"], axes, 1),
        )
        parts = [aligned(header, rows, left) for header, rows, left in tables if rows]
        every: list[LossRow | TaskRow] = [*self.losses, *self.tasks]
        refused = [
            f"not measured: {getattr(row, 'task', 'validation loss')} at r = {row.recurrences}: {row.refused}"
            for row in every
            if row.refused
        ]
        return "\n\n".join(filter(None, [*parts, "\n".join(refused)]))


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None; None if there are none."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def number(value: float | None) -> str:
    """A number with four decimals, or a dash."""
    return "-" if value is None else f"{value:.4f}"
