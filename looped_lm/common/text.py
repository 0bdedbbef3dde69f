"""How messages and tables are worded for a terminal."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning import Trainer


def say(trainer: Trainer, message: str) -> None:
    """Print on rank zero. A LightningModule's `print` goes through the progress bar, which may not show yet."""
    if trainer.is_global_zero:
        print(message)


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message, " Did you mean 'x'?", with the closest of the names; "" if none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def duration(seconds: float) -> str:
    """A time in the unit that suits its length: days, hours, minutes or seconds."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table whose first `left` columns are aligned to the left, the others to the right."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
