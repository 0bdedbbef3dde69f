"""Where a report's numbers come from, and whether they still follow from there."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitting.errors import FitError
from fitting.records import RunRecord

TOLERANCE = 1e-5
"""Relative difference below which two numbers are taken as equal. Results are the same bits on one machine; another
processor or another numpy rounds differently, which moves a number by less than what a report shows of it."""
_NEAR_ZERO = 1e-9
_SEARCH = {"gradient_norm", "second_solver", "starts", "message", "problems", "verdict"}
"""How the search went, and sentences with rounded numbers: rounding decides, not the records. What follows from it,
the status and what is preferred, is compared."""
REPORTS = ("fit.json", "comparison.json")
"""The file of a report that holds its numbers, for each command that writes one."""
PUBLISHED = "published"
_TEXTS = ("report.md", "report.html")
_PATH, _OFF_OPTIMUM = "phi_path", 10.0
"""Fits with phi held far from its best value, where A is hardly determined and rounding moves it the most."""
_SOURCE = "source"
_SHOWN = 200
"""Characters of a line that are told; the numbers behind the slider are one line."""
Naming = Callable[[str], str]


@dataclass(frozen=True)
class Difference:
    """One thing in a report that does not follow from its records."""

    where: str
    reported: Any
    derived: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.reported!r} in the report, {self.derived!r} from the records"


def naming(folder: Path | None) -> Naming:
    """How a report in `folder` names files: by their way from there, so that it is right wherever both lie together.

    The shipped grid is `published`. Without a folder names stay as they are.
    """
    from fitting.published import GRID

    def name(path: str) -> str:
        if path.startswith(str(GRID)):
            return PUBLISHED + path[len(str(GRID)) :]
        if folder is None:
            return path
        try:
            return Path(os.path.relpath(Path(path).resolve(), folder.resolve())).as_posix()
        except ValueError:
            # No way leads from one drive to another.
            return Path(path).resolve().as_posix()

    return name


def located(names: Iterable[str], folder: Path) -> list[str]:
    """Paths of the runs that a report in `folder` names."""
    from fitting.published import GRID

    return [
        str(GRID) if name == PUBLISHED and not (folder / name).exists() else str((folder / name).resolve())
        for name in names
    ]


def describe(
    named: Sequence[str], files: Iterable[str], options: dict[str, Any], name: Naming = str
) -> dict[str, Any]:
    """What a report was made of, as plain JSON types; its place in the report's JSON is `provenance`.

    Args:
        named: runs as they were given to the command.
        files: the files that were read.
        options: of the command; what chooses runs and law.
        name: how the report names a file.
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
            # A run whose record lies in two folders was trained once.
            records.append(record)
    return {
        "runs": [name(path) for path in named],
        "options": options,
        "sha256": digests,
        "code_versions": sorted({r.code_version for r in records}),
        "data_manifest_hashes": sorted({r.data_manifest_hash for r in records if r.data_manifest_hash}),
        "training": _training(records),
        "records_without_provenance": lacking,
    }


