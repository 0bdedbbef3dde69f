"""Run records and CSV files in, one checked table out.

Records are `*.run.json` files (or any JSON file named outright). Several records of one run (same folder,
run name, seed and settings, at successive steps, as a training run leaves one beside each checkpoint) count
once: the completed one with the most steps. Every record left out is listed with its rule.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fitting.records import FLOPS_CONVENTIONS, RECORD_SUFFIX, RecordError, RunRecord
from fitting.runs import Exclusion, Runs

_COLUMNS = (
    "source", "r", "d_model", "prelude_layers", "recurrent_layers", "coda_layers", "n_once", "n_rec",
    "n_injection", "flops_per_token", "tokens", "val_loss", "flops_budget", "injection", "bptt", "seed",
)  # fmt: skip
_TEXT = {"source", "injection", "bptt"}
_REQUIRED = ("r", "flops_budget", "flops_per_token", "tokens", "val_loss")
_OPTIONAL = (
    "size",
    "s",
    "d_model",
    "n_once",
    "n_rec",
    "n_injection",
    "injection",
    "bptt",
    "seed",
    "flops_convention",
)


def load_runs(*paths: str | os.PathLike[str], with_loss: bool = True) -> Runs:
    """Read run records (files, or folders searched to any depth) and CSV files into one table.

    A CSV needs the columns r, size (or s, d = 64·size) or d_model, flops_budget (may be empty),
    flops_per_token, tokens, val_loss; n_once, n_rec, n_injection, injection, bptt, seed, flops_convention
    are optional (defaults: the 20-layer layouts of spec section 1 with linear injection and full gradients,
    convention paper).

    `with_loss=False` also takes designs that were not trained yet: CSV files without val_loss (NaN then).

    Raises `RecordError` naming file and field for anything missing, impossible, doubled or of mixed
    conventions.
    """
    rows: list[dict[str, Any]] = []
    excluded: list[Exclusion] = []
    records: list[tuple[Path, RunRecord]] = []
    for path in _expand(paths):
        if path.suffix.lower() == ".csv":
            rows += _read_csv(path, with_loss)
        else:
            records.append((path, RunRecord.load(path)))
    for path, record in _latest(records, excluded):
        rows.append(_row_of_record(path, record))
    return table(rows, excluded)


def table(rows: list[dict[str, Any]], excluded: Iterable[Exclusion] = ()) -> Runs:
    """Rows (one dict per run, as the readers here make them) into a checked table. Raises `RecordError`."""
    if not rows:
        left_out = "; ".join(f"{gone.source}: {gone.rule}" for gone in excluded)
        raise RecordError(
            "runs", None, "no finished run was found", left_out or "Name files or folders that hold some"
        )
    conventions = {row["flops_convention"]: row["source"] for row in reversed(rows)}
    if len(conventions) > 1:
        named = ", ".join(f"{name} in {source}" for name, source in sorted(conventions.items()))
        raise RecordError(
            next(iter(conventions.values())),
            "flops_convention",
            f"differs between runs ({named})",
            "Fit runs of one convention only",
        )
    _refuse_duplicates(rows)
    names = dict.fromkeys(name for row in rows for name in row["extra"])
    return Runs(
        **{
            name: np.array([row[name] for row in rows], dtype=object if name in _TEXT else float)
            for name in _COLUMNS
        },
        flops_convention=next(iter(conventions)),
        excluded=tuple(excluded),
        extra={name: np.array([row["extra"].get(name, "") for row in rows], dtype=object) for name in names},
    )


def _expand(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob(f"*{RECORD_SUFFIX}") if not p.name.startswith("."))
            if not inside:
                raise RecordError(
                    str(path),
                    None,
                    f"holds no run record (*{RECORD_SUFFIX})",
                    "Train first, or name a CSV file",
                )
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise RecordError(str(path), None, "does not exist", "Check the path")
    seen: dict[Path, Path] = {}
    for path in found:
        seen.setdefault(path.resolve(), path)
    return list(seen.values())


# ---------------------------------------------------------------------------------------------- records


def _latest(records: list[tuple[Path, RunRecord]], excluded: list[Exclusion]) -> list[tuple[Path, RunRecord]]:
    runs: dict[tuple, list[tuple[Path, RunRecord]]] = {}
    for path, record in records:
        key = (path.parent.resolve(), record.run_name, record.seed, record.d_model, record.num_recurrences)
        runs.setdefault((*key, record.steps_planned, record.batch_tokens), []).append((path, record))
    kept = []
    for members in runs.values():
        finished = [(path, record) for path, record in members if record.finished]
        for path, record in members:
            if not record.finished:
                excluded.append(
                    Exclusion(
                        str(path), f"status={record.status} ({record.stop_reason or 'no reason given'})"
                    )
                )
        if finished:
            last = max(record.steps for _, record in finished)
            for path, record in finished:
                if record.steps == last:
                    kept.append((path, record))
                else:
                    excluded.append(
                        Exclusion(str(path), f"step {record.steps} of a run that has a record at step {last}")
                    )
    return kept


def _label(components: Mapping[str, Mapping[str, Any]], seam: str) -> str:
    if seam not in components:
        return "unnamed"
    arguments = {k: v for k, v in components[seam]["init_args"].items() if v is not None}
    name = str(components[seam]["class_path"]).rpartition(".")[2]
    return f"{name}({', '.join(f'{k}={v}' for k, v in sorted(arguments.items()))})" if arguments else name


def _row_of_record(path: Path, record: RunRecord) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in _COLUMNS if hasattr(record, name)}
    lanes = _label(record.components, "lanes") if "lanes" in record.components else ""
    return row | {
        "source": str(path),
        "r": record.num_recurrences,
        "n_injection": record.parameters.get("injection", 0) + record.parameters.get("lanes", 0),
        "flops_budget": math.nan if record.flops_budget is None else record.flops_budget,
        "injection": "+".join(filter(None, [_label(record.components, "injection"), lanes])),
        "bptt": _label(record.components, "bptt"),
        "flops_convention": record.flops_convention,
        "extra": {"run_name": record.run_name, "vocab_size": record.vocab_size, "seq_len": record.seq_len},
    }


# ---------------------------------------------------------------------------------------------- CSV


def _read_csv(path: Path, with_loss: bool) -> list[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
            header = list(reader.fieldnames or [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(str(path), None, f"cannot be read as CSV ({error})", "Check the file") from None
    missing = [name for name in _REQUIRED if name not in header and (with_loss or name != "val_loss")]
    if not {"size", "s", "d_model"} & set(header):
        missing.append("d_model")
    if missing:
        raise RecordError(
            str(path),
            missing[0],
            "is missing",
            f"A table of runs needs the columns: {', '.join(_REQUIRED)}, d_model",
        )
    if "val_loss" not in header:
        lines = [line | {"val_loss": None} for line in lines]
    return [_row_of_csv(f"{path}:{number}", line) for number, line in enumerate(lines, start=2)]


def _row_of_csv(source: str, line: Mapping[str, str | None]) -> dict[str, Any]:
    def number(name: str, default: float | None = None) -> float:
        text = (line.get(name) or "").strip()
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            raise RecordError(
                source, name, f"is {text!r}, not a number", "Correct it or leave the row out"
            ) from None
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in ("seed", "n_injection")):
            raise RecordError(
                source, name, f"is {text}, but must be finite and positive", "Correct it or leave the row out"
            )
        return value

    r = number("r")
    if r != int(r):
        raise RecordError(source, "r", f"is {r}, not a whole number of recurrences", "Correct it")
    d = number("d_model", 64 * number("size", number("s", math.inf)) if "d_model" not in line else None)
    injection = (line.get("injection") or "").strip() or ("linear" if r > 1 else "none")
    counts = _counts(source, line, number, r, d, injection)
    convention = (line.get("flops_convention") or "").strip() or "paper"
    if convention not in FLOPS_CONVENTIONS:
        raise RecordError(
            source, "flops_convention", f"is {convention!r}", f"Use one of: {', '.join(FLOPS_CONVENTIONS)}"
        )
    budget = (line.get("flops_budget") or "").strip()
    return counts | {
        "source": source,
        "r": r,
        "d_model": d,
        "flops_per_token": number("flops_per_token"),
        "tokens": number("tokens"),
        "val_loss": math.nan if line["val_loss"] is None else number("val_loss"),
        "flops_budget": number("flops_budget") if budget else math.nan,
        "injection": injection if r > 1 else "none",
        "bptt": ((line.get("bptt") or "").strip() or "full") if r > 1 else "full",
        "seed": number("seed", 0),
        "flops_convention": convention,
        "extra": {k: v for k, v in line.items() if k and k not in _REQUIRED and k not in _OPTIONAL},
    }


def _counts(
    source: str,
    line: Mapping[str, str | None],
    number: Callable[..., float],
    r: float,
    d: float,
    injection: str,
) -> dict[str, float]:
    """Parameter counts of a row: as given, else of the 20-layer layouts, r=1 split as 2-16-2 (spec section
    3).
    """
    if 16 % r:
        layers = math.nan
        if not (line.get("n_once") and line.get("n_rec")):
            raise RecordError(
                source,
                "r",
                f"is {r:g}, which does not divide 16, so the layout is unknown",
                "Give n_once and n_rec",
            )
    else:
        layers = 16 / r
    known = {"none": 0.0, "linear": 2 * d * d, "additive": 0.0, "passthrough": 0.0, "hyperconnections": r * 8}
    if not (line.get("n_injection") or "").strip() and injection not in known:
        raise RecordError(
            source, "injection", f"is {injection!r}, whose parameters are unknown here",
            f"Give the column n_injection, or use one of: {', '.join(known)}",
        )  # fmt: skip
    n_injection = number("n_injection", known.get(injection, math.inf) if r > 1 else 0.0)
    layer = 12 * d * d + 2 * d
    return {
        "prelude_layers": 2,
        "recurrent_layers": layers,
        "coda_layers": 2,
        "n_once": number("n_once", 4 * layer + 3 * d),
        "n_rec": number("n_rec", layers * layer + n_injection),
        "n_injection": n_injection,
    }


def _refuse_duplicates(rows: list[dict[str, Any]]) -> None:
    seen: dict[tuple, str] = {}
    for row in rows:
        key = tuple(
            row[name] for name in ("r", "d_model", "n_once", "n_rec", "tokens", "injection", "bptt", "seed")
        )
        if key in seen:
            raise RecordError(
                row["source"],
                None,
                f"is the same run as {seen[key]} (r={row['r']:g}, d_model={row['d_model']:g}, "
                f"tokens={row['tokens']:g}, seed={row['seed']:g})",
                "Give one of them only, or their own seeds if they are repeats",
            )
        seen[key] = row["source"]
