"""Reads runs from a CSV file: its columns, and the defaults of those that it leaves out."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fitting.data.comparable import SAME
from fitting.data.reading import Reading
from fitting.data.runs import COUNT_TOLERANCE
from fitting.records import FLOPS_CONVENTIONS, RecordError

BUDGET_TOLERANCE = 0.05
"""Largest relative difference of tokens·flops_per_token from the nominal budget of a run."""
_REQUIRED = ("r", "flops_budget", "flops_per_token", "tokens", "val_loss")
_OPTIONAL = (
    "size", "s", "d_model", "n_once", "n_rec", "n_injection", "injection", "bptt", "seed", "flops_convention",
    "n_once_active", "n_rec_active", "n_embedding", "parameters",
)  # fmt: skip
_ORDINARY = "parameters"
"""The column of N by which a table of ordinary transformers is known: `tokens` and a loss are enough beside it."""
_OTHER_NAMES = {"loss": "val_loss"}
_SEPARATORS = ",;\t|"
_CORRECT = "Correct it or leave the row out"
FLOPS_PER_PARAMETER = 6
"""Training FLOPs per token and parameter of an ordinary transformer whose table does not give them."""


def read_csv(path: Path, with_loss: bool, reading: Reading) -> list[dict[str, Any]]:
    """A row for each line, with the columns of `load_runs`. Raises `RecordError` naming line and column."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            if not first.strip():
                raise RecordError(
                    str(path), None, "is empty", "A table of runs has a header and a line for each run"
                )
            separator = max(_SEPARATORS, key=first.count)
            file.seek(0)
            reader = csv.DictReader(file, delimiter=separator)
            theirs = [(name or "").strip() for name in reader.fieldnames or []]
            header = [reading.renamed.get(name, name) for name in theirs]
            header = [
                _OTHER_NAMES.get(name, name) if _OTHER_NAMES.get(name) not in header else name
                for name in header
            ]
            reader.fieldnames = header
            lines = [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(str(path), None, f"cannot be read as CSV ({error})", "Check the file") from None
    absent = [name for name in reading.renamed if name not in theirs]
    if absent:
        there = f"The columns are: {', '.join(theirs)}"
        raise RecordError(str(path), absent[0], "is named by --columns and is not there", there)
    required = ("tokens", "val_loss") if _ORDINARY in header else _REQUIRED
    missing = [name for name in required if name not in header and (with_loss or name != "val_loss")]
    if required is _REQUIRED and not {"size", "s", "d_model"} & set(header):
        missing.append("d_model")
    if missing:
        needed = f"A table of runs needs the columns: {', '.join(_REQUIRED)}, d_model"
        alike = [name for name in theirs if name.lower() == missing[0]]
        if alike:
            needed = f"Is it {alike[0]}? Names of columns are in lower case"
        elif required is not _REQUIRED:
            needed = f"A table of ordinary transformers needs the columns: {_ORDINARY}, tokens, val_loss"
        raise RecordError(str(path), missing[0], "is missing", f"{needed}. --columns OURS=THEIRS renames")
    known = {*_REQUIRED, *_OPTIONAL, *SAME}
    for name in header:
        if name not in known and name.lower() in known and name.lower() not in header:
            way_out = "Names of columns are in lower case. Rename it, or --columns OURS=THEIRS does"
            raise RecordError(str(path), name, f"is no column; is it {name.lower()}?", way_out)
    doubled = [name for name in header if header.count(name) > 1]
    if doubled:
        raise RecordError(str(path), doubled[0], "names two columns", "Rename or remove one of them")
    return [_row_of_csv(f"{path}:{number}", line, reading.nats) for number, line in lines]


def _row_of_csv(source: str, cells: Mapping[Any, Any], nats: float) -> dict[str, Any]:
    """One row, whose loss is in units of so many `nats`.

    A column may be missing from the header; an empty cell is an error, but for flops_budget.
    """
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

    ordinary = number(_ORDINARY) if _ORDINARY in line else None
    r = number("r", None if ordinary is None else 1.0)
    if r != int(r):
        raise RecordError(source, "r", f"is {r}, not a whole number of recurrences", "Correct it")
    if "d_model" in line or ordinary is None or {"size", "s"} & line.keys():
        d = number("d_model") if "d_model" in line else 64 * number("size" if "size" in line else "s")
    else:
        d = math.nan
    # r=1 runs the block once: it has no injection and nothing to truncate, whatever the cells say.
    injection = "none" if r == 1 else text("injection", "linear")
    bptt = "full" if r == 1 else text("bptt", "full")
    if ordinary is None:
        counts = _counts(source, line, number, r, d, injection)
    else:
        counts = _counts_of_ordinary(source, r, ordinary)
    convention = text("flops_convention", "paper")
    if convention not in FLOPS_CONVENTIONS:
        choices = ", ".join(FLOPS_CONVENTIONS)
        raise RecordError(source, "flops_convention", f"is {convention!r}", f"Use one of: {choices}")
    budget = number("flops_budget") if line.get("flops_budget") else math.nan
    tokens = number("tokens")
    flops_per_token = number("flops_per_token", ordinary and FLOPS_PER_PARAMETER * ordinary)
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
        "n_embedding": number("n_embedding", math.nan),
        "val_loss": nats * number("val_loss", math.nan),
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
    # Counts of a layout of one's own do not say how much of them is the injection.
    told = r == 1 or "n_rec" not in line or bool({"injection", "n_injection"} & line.keys())
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
        "n_injection": n_injection if told else math.nan,
        **{name: _part(source, name, number(name, all_), all_) for name, all_ in active.items()},
    }


def _counts_of_ordinary(source: str, r: float, n: float) -> dict[str, float]:
    """Counts of a row of `n` parameters without a loop."""
    if r != 1:
        raise RecordError(
            source, "r", f"is {r:g} beside {_ORDINARY}", "Give n_once and n_rec of looped models"
        )
    unknown = ("prelude_layers", "recurrent_layers", "coda_layers")
    counts = {"n_once": n, "n_rec": 0.0, "n_injection": 0.0, "n_once_active": n, "n_rec_active": 0.0}
    return {**dict.fromkeys(unknown, math.nan), **counts}


def _part(source: str, name: str, value: float, whole: float) -> float:
    if value > whole:
        raise RecordError(source, name, f"is {value:g}, more than the {whole:g} there are in all", _CORRECT)
    return value
