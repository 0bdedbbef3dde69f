"""Reads runs from a CSV file: its columns, and the defaults of those that it leaves out."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fitting.data.runs import COUNT_TOLERANCE
from fitting.records import FLOPS_CONVENTIONS, RecordError

BUDGET_TOLERANCE = 0.05
"""Largest relative difference of tokens·flops_per_token from the nominal budget of a run."""
_REQUIRED = ("r", "flops_budget", "flops_per_token", "tokens", "val_loss")
_OPTIONAL = (
    "size", "s", "d_model", "n_once", "n_rec", "n_injection", "injection", "bptt", "seed", "flops_convention",
    "n_once_active", "n_rec_active",
)  # fmt: skip
_CORRECT = "Correct it or leave the row out"


def read_csv(path: Path, with_loss: bool) -> list[dict[str, Any]]:
    """A row for each line, with the columns of `load_runs`. Raises `RecordError` naming line and column."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = [(name or "").strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            lines = [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(str(path), None, f"cannot be read as CSV ({error})", "Check the file") from None
    missing = [name for name in _REQUIRED if name not in header and (with_loss or name != "val_loss")]
    if not {"size", "s", "d_model"} & set(header):
        missing.append("d_model")
    if missing:
        needed = f"A table of runs needs the columns: {', '.join(_REQUIRED)}, d_model"
        raise RecordError(str(path), missing[0], "is missing", needed)
    doubled = [name for name in header if header.count(name) > 1]
    if doubled:
        raise RecordError(str(path), doubled[0], "names two columns", "Rename or remove one of them")
    return [_row_of_csv(f"{path}:{number}", line) for number, line in lines]


def _row_of_csv(source: str, cells: Mapping[Any, Any]) -> dict[str, Any]:
    """One row. A column may be missing from the header; an empty cell is an error, but for flops_budget."""
    if None in cells:
        reason = f"has {len(cells[None])} cells more than the header"
        raise RecordError(source, None, reason, "Quote cells that hold a comma")
    for name, cell in cells.items():
        if cell is None:
            raise RecordError(source, name, "is missing: the row is cut short", "Complete or remove the row")
    line: dict[str, str] = {name: cell.strip() for name, cell in cells.items()}

    def text(name: str, default: str | None = None) -> str:
        if name not in line and default is not None:
            return default
        if not line[name]:
            raise RecordError(source, name, "is empty", "Fill it in, or leave out the row or the column")
        return line[name]

    def number(name: str, default: float | None = None) -> float:
        if name not in line and default is not None:
            return default
        shown = text(name)
        try:
            value = float(shown)
        except ValueError:
            raise RecordError(source, name, f"is {shown!r}, not a number", _CORRECT) from None
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in ("seed", "n_injection")):
            raise RecordError(source, name, f"is {shown}, but must be finite and positive", _CORRECT)
        return value

    r = number("r")
    if r != int(r):
        raise RecordError(source, "r", f"is {r}, not a whole number of recurrences", "Correct it")
    d = number("d_model") if "d_model" in line else 64 * number("size" if "size" in line else "s")
    # r=1 runs the block once: it has no injection and nothing to truncate, whatever the cells say.
    injection = "none" if r == 1 else text("injection", "linear")
    bptt = "full" if r == 1 else text("bptt", "full")
    counts = _counts(source, line, number, r, d, injection)
    convention = text("flops_convention", "paper")
    if convention not in FLOPS_CONVENTIONS:
        choices = ", ".join(FLOPS_CONVENTIONS)
        raise RecordError(source, "flops_convention", f"is {convention!r}", f"Use one of: {choices}")
    budget = number("flops_budget") if line["flops_budget"] else math.nan
    flops_per_token, tokens = number("flops_per_token"), number("tokens")
    spent = flops_per_token * tokens
    if abs(spent / budget - 1) > BUDGET_TOLERANCE:
        reason = f"is {budget:g}, but tokens·flops_per_token is {spent:.4g}, {spent / budget:.3g} times that"
        way_out = "Correct one of the three, or leave flops_budget empty"
        raise RecordError(source, "flops_budget", reason, way_out)
    return counts | {
        "source": source,
        "r": r,
        "d_model": d,
        "flops_per_token": flops_per_token,
        "tokens": tokens,
        "val_loss": number("val_loss", math.nan),
        "flops_budget": budget,
        "injection": injection,
        "bptt": bptt,
        "seed": number("seed", 0),
        "flops_convention": convention,
        "extra": {k: v for k, v in line.items() if k and k not in _REQUIRED and k not in _OPTIONAL},
    }


def _counts(
    source: str, line: Mapping[str, str], number: Callable[..., float], r: float, d: float, injection: str
) -> dict[str, float]:
    """Parameter counts of a row: as given, else those of the 20-layer layouts, with r=1 split as 2-16-2.

    Layer numbers are those of the layout if the counts agree with it, else unknown (NaN).
    """
    layers = math.nan if 16 % r else 16 / r
    if math.isnan(layers) and not ("n_once" in line and "n_rec" in line):
        reason = f"is {r:g}, which does not divide 16, so the layout is unknown"
        raise RecordError(source, "r", reason, "Give n_once and n_rec")
    known = {"none": 0.0, "linear": 2 * d * d, "additive": 0.0, "passthrough": 0.0, "hyperconnections": r * 8}
    if "n_injection" not in line and injection not in known:
        reason = f"is {injection!r}, whose parameters are unknown here"
        way_out = f"Give the column n_injection, or use one of: {', '.join(known)}"
        raise RecordError(source, "injection", reason, way_out)
    n_injection = number("n_injection", known.get(injection, math.inf) if r > 1 else 0.0)
    layer = 12 * d * d + 2 * d
    n_once = number("n_once", 4 * layer + 3 * d)
    n_rec = number("n_rec", layers * layer + n_injection)
    active = {"n_once_active": n_once, "n_rec_active": n_rec}
    of_layout = (4 + layers) * layer + 3 * d + n_injection
    known_layout = abs((n_once + n_rec) / of_layout - 1) < COUNT_TOLERANCE
    outer, inner = (2, layers) if known_layout else (math.nan, math.nan)
    return {
        "prelude_layers": outer,
        "recurrent_layers": inner,
        "coda_layers": outer,
        "n_once": n_once,
        "n_rec": n_rec,
        "n_injection": n_injection,
        **{name: _part(source, name, number(name, all_), all_) for name, all_ in active.items()},
    }


def _part(source: str, name: str, value: float, whole: float) -> float:
    if value > whole:
        raise RecordError(source, name, f"is {value:g}, more than the {whole:g} there are in all", _CORRECT)
    return value
