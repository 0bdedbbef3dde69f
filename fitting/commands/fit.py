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
from fitting.data.reading import Reading

if TYPE_CHECKING:
    from fitting.studies.analysis import Analysis, Settings


@dataclass(frozen=True)
class Choices:
    """The options that choose runs and law. A report holds them."""

    where: tuple[str, ...]
    exclude: tuple[str, ...]
    law: str
    phi: float | None
    split: str
    count: str = "total"
    reading: Reading = Reading()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting fit`."""
    common.add_law_options(parser)
    parser.add_argument("--all-splits", action="store_true", help="phi under every split, side by side")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help="do not compare law forms")
    _add_judging_options(parser)
    common.add_search_options(parser)
    common.add_grid_option(parser)
    common.add_output_options(parser)


def _add_judging_options(parser: argparse.ArgumentParser) -> None:
    """The loss of the fit, and from where on it is doubted."""
    loss = parser.add_mutually_exclusive_group()
    text = "where Huber's function turns linear, in log-loss (default: 0.001, the paper's)"
    loss.add_argument("--delta", type=float, default=1e-3, help=text)
    loss.add_argument(
        "--least-squares", dest="delta", action="store_const", const=None, help="squares of all residuals"
    )
    for option, limit, text in (
        (
            "--widest-interval",
            1.0,
            "doubt phi if its quoted interval is wider, or reaches further than half of it to one side",
        ),
        ("--least-r-squared", 0.9, "doubt a fit whose R² is below"),
        ("--largest-misfit", 1.0, "doubt a fit whose RMSE is above this many times the spread between r"),
        ("--outlier-mads", 6.0, "name runs beyond this many robust standard deviations"),
    ):
        parser.add_argument(
            option, type=float, default=limit, metavar="X", help=f"{text} (default: {limit:g})"
        )
    text = "doubt a fit to fewer cells than parameters and so many (default: 2)"
    parser.add_argument("--least-spare-cells", type=int, default=2, metavar="N", help=text)


def run(options: argparse.Namespace) -> int:
    """Fit, print or report. Raises `FitError` and `RecordError` for bad input."""
    from fitting.estimation.identification import Limits
    from fitting.studies.analysis import Settings

    common.check_report(options, "fit")
    progress = common.progress(options)
    options.reading = common.reading(options)
    options.limits, options.sensitivity, options.matching = common.choices(Limits, options), True, True
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
    """The content of fit.json, which `fit` writes and `verify` derives again; files are named as seen from `folder`.

    Raises `FitError` and `RecordError` for bad input.
    """
    from fitting.commands.sources import named, naming
    from fitting.data import provenance
    from fitting.data.comparable import refuse_bits
    from fitting.studies.analysis import analyse

    name = naming(folder)
    kept, before = common.select(common.load(paths, chosen.count, chosen.reading), chosen)
    files = provenance.source_files(str(source) for source in before.source)
    kept, before = kept.renamed(name), before.renamed(name)
    if unused := before.unused_columns:
        progress(f"columns that nothing but --where and --exclude reads: {', '.join(unused)}")
    law = common.law_of(chosen, before)
    analysis = analyse(kept, law, settings, without_exclusions=before, progress=progress)
    floor = analysis.fit.parameters.get("E")
    if floor is not None and chosen.reading.loss_unit is None and analysis.fit.r_squared > 0.9:
        refuse_bits(floor, float(kept.n_total.max()), common.span(kept))
    return replace(analysis, provenance=provenance.describe(named(paths), files, common.stated(chosen), name))
