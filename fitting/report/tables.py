"""Plain-text and Markdown tables, and numbers as a reader wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence


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


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True
