"""What an evaluation found: rows, macro-averages over the axes, the JSON file and the printed table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from looped_lm.common.text import aligned
from looped_lm.evaluation.axes import AXES

FORMAT, VERSION = "looped_lm evaluation", 1


def parsed(text: str) -> dict[str, Any] | None:
    """The content of a file of results from its text; None where it holds something else."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


@dataclass(frozen=True)
class LossRow:
    """Validation loss at one number of recurrences, or why there is none. A loss that is not finite counts as none.

    Args:
        recurrences: recurrences of every pass.
        loss: nats per token.
        tokens: tokens that it is the mean of.
        refused: why it was not measured.
        expected: whether the components' rule alone refused a number that nobody asked for.
    """

    recurrences: int
    loss: float | None = None
    tokens: int | None = None
    refused: str | None = None
    expected: bool = False

    def __post_init__(self) -> None:
        _refuse_infinite(self)


@dataclass(frozen=True)
class TaskRow:
    """One probe or task at one number of recurrences, or why there is no result: a loss that is not finite is none.

    Args:
        task: its name.
        axis: the axis it counts for; None: none of the suite's.
        recurrences: recurrences of every pass.
        loss: of the gold continuations in nats per token, over the tokens of all examples.
        accuracy: share of right answers: gold continuations that greedy decoding gives, or a task's `metric`.
        metric: name of the metric.
        examples: examples of the task.
        tokens: tokens of all gold continuations.
        shots: solved examples that a prompt should show.
        cut: examples whose prompt did not fit and lost something on its left.
        metrics: all that lm-eval reports.
        refused: why it was not measured.
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

    def __post_init__(self) -> None:
        if _refuse_infinite(self):
            object.__setattr__(self, "accuracy", None)


def _refuse_infinite(row: LossRow | TaskRow) -> bool:
    """Turn a result that neither JSON nor a mean can hold into the reason for having none."""
    if row.loss is None or math.isfinite(row.loss):
        return False
    object.__setattr__(row, "refused", f"the loss is {row.loss}")
    object.__setattr__(row, "loss", None)
    return True


@dataclass(frozen=True)
class Axis:
    """Macro-average over those tasks of an axis that were measured at one number of recurrences."""

    axis: str
    recurrences: int
    loss: float | None
    accuracy: float | None
    tasks: int
    of: int


@dataclass
class Results:
    """All of one evaluation.

    Args:
        about: what was evaluated, and how: plain JSON types.
        losses: validation loss over recurrences.
        tasks: probes and tasks.
        finished: whether all that was asked for has been tried.
    """

    about: dict[str, Any]
    losses: list[LossRow] = field(default_factory=list)
    tasks: list[TaskRow] = field(default_factory=list)
    finished: bool = False

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was measured."""
        missing = [row for row in self.losses if row.refused and not row.expected]
        return self.finished and not missing and not any(row.refused for row in self.tasks)

    def axes(self) -> list[Axis]:
        """Macro-averages: every task of an axis counts the same, however many examples it has."""
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
            "tasks": [asdict(row) for row in self.tasks],
            "axes": [asdict(axis) for axis in self.axes()],
        }
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    def table(self) -> str:
        """All rows as text; what was refused stands below with the reason."""
        parts = []
        if any(row.loss is not None for row in self.losses):
            rows = [
                [str(row.recurrences), f"{row.loss:.4f}", f"{row.tokens:,}"]
                for row in self.losses
                if row.loss is not None
            ]
            parts.append(aligned(["recurrences", "validation loss", "tokens"], rows, left=0))
        rows = [self._task(row) for row in self.tasks if row.refused is None]
        if rows:
            header = ["task", "r", "loss", "accuracy", "by", "examples", "shots", "cut"]
            parts.append(aligned(header, rows, left=1))
        rows = [
            [a.axis, str(a.recurrences), number(a.loss), number(a.accuracy), f"{a.tasks} of {a.of}"]
            for a in self.axes()
            if a.tasks
        ]
        if rows:
            parts.append(aligned(["axis (macro-average)", "r", "loss", "accuracy", "tasks"], rows, left=1))
        every = [("validation loss", row.recurrences, row.refused) for row in self.losses]
        every += [(row.task, row.recurrences, row.refused) for row in self.tasks]
        refused = [f"not measured: {name} at r = {r}: {reason}" for name, r, reason in every if reason]
        return "\n\n".join([*parts, *(["\n".join(refused)] if refused else [])])

    @staticmethod
    def _task(row: TaskRow) -> list[str]:
        counts = [str(row.examples), str(row.shots), str(row.cut)]
        return [
            row.task,
            str(row.recurrences),
            number(row.loss),
            number(row.accuracy),
            row.metric or "-",
            *counts,
        ]


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there; None if none is."""
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def number(value: float | None) -> str:
    """Four digits, or a dash."""
    return "-" if value is None else f"{value:.4f}"
