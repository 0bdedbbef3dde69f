"""What a report was made of: its files with their hashes, and what training the runs took."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitting.records import RunRecord


@dataclass(frozen=True)
class Training:
    """What training took: sums over all records, except for the least `unique_tokens` and the most epochs."""

    records: int
    tokens: int
    training_flops: float
    wall_seconds: float
    unique_tokens: int | None
    most_epochs: float | None
    hardware: str
    precision: str


@dataclass(frozen=True)
class Provenance:
    """What a report was made of; `options` are those that choose runs and law."""

    runs: tuple[str, ...]
    """As given to the command."""
    options: dict[str, Any]
    sha256: dict[str, str]
    """Of every file that was read."""
    code_versions: tuple[str, ...]
    data_manifest_hashes: tuple[str, ...]
    training: Training | None
    records_without_provenance: tuple[str, ...]
    """Those that lack their settings, code version or data hash."""


def describe(
    named: Sequence[str], files: Iterable[str], options: dict[str, Any], name: Callable[[str], str] = str
) -> Provenance:
    """The provenance of a report whose command was given the runs `named` and read `files`.

    `name` turns the path of a file into its name in the report.
    """
    digests: dict[str, str] = {}
    records, lacking = [], []
    for file in sorted(set(files)):
        path = Path(file)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        known = digest in digests.values()
        digests[name(file)] = digest
        if path.suffix.lower() == ".csv":
            continue
        record = RunRecord.load(path)
        missing = [k for k in ("config", "code_version", "data_manifest_hash") if not getattr(record, k)]
        if missing:
            lacking.append(f"{name(file)}: no {', no '.join(missing)}")
        if not known:
            # A run whose record is in two folders was trained once.
            records.append(record)
    return Provenance(
        runs=tuple(map(name, named)),
        options=options,
        sha256=digests,
        code_versions=tuple(sorted({r.code_version for r in records})),
        data_manifest_hashes=tuple(sorted({r.data_manifest_hash for r in records if r.data_manifest_hash})),
        training=_training(records),
        records_without_provenance=tuple(lacking),
    )


def _training(records: Sequence[RunRecord]) -> Training | None:
    if not records:
        return None
    shares = [r.tokens / r.unique_tokens for r in records if r.unique_tokens]
    return Training(
        records=len(records),
        tokens=sum(r.tokens for r in records),
        training_flops=sum(r.training_flops for r in records),
        wall_seconds=sum(r.wall_seconds for r in records),
        unique_tokens=min((r.unique_tokens for r in records if r.unique_tokens), default=None),
        most_epochs=max(shares, default=None),
        hardware=", ".join(sorted({r.hardware for r in records})),
        precision=", ".join(sorted({r.precision for r in records})),
    )


def source_files(sources: Iterable[str]) -> list[str]:
    """The files behind the sources of runs; the source of a CSV row is FILE:LINE."""
    files = []
    for source in sources:
        head, _, line = source.rpartition(":")
        files.append(head if line.isdigit() and head else source)
    return list(dict.fromkeys(files))
