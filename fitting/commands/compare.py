"""Compare a case study with its baseline: delta phi three ways, the rival constant shift, and the channels.

BASELINE and STUDY are run records, folders, CSV files, or the word published; where one table holds both,
choose the arms with --baseline-where and --study-where. Exit status 1 if a fit behind the comparison is not
to be trusted.
"""

from __future__ import annotations

import argparse

from fitting.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting compare`."""
    parser.add_argument("baseline", metavar="BASELINE", help="runs of the baseline")
    parser.add_argument("study", metavar="STUDY", help="runs of the case study; r=1 is shared")
    for arm in ("baseline", "study"):
        parser.add_argument(
            f"--{arm}-where",
            action="append",
            default=[],
            metavar="RULE",
            help=f"use only such runs of the {arm}",
        )
    common.add_run_options(parser, runs=False)
    parser.add_argument("--split", default="paper", help="where the injection is counted (default: paper)")
    common.add_search_options(parser)
    common.add_output_options(parser, report=False)


def run(options: argparse.Namespace) -> int:
    """Compare and print. Raises `FitError` and `RecordError` for bad input."""
    from fitting.comparison import compare
    from fitting.splits import split_named

    split = split_named(options.split)
    arms = []
    for path, rules in ((options.baseline, options.baseline_where), (options.study, options.study_where)):
        kept, _ = common.select(common.load([path]).where(*rules), options)
        arms.append(kept)
    found = compare(
        arms[0],
        arms[1],
        split=split,
        resamples=options.bootstrap,
        starts=options.starts,
        seed=options.seed,
        workers=options.workers,
        progress=common.progress(options),
    )
    excluded = [vars(gone) for arm in arms for gone in arm.excluded]
    if options.json:
        common.print_json(found.to_dict() | {"excluded": excluded})
    else:
        print(found)
        for gone in excluded:
            print(f"left out: {gone['source']} ({gone['rule']})")
    return common.verdict(found.problems)
