"""Sections of sentences and tables, and how they become text for a terminal, Markdown and HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fitting.estimation.results import Interval, recommended

Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header."""

    header: Row
    rows: Sequence[Row]


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

    def html(self) -> str:
        """For report.html."""
        parts = [
            f"<p>{html.escape(part)}</p>" if isinstance(part, str) else html_table(part.header, part.rows)
            for part in self.parts
        ]
        return "\n".join([f"<h2>{html.escape(self.title)}</h2>", *parts])


def interval_text(intervals: Sequence[Interval]) -> str:
    """The recommended one of a parameter's intervals as text; never a bare number."""
    best = recommended(intervals)
    return f"[{significant(best.low)}, {significant(best.high)}]" if best else "not estimated"


def significant(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, without an exponent where it is readable without one."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - (math.floor(math.log10(abs(value))) if value else 0))
    return f"{value:.{decimals}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned for a terminal: text left, numbers right."""
    cells = [list(map(str, header)), *[list(map(str, row)) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    numeric = [all(_is_number(row[i]) for row in cells[1:]) and len(cells) > 1 for i in range(len(header))]

    def line(row: list[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return ("  " + "  ".join(padded)).rstrip()

    head = line(cells[0])
    body = [line(row) for row in cells[1:]]
    return "\n".join([*([head] if head.strip() else []), *body])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as an HTML table that scrolls where it is too wide."""
    lines = [("th", header), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in lines)
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in cells)}</table></div>'


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True
