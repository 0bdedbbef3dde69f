"""Results of an evaluation: rows, macro-averages over the axes, the JSON file and the printed table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from looped_lm.common.text import aligned
from looped_lm.evaluation.suite import AXES

FORMAT, VERSION = "looped_lm evaluation", 1


def parsed(text: str) -> dict[str, Any] | None:
    """Content of a results file, from its text; None if the text is something else."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and data.get("format") == FORMAT else None


@dataclass(frozen=True)
class LossRow:
    """Validation loss (nats per token) at one number of recurrences, or why there is none, as where it is not finite.

    Args:
        recurrences: recurrences of every pass.
        loss: mean over `tokens`.
        refused: why it was not measured.
        expected: whether a component refused a number of recurrences that nobody had asked for.
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
    """One probe or task at one number of recurrences, or why there is no result, as where the loss is not finite.

    Args:
        task, axis: its name, and the axis to which it belongs; None: it is not of the suite.
        recurrences: recurrences of every pass.
        loss: of the gold continuations, in nats per token, over the `tokens` of all `examples`.
        accuracy: share of right answers: of gold continuations that greedy decoding gives, or a task's `metric`.
        shots: solved examples that a prompt should show.
        cut: number of examples whose prompt was too long and lost something on its left.
        metrics: everything that lm-eval reports.
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
    """Replace a loss that neither JSON nor a mean can hold by the reason why there is none."""
    if row.loss is None or math.isfinite(row.loss):
        return False
    object.__setattr__(row, "refused", f"the loss is {row.loss}")
    object.__setattr__(row, "loss", None)
    return True


@dataclass(frozen=True)
class Axis:
    """Macro-average over the tasks of an axis that were measured at one number of recurrences: `tasks` out of `of`."""

    axis: str
    recurrences: int
    loss: float | None
    accuracy: float | None
    tasks: int
    of: int


@dataclass
class Results:
    """All results of one evaluation.

    Args:
        about: what was evaluated, and how, in plain JSON types.
        losses, tasks: the rows so far.
        finished: whether everything that was asked for has been tried.
    """

    about: dict[str, Any]
    losses: list[LossRow] = field(default_factory=list)
    tasks: list[TaskRow] = field(default_factory=list)
    finished: bool = False

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for was measured."""
        missing = any(row.refused and not row.expected for row in self.losses)
        return self.finished and not missing and not any(row.refused for row in self.tasks)

    def axes(self) -> list[Axis]:
        """Macro-averages: all tasks of an axis have the same weight, however many examples they have."""
        found = []
        for axis, names in AXES.items():
            for r in dict.fromkeys(row.recurrences for row in self.tasks if row.axis == axis):
                rows = [t for t in self.tasks if (t.axis, t.recurrences) == (axis, r) and t.refused is None]
                loss, accuracy = _mean([t.loss for t in rows]), _mean([t.accuracy for t in rows])
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
        """All rows as text, then what was not measured, with the reasons."""
        losses = [
            [str(row.recurrences), _number(row.loss), f"{row.tokens:,}"]
            for row in self.losses
            if row.loss is not None
        ]
        tasks = [
            [t.task, str(t.recurrences), _number(t.loss), _number(t.accuracy), t.metric or "-"]
            + [str(t.examples), str(t.shots), str(t.cut)]
            for t in self.tasks
            if t.refused is None
        ]
        axes = [
            [a.axis, str(a.recurrences), _number(a.loss), _number(a.accuracy), f"{a.tasks} of {a.of}"]
            for a in self.axes()
            if a.tasks
        ]
        tables = (
            (["recurrences", "validation loss", "tokens"], losses, 0),
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


def _mean(values: Sequence[float | None]) -> float | None:
    there = [v for v in values if v is not None]
    return sum(there) / len(there) if there else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