def _training(records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """What training the runs took, over all records; None without any."""
    if not records:
        return None
    shares = [r.tokens / r.unique_tokens for r in records if r.unique_tokens]
    return {
        "records": len(records),
        "tokens": sum(r.tokens for r in records),
        "training_flops": sum(r.training_flops for r in records),
        "wall_seconds": sum(r.wall_seconds for r in records),
        "unique_tokens": min((r.unique_tokens for r in records if r.unique_tokens), default=None),
        "most_epochs": max(shares, default=None),
        "hardware": ", ".join(sorted({r.hardware for r in records})),
        "precision": ", ".join(sorted({r.precision for r in records})),
    }


def source_files(sources: Iterable[str]) -> list[str]:
    """Files behind the sources of runs; a row of a CSV is FILE:LINE."""
    files = []
    for source in sources:
        head, _, line = source.rpartition(":")
        files.append(head if line.isdigit() and head else source)
    return list(dict.fromkeys(files))


def read_report(place: Path) -> tuple[Path, dict[str, Any]]:
    """A report's file of numbers, given itself or by its folder, and what is in it.

    Raises:
        FitError: there is none, or it does not say what it was made of.
    """
    path = place
    if place.is_dir():
        path = next((place / name for name in REPORTS if (place / name).exists()), place / REPORTS[0])
    try:
        analysis = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FitError(f"{path} cannot be read as a report ({error}). Name the folder of a report") from None
    if not isinstance(analysis, dict) or "provenance" not in analysis or "settings" not in analysis:
        raise FitError(
            f"{path} does not say which runs it was made of. Make it again with `--report` of `fitting fit` or "
            "`fitting compare`"
        )
    return path, analysis


def changed_files(recorded: dict[str, str], now: dict[str, str]) -> list[Difference]:
    """Records that are not what they were when the report was made, both as name -> sha256.

    They may have moved: what counts is the content.
    """
    gone = {name: digest for name, digest in recorded.items() if digest not in now.values()}
    new = {name: digest for name, digest in now.items() if digest not in recorded.values()}
    return [
        Difference(f"record {name}", _short(gone.get(name)), _short(new.get(name)))
        for name in sorted(gone.keys() | new.keys())
    ]


def _short(digest: str | None) -> str | None:
    return digest and f"sha256 {digest[:12]}"


def differences(
    reported: Any, derived: Any, tolerance: float = TOLERANCE, where: str = "", scale: float = 0.0
) -> Iterator[Difference]:
    """Every leaf of two trees of plain JSON types that is not equal.

    Whole numbers are compared exactly, others within a relative tolerance: in a list of numbers relative to the largest
    (`scale`), since a curve that touches zero has no digits there.
    """
    if isinstance(reported, dict) and isinstance(derived, dict):
        for key in [*reported, *(k for k in derived if k not in reported)]:
            inner = f"{where}.{key}" if where else str(key)
            if key in _SEARCH and key in reported and key in derived:
                continue
            if key == _SOURCE and isinstance(reported.get(key), str) and isinstance(derived.get(key), str):
                # The same file may lie elsewhere.
                if Path(reported[key]).name != Path(derived[key]).name:
                    yield Difference(inner, reported[key], derived[key])
                continue
            wider = tolerance * (_OFF_OPTIMUM if key == _PATH else 1.0)
            yield from differences(reported.get(key), derived.get(key), wider, inner)
    elif isinstance(reported, list) and isinstance(derived, list) and len(reported) == len(derived):
        largest = max((abs(x) for x in derived if _is_number(x)), default=0.0)
        for i, (a, b) in enumerate(zip(reported, derived, strict=True)):
            yield from differences(a, b, tolerance, f"{where}[{i}]", largest)
    elif _is_number(reported) and _is_number(derived) and not (type(reported) is type(derived) is int):
        near = max(_NEAR_ZERO, tolerance * scale)
        if not math.isclose(reported, derived, rel_tol=tolerance, abs_tol=near):
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
    """Lines that report.md and report.html should hold for the numbers of an analysis and do not, and lines of
    report.md that do not come from it. Figures are not looked at."""
    from fitting.report.report import FIGURES, parts_of_page, text_of

    markdown, page = (folder / name for name in _TEXTS)
    if markdown.is_file():
        shown = markdown.read_text(encoding="utf-8").partition(f"\n\n{FIGURES}\n")[0].splitlines()
        expected = text_of(analysis).splitlines()
        for kind, i, k, j, m in difflib.SequenceMatcher(None, shown, expected, autojunk=False).get_opcodes():
            if kind != "equal":
                yield from (Difference(markdown.name, line, "no such line") for line in shown[i:k] if line)
                yield from (Difference(markdown.name, "no such line", line) for line in expected[j:m] if line)
    if page.is_file():
        text = page.read_text(encoding="utf-8")
        for part in parts_of_page(analysis):
            for line in part.splitlines():
                if line.strip() and line not in text:
                    yield Difference(page.name, "no such line", line.strip()[:_SHOWN])
