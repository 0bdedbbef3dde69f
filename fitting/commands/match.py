"""Match looped runs with r = 1 runs: phi by r, width, tokens or budget, almost without the law, beside the joint fit.

Runs of equal tokens need no law at all: r = 1 runs of three widths or more give a curve of the loss over the size. In a
grid of equal budgets, a looped run is set beside the r = 1 run of its width. The exit status is 1 if matching
contradicts the joint fit.
"""

from __future__ import annotations

import argparse

from fitting.commands import common
from fitting.errors import FitError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting match`."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUNS", help="run records, folders, CSV files, or published"
    )
    common.add_run_options(parser, with_and_without=False)
    common.add_grid_option(parser)
    text = "RUNS are planned, without losses: only say how well phi will be known"
    parser.add_argument("--planned", action="store_true", help=text)
    text = "with --planned: runs whose fit and scatter are taken for the truth (default: published)"
    parser.add_argument("--like", metavar="RUNS", help=text)
    common.add_search_options(parser, starts=200, resamples=None)
    common.add_output_options(parser, report=False)


def run(options: argparse.Namespace) -> int:
    """Match and print. Raises `FitError` and `RecordError` for bad input."""
    from fitting.laws import JointLaw
    from fitting.report.matching_sections import matching_sections
    from fitting.report.sections import left_out_sections
    from fitting.studies.design import law_for
    from fitting.studies.matching import match

    if options.planned:
        return _planned(options)
    if options.like is not None:
        raise FitError("--like is for planned runs. Add --planned, or leave it out")
    runs, before = common.select(common.load(options.runs, options.count, common.reading(options)), options)
    law = law_for(runs, JointLaw(split=common.split_of(options, before)))
    search = {name: getattr(options, name) for name in ("starts", "seed", "workers")}
    found = match(runs, law, simulations=options.grids, progress=common.progress(options), **search)
    numbers = found.to_dict() | {"excluded": runs.excluded, "mixed": runs.mixed}
    common.show(options, numbers, [*matching_sections(found), *left_out_sections(runs)])
    return common.verdict(found.doubts)


def _planned(options: argparse.Namespace) -> int:
    from fitting.estimation.diagnostics import scatter
    from fitting.estimation.fits import fit
    from fitting.estimation.noise import Noise
    from fitting.laws import JointLaw
    from fitting.report.matching_sections import expected_section
    from fitting.studies.matching import expected

    how = common.reading(options)
    design, _ = common.select(common.load(options.runs, options.count, how, with_loss=False), options)
    like = common.load([options.like or "published"], options.count, how)
    law = JointLaw(split=common.split_of(options, design, like))
    truth = fit(like, law, starts=options.starts, seed=options.seed, workers=options.workers)
    seen = scatter(truth.log_residuals, like.cell, len(truth.theta))
    found = expected(design, law, truth.parameters, Noise(seen.run, seen.cell))
    common.show(options, {"expected": found, "truth": truth.to_dict()}, [expected_section(found)])
    return common.verdict([] if truth.trusted else [f"the fit of {options.like}: {truth.message}"])
