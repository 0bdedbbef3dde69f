"""Fit a scaling law to runs, with intervals, diagnostics and allocation.

Exit status: 0; 1 if the fit is not to be trusted (the reason goes to stderr); 2 for bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fitting.commands import common

if TYPE_CHECKING:
    from fitting.studies.analysis import Analysis, Settings


@dataclass(frozen=True)
class Choices:
    """What chooses runs and law, as options of the command; a report holds them."""

    where: tuple[str, ...]
    exclude: tuple[str, ...]
    law: str
    phi: float | None
    split: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting fit`."""
    common.add_run_options(parser)
    common.add_law_options(parser)
    parser.add_argument("--all-splits", action="store_true", help="phi under every split, side by side")
    parser.add_argument(
        "--no-rivals", dest="rivals", action="store_false", help="leave the comparison of law forms out"
    )
    common.add_search_options(parser)
    common.add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Fit, print or report. Raises `FitError` and `RecordError` for bad input."""
    from fitting.report.report import check_folder
    from fitting.studies.analysis import Settings

    common.refuse_overwrite_alone(options)
    if options.report:
        check_folder(options.report, options.overwrite)
    progress = common.progress(options)
    chosen, settings = common.choices(Choices, options), common.choices(Settings, options)
    analysis = derive(options.runs, chosen, settings, options.report, progress)
    common.deliver(analysis, options, progress)
    return common.verdict(analysis.doubts)


def derive(
    paths: Sequence[str],
    chosen: Choices,
    settings: Settings,
    folder: Path | None,
    progress: Callable[[str], None],
) -> Analysis:
    """The content of fit.json, which `fit` writes and `verify` derives again.

    Args:
        paths: of the runs.
        chosen: runs and law.
        settings: of the analysis.
        folder: of the report; files are named as seen from there.
        progress: takes lines on how far it is.

    Raises:
        FitError, RecordError: bad input.
    """
    from fitting.commands.sources import named, naming
    from fitting.data import provenance
    from fitting.studies.analysis import analyse

    name = naming(folder)
    kept, before = common.select(common.load(paths), chosen)
    files = provenance.source_files(str(source) for source in before.source)
    analysis = analyse(
        kept.renamed(name),
        common.law_of(chosen),
        settings,
        without_exclusions=before.renamed(name),
        progress=progress,
    )
    return replace(analysis, provenance=provenance.describe(named(paths), files, vars(chosen), name))
