"""Where a report's numbers come from, and whether they still follow from there."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitting.errors import FitError
from fitting.records import RecordError, RunRecord

TOLERANCE = 1e-6
"""Relative difference below which two numbers are taken as equal: results are the same bits on one machine, and differ
in the last digits between versions of numpy and scipy."""
_FILES = ("report.md", "report.html")
_SOURCE = "source"


@dataclass(frozen=True)
class Difference:
    """One thing in a report that does not follow from its records."""

    where: str
    reported: Any
    derived: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.reported!r} in the report, {self.derived!r} from the records"


def describe(named: Sequence[str], files: Iterable[str], options: dict[str, Any]) -> dict[str, Any]:
    """What a report was made of, as plain JSON types; its place in fit.json is `provenance`.

    Args:
        named: runs as they were given to the command.
        files: the files that were read.
        options: of the command; what chooses runs and law.
    """
    digests, versions, hashes, lacking = {}, set(), set(), []
    for name in sorted(set(files)):
        path = Path(name)
        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix.lower() == ".csv":
            continue
        record = RunRecord.load(path)
        versions.add(record.code_version)
        hashes.add(record.data_manifest_hash)
        if not (record.code_version and record.config and record.data_manifest_hash):
            lacking.append(name)
    return {
        "runs": list(named),
        "options": options,
        "sha256": digests,
        "code_versions": sorted(versions),
        "data_manifest_hashes": sorted(h for h in hashes if h),
        "records_without_provenance": lacking,
    }


def source_files(sources: Iterable[str]) -> list[str]:
    """Files behind the sources of runs; a row of a CSV is FILE:LINE."""
    files = []
    for source in sources:
        head, _, line = source.rpartition(":")
        files.append(head if line.isdigit() and head else source)
    return list(dict.fromkeys(files))


def read_report(folder: Path) -> dict[str, Any]:
    """Content of a report's fit.json.

    Raises:
        FitError: there is none, or it does not say what it was made of.
    """
    path = folder / "fit.json" if folder.is_dir() else folder
    try:
        analysis = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FitError(f"{path} cannot be read as a report ({error}). Name the folder of a report") from None
    if not isinstance(analysis, dict) or "provenance" not in analysis:
        raise FitError(
            f"{path} does not say which runs it was made of. Make it again with `fitting fit --report`"
        )
    return analysis


def changed_files(recorded: dict[str, str], files: Iterable[str]) -> list[Difference]:
    """Records that are not what they were when the report was made. They may have moved: what counts is the content."""
    before = list(recorded.items())
    now = [(name, hashlib.sha256(Path(name).read_bytes()).hexdigest()) for name in files]
    there, here = {digest for _, digest in before}, {digest for _, digest in now}
    gone = {Path(name).name: digest for name, digest in before if digest not in here}
    new = {Path(name).name: digest for name, digest in now if digest not in there}
    return [
        Difference(f"record {name}", _short(gone.get(name)), _short(new.get(name)))
        for name in sorted(gone.keys() | new.keys())
    ]


def _short(digest: str | None) -> str | None:
    return digest and f"sha256 {digest[:12]}"


def differences(
    reported: Any, derived: Any, tolerance: float = TOLERANCE, where: str = ""
) -> Iterator[Difference]:
    """Every leaf of two trees of plain JSON types that is not equal, numbers within a relative tolerance."""
    if isinstance(reported, dict) and isinstance(derived, dict):
        for key in [*reported, *(k for k in derived if k not in reported)]:
            inner = f"{where}.{key}" if where else str(key)
            if key == _SOURCE and isinstance(reported.get(key), str) and isinstance(derived.get(key), str):
                # The same file may lie elsewhere.
                if Path(reported[key]).name != Path(derived[key]).name:
                    yield Difference(inner, reported[key], derived[key])
                continue
            yield from differences(reported.get(key), derived.get(key), tolerance, inner)
    elif isinstance(reported, list) and isinstance(derived, list) and len(reported) == len(derived):
        for i, (a, b) in enumerate(zip(reported, derived, strict=True)):
            yield from differences(a, b, tolerance, f"{where}[{i}]")
    elif _is_number(reported) and _is_number(derived):
        if not math.isclose(reported, derived, rel_tol=tolerance, abs_tol=1e-12):
            yield Difference(where, reported, derived)
    elif reported != derived:
        yield Difference(where, reported, derived)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def count_numbers(value: Any) -> int:
    """Numbers in a tree of plain JSON types."""
    if isinstance(value, dict):
        return sum(count_numbers(v) for v in value.values())
    if isinstance(value, list):
        return sum(count_numbers(v) for v in value)
    return int(_is_number(value))


def stale_texts(analysis: dict[str, Any], folder: Path) -> Iterator[Difference]:
    """Lines that report.md and report.html should hold for the numbers of an analysis and do not."""
    from fitting.report import rendered

    for name in _FILES:
        path = folder / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        for part in rendered(analysis, name):
            for line in part.splitlines():
                if line.strip() and line not in text:
                    yield Difference(name, "no such line", line.strip())


def lacking_provenance(files: Iterable[str]) -> list[str]:
    """Records that do not say configuration, code version or data."""
    found = []
    for name in files:
        if Path(name).suffix.lower() == ".csv":
            continue
        try:
            record = RunRecord.load(name)
        except RecordError:
            continue
        missing = [k for k in ("config", "code_version", "data_manifest_hash") if not getattr(record, k)]
        if missing:
            found.append(f"{name}: no {', no '.join(missing)}")
    return found
