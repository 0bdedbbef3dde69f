"""Derive the numbers of a report from its runs again and say which differ.

Exit status: 0 if all are the same; 1 if any differs, or a record has changed since; 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitting.commands import common, compare, fit
from fitting.errors import FitError

if TYPE_CHECKING:
    from fitting.report.report import Reported

SHOWN = 40
_ORIGIN = ("code_versions", "data_manifest_hashes", "training")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting verify`."""
    text = "folder that --report of `fit` or `compare` wrote"
    parser.add_argument("report", type=Path, metavar="REPORT", help=text)
    then = "(default: where they were then, relative to the report)"
    text = f"where its runs are now, as given to the command that wrote it {then}"
    parser.add_argument("runs", nargs="*", metavar="RUNS", help=text)
    text = "relative difference allowed (default: 1e-05: the rounding of another processor or numpy)"
    parser.add_argument("--tolerance", type=float, default=1e-5, help=text)
    common.add_thread_options(parser)


def run(options: argparse.Namespace) -> int:
    """Compute the report again and compare. Raises `FitError` and `RecordError` for bad input."""
    from fitting.commands.sources import located
    from fitting.report import verification

    if not 0 <= options.tolerance < 1:
        raise FitError(f"--tolerance is {options.tolerance:g}; it must lie in [0, 1)")
    path, numbers, reported = verification.read_report(options.report)
    made = numbers["provenance"]
    paths = options.runs or located(made["runs"], path.parent)
    again = _derive(
        paths, reported, numbers["settings"], path, options.workers, common.progress(options)
    ).to_dict()
    now = again["provenance"]
    found = verification.changed_files(made["sha256"], now["sha256"])
    ignored = ("provenance", "settings")
    told, derived = ({k: v for k, v in tree.items() if k not in ignored} for tree in (numbers, again))
    found += list(verification.differences(told, derived, options.tolerance))
    origin, origin_now = ({k: tree.get(k) for k in _ORIGIN} for tree in (made, now))
    found += list(verification.differences(origin, origin_now, options.tolerance, "provenance"))
    found += list(verification.stale_texts(reported, numbers, path.parent))
    for difference in found[:SHOWN]:
        print(difference)
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more")
    for line in now["records_without_provenance"]:
        print(f"note: {line}", file=sys.stderr)
    total = verification.count_numbers(told)
    runs = len(again["points"] if "points" in again else again["data"]["points"])
    again_from = f"derived again from {runs} runs"
    if found:
        print(f"{options.report}: {len(found)} differences; {total} numbers were {again_from}.")
        return common.NOT_TRUSTED
    print(f"{options.report}: {total} numbers {again_from}, all the same.")
    return common.OK


def _derive(
    paths: list[str],
    reported: Reported,
    settings_of_report: Mapping[str, Any],
    path: Path,
    workers: int | None,
    progress: Callable[[str], None],
) -> Reported:
    """What the command that wrote a report makes of the runs at `paths`."""
    from fitting.data.plain import read
    from fitting.studies.analysis import Analysis

    assert reported.provenance is not None
    options, where = reported.provenance.options, f"{path}: provenance.options"
    # What a report from before an option was made without.
    before: dict[str, Any] = {"grids": 0}
    if isinstance(reported, Analysis):
        before |= {"limits": None, "sensitivity": False, "matching": False}
    without = {name: value for name, value in before.items() if name not in settings_of_report}
    if isinstance(reported, Analysis):
        settings = replace(reported.settings, workers=workers, **without)
        return fit.derive(paths, read(fit.Choices, options, where), settings, path.parent, progress)
    arms = read(compare.Choices, options, where)
    of_arms = replace(reported.settings, workers=workers, **without)
    return compare.derive(paths, arms, of_arms, path.parent, progress)
