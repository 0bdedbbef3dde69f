"""Sections of sentences and tables, and how they become text for a terminal, Markdown and HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fitting.estimation.results import FitSummary, recommended

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
    parts: list[str | Table]

    def text(self) -> str:
        """For a terminal."""
        return "\n".join([self.title, "-" * len(self.title), *self._shown(str, table)])

    def markdown(self) -> str:
        """For report.md."""
        return "\n\n".join([f"## {self.title}", *self._shown(str, markdown_table)])

    def html(self) -> str:
        """For report.html."""
        parts = self._shown(lambda text: f"<p>{html.escape(text)}</p>", html_table)
        return "\n".join([f"<h2>{html.escape(self.title)}</h2>", *parts])

    def _shown(self, text: Callable[[str], str], table: Callable[[Row, Sequence[Row]], str]) -> list[str]:
        return [text(part) if isinstance(part, str) else table(part.header, part.rows) for part in self.parts]


def interval_text(fit: FitSummary, name: str) -> str:
    """The recommended interval of a parameter as text; never a bare number."""
    best = recommended(fit.intervals.get(name, ()))
    return f"[{significant(best.low)}, {significant(best.high)}]" if best else "not estimated"


def significant(value: float | None, digits: int = 4) -> str:
    """A number with `digits` significant digits, without an exponent where it is readable without one."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - (math.floor(math.log10(abs(value))) if value else 0))
    return f"{value:.{decimals}f}"


def table(header: Row, rows: Sequence[Row]) -> str:
    """Columns aligned for a terminal: text left, numbers right."""
    cells = [list(map(str, header)), *[list(map(str, row)) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    numeric = [all(_is_number(row[i]) for row in cells[1:]) and len(cells) > 1 for i in range(len(header))]

    def line(row: list[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return ("  " + "  ".join(padded)).rstrip()

    head, *body = map(line, cells)
    return "\n".join([head, *body] if head.strip() else body)


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """Header and rows as a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def html_table(header: Row, rows: Sequence[Row]) -> str:
    """Header and rows as an HTML table that scrolls if it is too wide."""
    lines = [("th", header), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in lines)
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in cells)}</table></div>'


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True
