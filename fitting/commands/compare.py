"""Compare a case study with its baseline: delta phi three ways, the rival constant shift, and the channels.

BASELINE and STUDY are run records, folders, CSV files, or the word published; where one table holds both,
choose the arms with --baseline-where and --study-where. Exit status 1 if a fit behind the comparison is not
to be trusted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
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
    common.add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Compare, print or report. Raises `FitError` and `RecordError` for bad input."""
    from fitting.report.report import check_folder

    common.refuse_overwrite_alone(options)
    if options.report:
        check_folder(options.report, options.overwrite, "comparison")
    settings = {
        "starts": options.starts,
        "seed": options.seed,
        "resamples": options.bootstrap,
        "workers": options.workers,
    }
    progress = common.progress(options)
    analysis = derive([options.baseline, options.study], options, settings, options.report, progress)
    common.deliver(analysis, options, progress)
    return common.verdict(analysis["problems"])


def derive(
    paths: Sequence[str],
    chosen: argparse.Namespace,
    settings: dict[str, Any],
    folder: Path | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The content of comparison.json, which `compare` writes and `verify` derives again.

    Args:
        paths: of the baseline and of the study.
        chosen: where, exclude, split, baseline_where and study_where, as options of the command.
        settings: starts, seed, resamples and workers.
        folder: of the report; files are named as seen from there.
        progress: takes lines on how far it is.

    Raises:
        FitError, RecordError: bad input.
    """
    from fitting.data.splits import split_named
    from fitting.errors import FitError
    from fitting.report import provenance
    from fitting.studies.comparison import compare

    if len(paths) != 2:
        raise FitError(f"A comparison has two arms, BASELINE and STUDY; {len(paths)} were named. Name both")
    name = provenance.naming(folder)
    arms, with_them, files = [], [], []
    for path, rules in zip(paths, (chosen.baseline_where, chosen.study_where), strict=True):
        kept, before = common.select(common.load([path]).where(*rules), chosen)
        files += provenance.source_files(str(source) for source in before.source)
        arms.append(kept.renamed(name))
        with_them.append(before.renamed(name))
    search = {**settings, "split": split_named(chosen.split), "progress": progress}
    found = compare(*arms, **search)
    analysis: dict[str, Any] = {"schema_version": 1, "kind": "comparison", "settings": settings}
    analysis |= found.to_dict()
    gone = [dict(vars(gone)) for arm in arms for gone in arm.excluded]
    analysis["excluded"] = [*gone, *analysis["excluded"]]
    if list(map(len, arms)) != list(map(len, with_them)):
        analysis["with_excluded_runs"] = _with_excluded(compare, with_them, search)
    choices = {
        key: getattr(chosen, key) for key in ("where", "exclude", "split", "baseline_where", "study_where")
    }
    analysis["provenance"] = provenance.describe(common.named(paths), files, choices, name)
    return analysis


def _with_excluded(compare: Callable[..., Any], arms: Any, search: dict[str, Any]) -> dict[str, Any]:
    """The paired estimate with the excluded runs (F38)."""
    from fitting.errors import FitError

    try:
        found = compare(*arms, **{**search, "resamples": 0})
    except FitError as error:
        return {"delta_phi": None, "status": "not defined", "message": str(error)}
    status = "ok" if found.trusted else "not to be trusted"
    return {"delta_phi": found.paired.delta_phi, "status": status, "message": "; ".join(found.problems)}
