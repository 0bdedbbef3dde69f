"""Sections of sentences and tables: what a report says, before it becomes text, Markdown or HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fitting.report.tables import markdown_table, significant, table

Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table with its caption."""

    header: Row
    rows: list[Row]


@dataclass(frozen=True)
class Section:
    """A title, then paragraphs and tables in order."""

    title: str
    parts: list[str | Table] = field(default_factory=list)

    def text(self) -> str:
        """For a terminal."""
        parts = [part if isinstance(part, str) else table(part.header, part.rows) for part in self.parts]
        return "\n".join([self.title, "-" * len(self.title), *parts])

    def markdown(self) -> str:
        """For report.md."""
        parts = [
            part if isinstance(part, str) else markdown_table(part.header, part.rows) for part in self.parts
        ]
        return "\n\n".join([f"## {self.title}", *parts])


def recommended(intervals: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The interval that is to be quoted; None if none was estimated."""
    return next((interval for interval in intervals if interval["recommended"]), None)


def interval_text(intervals: Sequence[dict[str, Any]]) -> str:
    """The recommended interval as text; never a bare number."""
    best = recommended(intervals)
    return f"[{significant(best['low'])}, {significant(best['high'])}]" if best else "not estimated"
