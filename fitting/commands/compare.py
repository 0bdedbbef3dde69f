"""Compare a case study with its baseline: delta phi three ways, the rival constant shift, and the channels.

BASELINE and STUDY are run records, folders, CSV files, or the word published; where one table holds both,
choose the arms with --baseline-where and --study-where. Exit status 1 if a fit behind the comparison is not
to be trusted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

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

    arms = []
    for path, rules in ((options.baseline, options.baseline_where), (options.study, options.study_where)):
        arms.append(common.select(common.load([path]).where(*rules), options))
    kept, chosen = zip(*arms, strict=True)
    search: dict[str, Any] = {
        "split": split_named(options.split),
        "starts": options.starts,
        "seed": options.seed,
        "workers": options.workers,
        "progress": common.progress(options),
    }
    found = compare(*kept, resamples=options.bootstrap, **search)
    excluded = [vars(gone) for arm in kept for gone in arm.excluded]
    shown = found.to_dict()
    shown["excluded"] = [*excluded, *shown["excluded"]]
    lines = [f"left out: {gone['source']} ({gone['rule']})" for gone in excluded]
    if list(map(len, kept)) != list(map(len, chosen)):
        with_them = _with_excluded(compare, chosen, search)
        shown["with_excluded_runs"] = with_them
        lines.append(
            f"Paired delta phi {found.paired.delta_phi:+.4f} without the runs of --exclude; with them: "
            + (
                f"not defined, because: {with_them['message']}"
                if with_them["delta_phi"] is None
                else f"{with_them['delta_phi']:+.4f} ({with_them['status']})"
            )
        )
    if options.json:
        common.print_json(shown)
    else:
        print("\n".join([str(found), *lines]))
    return common.verdict(found.problems)


def _with_excluded(compare: Callable[..., Any], arms: Any, search: dict[str, Any]) -> dict[str, Any]:
    """The paired estimate with the excluded runs (F38)."""
    from fitting.errors import FitError

    try:
        found = compare(*arms, resamples=0, **search)
    except FitError as error:
        return {"delta_phi": None, "status": "not defined", "message": str(error)}
    status = "ok" if found.trusted else "not to be trusted"
    return {"delta_phi": found.paired.delta_phi, "status": status, "message": "; ".join(found.problems)}
