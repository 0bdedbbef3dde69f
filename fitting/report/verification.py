"""Whether the numbers of a report, and its texts, still follow from its runs."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitting.data.plain import read
from fitting.errors import FitError
from fitting.report.report import FIGURES, KINDS, Reported, before_figures, parts_of_page
from fitting.studies.analysis import Analysis

TOLERANCE = 1e-5
"""Relative difference below which two numbers are taken as equal. On one machine, results are the same bits.
Another processor or numpy rounds differently, which moves a number by less than a report shows."""
_NEAR_ZERO = 1e-9
_SEARCH = {"gradient_norm", "second_solver", "starts", "message", "problems", "verdict"}
"""How the search went, and sentences with rounded numbers: they depend on rounding, not on the records. The status
and the preferred reading, which follow from them, are compared."""
REPORTS = tuple(f"{kind}.json" for kind in KINDS)
"""The file of a report that holds its numbers, for each command that writes one."""
_PATH, _OFF_OPTIMUM = "phi_path", 10.0
"""Fits with phi held far from its best value, where A is hardly determined and rounding moves it the most."""
_SHOWN = 200
"""Characters of a line that are shown; the numbers behind the slider are one line."""


@dataclass(frozen=True)
class Difference:
    """One thing in a report that does not follow from its records."""

    where: str
    reported: Any
    derived: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.reported!r} in the report, {self.derived!r} from the records"


def read_report(place: Path) -> tuple[Path, dict[str, Any], Reported]:
    """The path of a report's JSON (`place` is the file or its folder), its content, and that content as a result.

    Raises `FitError` if there is no such file, it is not a report, or it does not say what it was made of.
    """
    path = place
    if place.is_dir():
        path = next((place / name for name in REPORTS if (place / name).exists()), place / REPORTS[0])
    try:
        numbers = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FitError(f"{path} cannot be read as a report ({error}). Name the folder of a report") from None
    again = "Make it again with `--report` of `fitting fit` or `fitting compare`"
    if not isinstance(numbers, dict) or numbers.get("provenance") is None:
        raise FitError(f"{path} does not say which runs it was made of. {again}")
    kind = numbers.get("kind")
    if kind not in KINDS:
        raise FitError(f"{path} is of the kind {kind!r}, not one of: {', '.join(KINDS)}. {again}")
    try:
        found = read(KINDS[kind], numbers)
    except FitError as error:
        text = f"{path} does not say what it was made of as a report does ({error}). {again}"
        raise FitError(text) from None
    return path, numbers, found


def changed_files(recorded: dict[str, str], now: dict[str, str]) -> list[Difference]:
    """Records that changed after the report was made. Both arguments are name -> sha256.

    Records may have moved: only their content counts.
    """
    gone = {name: digest for name, digest in recorded.items() if digest not in now.values()}
    new = {name: digest for name, digest in now.items() if digest not in recorded.values()}

    def short(digest: str | None) -> str | None:
        return digest and f"sha256 {digest[:12]}"

    names = sorted(gone.keys() | new.keys())
    return [Difference(f"record {name}", short(gone.get(name)), short(new.get(name))) for name in names]


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
            a, b = reported.get(key), derived.get(key)
            if key == "source" and isinstance(a, str) and isinstance(b, str):
                # The same file may be elsewhere.
                if Path(a).name == Path(b).name:
                    continue
            wider = tolerance * (_OFF_OPTIMUM if key == _PATH else 1.0)
            yield from differences(a, b, wider, inner)
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


def stale_texts(result: Reported, numbers: dict[str, Any], folder: Path) -> Iterator[Difference]:
    """Lines that report.md and report.html in `folder` should hold for a result and do not, and lines of report.md that
    do not come from it. Figures are not compared. `result` was read from the JSON `numbers`."""
    markdown, page = folder / "report.md", folder / "report.html"
    if markdown.is_file():
        shown = markdown.read_text(encoding="utf-8").partition(f"\n\n{FIGURES}\n")[0].splitlines()
        expected = before_figures(result).splitlines()
        for kind, i, k, j, m in difflib.SequenceMatcher(None, shown, expected, autojunk=False).get_opcodes():
            if kind != "equal":
                yield from (Difference(markdown.name, line, "no such line") for line in shown[i:k] if line)
                yield from (Difference(markdown.name, "no such line", line) for line in expected[j:m] if line)
    if page.is_file() and isinstance(result, Analysis):
        text = page.read_text(encoding="utf-8")
        for part in parts_of_page(result, numbers):
            for line in part.splitlines():
                if line.strip() and line not in text:
                    yield Difference(page.name, "no such line", line.strip()[:_SHOWN])
