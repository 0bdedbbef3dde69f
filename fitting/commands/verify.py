"""Derive the numbers of a report from its runs again and say which differ.

Exit status: 0 if all are the same; 1 if any differs, or a record changed since; 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fitting.commands import common, compare, fit

SHOWN = 40
_ORIGIN = ("code_versions", "data_manifest_hashes", "training")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting verify`."""
    from fitting.report.provenance import TOLERANCE

    parser.add_argument(
        "report", type=Path, metavar="REPORT", help="folder that --report of `fit` or `compare` wrote"
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUNS",
        help="where its runs lie now, as given to the command that wrote it (default: where they lay then, seen from "
        "the report)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help=f"relative difference allowed (default: {TOLERANCE:g})",
    )
    parser.add_argument(
        "--workers", type=int, help="threads (default: all cores; results do not depend on it)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(options: argparse.Namespace) -> int:
    """Compute the report again and compare. Raises `FitError` and `RecordError` for bad input."""
    from fitting.errors import FitError
    from fitting.report import provenance
    from fitting.report.report import form_of, plain

    if not 0 <= options.tolerance < 1:
        raise FitError(f"--tolerance is {options.tolerance:g}; it must lie in [0, 1)")
    path, reported = provenance.read_report(options.report)
    form_of(reported)
    made = reported["provenance"]
    derive = {"fit": fit.derive, "comparison": compare.derive}[reported["kind"]]
    try:
        analysis = derive(
            options.runs or provenance.located(made["runs"], path.parent),
            argparse.Namespace(**made["options"]),
            {**reported["settings"], "workers": options.workers},
            path.parent,
            common.progress(options),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise FitError(
            f"{path} does not say what it was made of as a report does ({type(error).__name__}: {error}). "
            "Make it again with --report"
        ) from error
    now = plain(analysis["provenance"])
    found = provenance.changed_files(made["sha256"], now["sha256"])
    ignored = ("provenance", "settings")
    numbers, again = (
        {k: v for k, v in plain(tree).items() if k not in ignored} for tree in (reported, analysis)
    )
    origin, origin_now = ({k: tree.get(k) for k in _ORIGIN} for tree in (made, now))
    found += list(provenance.differences(numbers, again, options.tolerance))
    found += list(provenance.differences(origin, origin_now, options.tolerance, "provenance"))
    found += list(provenance.stale_texts(reported, path.parent))
    for difference in found[:SHOWN]:
        print(difference)
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more")
    for line in now["records_without_provenance"]:
        print(f"note: {line}", file=sys.stderr)
    total = provenance.count_numbers(numbers)
    runs = len(again["points"] if "points" in again else again["data"]["points"])
    if found:
        print(
            f"{options.report}: {len(found)} differences; {total} numbers were derived again from {runs} runs."
        )
        return common.NOT_TRUSTED
    print(f"{options.report}: {total} numbers derived again from {runs} runs, all the same.")
    return common.OK
