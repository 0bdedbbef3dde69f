"""Fit a scaling law to runs, with intervals, diagnostics and allocation.

Exit status: 0; 1 if the fit is not to be trusted (the reason goes to stderr); 2 for bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fitting.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting fit`."""
    common.add_run_options(parser)
    common.add_law_options(parser)
    parser.add_argument("--all-splits", action="store_true", help="phi under every split, side by side")
    parser.add_argument("--no-rivals", action="store_true", help="leave the comparison of law forms out")
    common.add_search_options(parser)
    common.add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Fit, print or report. Raises `FitError` and `RecordError` for bad input."""
    from fitting.report.report import check_folder

    common.refuse_overwrite_alone(options)
    if options.report:
        check_folder(options.report, options.overwrite)
    settings = {
        "starts": options.starts,
        "seed": options.seed,
        "resamples": options.bootstrap,
        "rivals": not options.no_rivals,
        "all_splits": options.all_splits,
        "workers": options.workers,
    }
    progress = common.progress(options)
    analysis = derive(options.runs, options, settings, options.report, progress)
    common.deliver(analysis, options, progress)
    fit = analysis["fit"]
    doubts = [] if fit["status"] == "ok" else [fit["message"]]
    others = [split for split in analysis.get("splits", ()) if split["split"] != fit["split"]]
    doubts += [
        f"split {split['split']}: {split['message']}"
        for split in others
        if split["status"] not in ("ok", "undefined")
    ]
    return common.verdict(doubts)


def derive(
    paths: Sequence[str],
    chosen: argparse.Namespace,
    settings: dict[str, Any],
    folder: Path | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The content of fit.json, which `fit` writes and `verify` derives again.

    Args:
        paths: of the runs.
        chosen: where, exclude, law, phi and split, as options of the command.
        settings: fields of `fitting.Settings`.
        folder: of the report; files are named as seen from there.
        progress: takes lines on how far it is.

    Raises:
        FitError, RecordError: bad input.
    """
    from fitting.report import provenance
    from fitting.studies.analysis import Settings, analyse

    name = provenance.naming(folder)
    kept, before = common.select(common.load(paths), chosen)
    files = provenance.source_files(str(source) for source in before.source)
    analysis = analyse(
        kept.renamed(name),
        common.law_of(chosen),
        Settings(**settings),
        without_exclusions=before.renamed(name),
        progress=progress,
    )
    choices = {key: getattr(chosen, key) for key in ("where", "exclude", "law", "phi", "split")}
    analysis["provenance"] = provenance.describe(common.named(paths), files, choices, name)
    return analysis
