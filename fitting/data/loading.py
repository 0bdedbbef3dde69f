"""Reads run records and CSV files into one checked table.

Of the records of one run (same folder, run name, seed and settings) only the last completed one counts, and only
one of identical copies. Every record left out is listed with its rule.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fitting.data.comparable import differences, refuse_other_units
from fitting.data.csv import read_csv
from fitting.data.reading import Reading
from fitting.data.runs import COLUMNS, Exclusion, Runs
from fitting.records import RECORD_SUFFIX, RecordError, RunRecord, architecture

_TEXT = {"source", "injection", "bptt"}
_Records = list[tuple[Path, RunRecord]]


def load_runs(*paths: str | os.PathLike[str], with_loss: bool = True, reading: Reading | None = None) -> Runs:
    """Read run records (JSON files, or folders searched to any depth for *.run.json) and CSV files into one table.

    A CSV file needs the columns r, d_model (or size, or s: d_model = 64·size), flops_budget (may be empty),
    flops_per_token, tokens and val_loss (with `with_loss=False` it may be missing, which gives NaN). n_once, n_rec,
    n_injection, injection, bptt, seed and flops_convention are optional (default: the paper's 20-layer layouts with
    linear injection, full gradients and its convention), and so are n_once_active and n_rec_active (default: all). A
    column that is there must be filled in every row. With a column `parameters` (N of an ordinary transformer), tokens
    and val_loss (or loss) are enough; r is 1 then, and flops_per_token 6N unless given.

    `reading` names units and foreign columns. Raises `RecordError` for anything missing, impossible or given twice, for
    mixed conventions, numbers that must be in other units, and runs whose losses do not compare.
    """
    reading = reading or Reading()
    rows: list[dict[str, Any]] = []
    excluded: list[Exclusion] = []
    records: _Records = []
    for path in _expand(paths):
        if path.suffix.lower() == ".csv":
            found = read_csv(path, with_loss, reading)
            if found:
                refuse_other_units(found, stated=reading.loss_unit is not None)
            rows += found
        else:
            records.append((path, RunRecord.load(path)))
    seen: dict[str, Path] = {}
    for path, record in _latest(records, excluded):
        # A sweep collects copies of the records that are beside the checkpoints.
        first = seen.setdefault(record.to_json(), path)
        if first == path:
            rows.append(_row_of_record(path, record))
        else:
            excluded.append(Exclusion(str(path), f"the same record as {first}"))
    return table(rows, excluded, reading.allow_mixed)


def table(rows: list[dict[str, Any]], excluded: Iterable[Exclusion] = (), allow_mixed: bool = False) -> Runs:
    """A checked table of the rows that the readers make. Raises `RecordError`."""
    if not rows:
        left_out = "; ".join(f"{gone.source}: {gone.rule}" for gone in excluded)
        way_out = left_out or "Name files or folders that hold some"
        raise RecordError("runs", None, "no finished run was found", way_out)
    conventions = {row["flops_convention"]: row["source"] for row in reversed(rows)}
    if len(conventions) > 1:
        named = ", ".join(f"{name} in {source}" for name, source in sorted(conventions.items()))
        reason, first = f"differs between runs ({named})", next(iter(conventions.values()))
        raise RecordError(first, "flops_convention", reason, "Fit runs of one convention only")
    _refuse_duplicates(rows)
    names = dict.fromkeys(name for row in rows for name in row["extra"])
    extra = {name: np.array([row["extra"].get(name, "") for row in rows], dtype=object) for name in names}
    columns: dict[str, Any] = {
        name: np.array([row[name] for row in rows], dtype=object if name in _TEXT else float)
        for name in COLUMNS
    }
    convention = next(iter(conventions))
    differing = differences(extra, columns["source"])
    if differing and not allow_mixed:
        name, what, first = differing[0]
        way_out = f"Give runs of one {name} only, or --allow-mixed, which marks the result"
        raise RecordError(first, name, what, way_out)
    runs = Runs(**columns, flops_convention=convention, excluded=tuple(excluded), extra=extra)
    return dataclasses.replace(
        runs, may_differ=allow_mixed, mixed=tuple(f"{name} {what}" for name, what, _ in differing)
    )


def _expand(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob(f"*{RECORD_SUFFIX}") if not p.name.startswith("."))
            if not inside:
                reason = f"holds no run record (*{RECORD_SUFFIX})"
                raise RecordError(str(path), None, reason, "Train first, or name a CSV file")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise RecordError(str(path), None, "does not exist", "Check the path")
    seen: dict[Path, Path] = {}
    for path in found:
        seen.setdefault(path.resolve(), path)
    return list(seen.values())


def _latest(records: _Records, excluded: list[Exclusion]) -> _Records:
    runs: dict[tuple, _Records] = {}
    for path, record in records:
        key = (path.parent.resolve(), record.run_name, record.seed, record.d_model, record.num_recurrences)
        runs.setdefault((*key, record.steps_planned, record.batch_tokens), []).append((path, record))
    kept = []
    for members in runs.values():
        last = max((record.steps for _, record in members if record.finished), default=0)
        for path, record in members:
            if record.finished and record.steps == last:
                kept.append((path, record))
                continue
            rule = f"step {record.steps} of a run that has a record at step {last}"
            if not record.finished:
                rule = f"status={record.status} ({record.stop_reason or 'no reason given'})"
            excluded.append(Exclusion(str(path), rule))
    return kept


def _row_of_record(path: Path, record: RunRecord) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in COLUMNS if hasattr(record, name)}
    injection, bptt = architecture(record.components, record.num_recurrences)
    return row | {
        "source": str(path),
        "r": record.num_recurrences,
        "n_once_active": record.n_once if record.n_once_active is None else record.n_once_active,
        "n_rec_active": record.n_rec if record.n_rec_active is None else record.n_rec_active,
        "n_embedding": record.parameters.get("embedding", 0) + record.parameters.get("head", 0),
        "n_injection": record.parameters.get("injection", 0) + record.parameters.get("lanes", 0),
        "flops_budget": math.nan if record.flops_budget is None else record.flops_budget,
        "injection": injection,
        "bptt": bptt,
        "flops_convention": record.flops_convention,
        "extra": {
            "run_name": record.run_name,
            "vocab_size": record.vocab_size,
            "seq_len": record.seq_len,
            "tokenizer": record.tokenizer or "",
            "data": (record.data_manifest_hash or "")[:12],
            "val_set": "" if record.val_tokens is None else f"{record.val_tokens} tokens",
        },
    }


def _refuse_duplicates(rows: list[dict[str, Any]]) -> None:
    seen: dict[tuple, str] = {}
    names = ("r", "d_model", "n_once", "n_rec", "tokens", "injection", "bptt", "seed")
    for row in rows:
        key = tuple(row[name] for name in names)
        if key in seen:
            settings = ", ".join(f"{name}={row[name]:g}" for name in ("r", "d_model", "tokens", "seed"))
            reason = f"is the same run as {seen[key]} ({settings})"
            way_out = "Give only one of them, or different seeds if they are repeats"
            raise RecordError(row["source"], None, reason, way_out)
        seen[key] = row["source"]
