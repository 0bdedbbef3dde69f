"""Derive the numbers of a report from its runs again and say which differ.

Exit status: 0 if all are the same; 1 if any differs, or a record changed since; 2 for bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fitting.commands import common

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting verify`."""
    from fitting.provenance import TOLERANCE

    parser.add_argument(
        "report", type=Path, metavar="REPORT", help="folder that `fitting fit --report` wrote"
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUNS",
        help="where its runs lie now (default: where they lay when it was made)",
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
    from fitting import provenance
    from fitting.analysis import Settings, analyse
    from fitting.report import plain

    reported = provenance.read_report(options.report)
    made = reported["provenance"]
    chosen = argparse.Namespace(**made["options"])
    settings = Settings(**{**reported["settings"], "workers": options.workers})
    kept, before = common.select(common.load(options.runs or made["runs"]), chosen)
    analysis = analyse(
        kept, common.law_of(chosen), settings, without_exclusions=before, progress=common.progress(options)
    )
    files = provenance.source_files(str(source) for source in before.source)
    found = provenance.changed_files(made["sha256"], files)
    ignored = ("provenance", "settings")
    numbers, again = (
        {k: v for k, v in plain(tree).items() if k not in ignored} for tree in (reported, analysis)
    )
    found += list(provenance.differences(numbers, again, options.tolerance))
    if options.report.is_dir():
        found += list(provenance.stale_texts(reported, options.report))
    for difference in found[:SHOWN]:
        print(difference)
    if len(found) > SHOWN:
        print(f"... and {len(found) - SHOWN} more")
    for line in provenance.lacking_provenance(files):
        print(f"note: {line}", file=sys.stderr)
    total = provenance.count_numbers(numbers)
    if found:
        print(
            f"{options.report}: {len(found)} differences; {total} numbers were derived again from {len(kept)} runs."
        )
        return common.NOT_TRUSTED
    print(f"{options.report}: {total} numbers derived again from {len(kept)} runs, all the same.")
    return common.OK
