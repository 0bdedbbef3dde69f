"""Compare a case study with its baseline: delta phi three ways, the rival shift, and the channels.

BASELINE and STUDY are run records, folders, CSV files, or the word published. If one table holds both, choose
the arms with --baseline-where and --study-where. The exit status is 1 if a fit behind the comparison is not to
be trusted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fitting.commands import common
from fitting.data.reading import Reading
from fitting.errors import FitError

if TYPE_CHECKING:
    from fitting.studies.comparison import CompareSettings, Comparison


@dataclass(frozen=True)
class Choices:
    """The options that choose the runs of both arms and the split. A report holds them."""

    where: tuple[str, ...]
    exclude: tuple[str, ...]
    split: str
    baseline_where: tuple[str, ...]
    study_where: tuple[str, ...]
    count: str = "total"
    reading: Reading = Reading()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting compare`."""
    parser.add_argument("baseline", metavar="BASELINE", help="runs of the baseline")
    parser.add_argument("study", metavar="STUDY", help="runs of the case study; r=1 is shared")
    for arm in ("baseline", "study"):
        text = f"use only the runs of the {arm} that satisfy RULE"
        parser.add_argument(f"--{arm}-where", action="append", default=[], metavar="RULE", help=text)
    common.add_run_options(parser)
    for name, unit in (("budget", "FLOPs"), ("width", "d_model")):
        text = f"a further {name} ({unit}) at which a run that tells readings apart is possible"
        option = f"--more-{name}s"
        parser.add_argument(option, action="append", type=float, default=[], metavar=unit.upper(), help=text)
    common.add_search_options(parser)
    common.add_grid_option(parser)
    common.add_output_options(parser)


def run(options: argparse.Namespace) -> int:
    """Compare, print or report. Raises `FitError` and `RecordError` for bad input."""
    from fitting.studies.comparison import CompareSettings

    common.check_report(options, "comparison")
    progress = common.progress(options)
    options.reading = common.reading(options)
    chosen, settings = common.choices(Choices, options), common.choices(CompareSettings, options)
    found = derive([options.baseline, options.study], chosen, settings, options.report, progress)
    common.deliver(found, options, progress)
    return common.verdict(found.problems)


def derive(
    paths: Sequence[str],
    chosen: Choices,
    settings: CompareSettings,
    folder: Path | None,
    progress: Callable[[str], None],
) -> Comparison:
    """The content of comparison.json, as `fit.derive` makes that of fit.json; `paths` are baseline and study."""
    from fitting.commands.sources import named, naming
    from fitting.data import provenance
    from fitting.data.comparable import refuse_bits
    from fitting.studies.comparison import PairedWithExcluded, compare

    if len(paths) != 2:
        raise FitError(f"A comparison has two arms, BASELINE and STUDY; {len(paths)} were named. Name both")
    name = naming(folder)
    arms, with_them, files = [], [], []
    for path, rules in zip(paths, (chosen.baseline_where, chosen.study_where), strict=True):
        kept, before = common.select(common.load([path], chosen.count, chosen.reading).where(*rules), chosen)
        files += provenance.source_files(str(source) for source in before.source)
        arms.append(kept.renamed(name))
        with_them.append(before.renamed(name))
    search = {**vars(settings), "split": common.split_of(chosen, *with_them), "progress": progress}
    found = compare(*arms, **search)
    if chosen.reading.loss_unit is None and not found.problems:
        largest = float(max(arm.n_total.max() for arm in arms))
        refuse_bits(found.readings[0].parameters["E"], largest, min(map(common.span, arms)))
    excluded = None
    if list(map(len, arms)) != list(map(len, with_them)):
        try:
            other = compare(*with_them, **{**search, "resamples": 0, "grids": 0})
        except FitError as error:
            excluded = PairedWithExcluded(None, "not defined", str(error))
        else:
            excluded = PairedWithExcluded(other.paired.delta_phi, other.status, "; ".join(other.problems))
    gone = [gone for arm in arms for gone in arm.excluded]
    return replace(
        found,
        excluded=(*gone, *found.excluded),
        with_excluded_runs=excluded,
        provenance=provenance.describe(named(paths), files, common.stated(chosen), name),
    )
