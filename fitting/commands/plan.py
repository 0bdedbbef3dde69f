"""How well a planned grid would determine phi (or delta phi), and which added run helps most per FLOP.

DESIGN has the columns r, size or d_model, flops_budget, flops_per_token and tokens; no losses are needed. The truth is
taken from a fit of --like (the shipped grid by default), and so is noise that --run-noise or --cell-noise leave out.
With --target, DESIGN is a menu, and the cheapest of its runs are chosen whose interval of phi is that narrow.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fitting.commands import common
from fitting.data.plain import plain
from fitting.errors import FitError

if TYPE_CHECKING:
    from fitting.data.runs import Runs
    from fitting.estimation.results import FitResult
    from fitting.laws import JointLaw
    from fitting.studies.planner import Noise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting plan`."""
    parser.add_argument("design", nargs="+", metavar="DESIGN", help="CSV files, run records, or published")
    common.add_run_options(parser, with_and_without=False)
    truth = "runs whose fit (with --starts) is taken as the truth"
    parser.add_argument("--like", default="published", metavar="RUNS", help=truth)
    of_run, of_cell = "log-loss noise of a run", "log-loss offset shared by a cell"
    parser.add_argument("--run-noise", type=float, help=f"{of_run} (default: that of --like)")
    parser.add_argument("--cell-noise", type=float, help=f"{of_cell} (default: that of --like)")
    parser.add_argument("--delta-phi", action="store_true", help="plan a study: r>1 runs beside a baseline")
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="simulate N grids as well")
    parser.add_argument("--candidates", type=int, default=5, help="added runs to list (default: 5)")
    text = "choose from DESIGN the cheapest runs whose quoted interval of phi has this half-width"
    parser.add_argument("--target", type=float, metavar="X", help=text)
    parser.add_argument(
        "--runs", nargs="+", default=[], metavar="RUNS", help="with --target: runs that are there"
    )
    text = "with --target: how often a run of DESIGN may be repeated (default: 3)"
    parser.add_argument("--seeds", type=int, default=3, help=text)
    common.add_search_options(parser, starts=200, resamples=None)
    common.add_output_options(parser, report=False)


def run(options: argparse.Namespace) -> int:
    """Plan and print. Raises `FitError` and `RecordError` for bad input."""
    from fitting.estimation.fits import fit
    from fitting.laws import JointLaw
    from fitting.report.sections import left_out_sections
    from fitting.report.study_sections import plan_sections
    from fitting.studies.planner import plan

    if options.target is None and options.runs:
        raise FitError("--runs are what --target adds to. Give --target, or leave them out")
    if options.target is not None and (options.delta_phi or options.simulate):
        raise FitError("--target is for phi, and simulates by itself. Leave --delta-phi and --simulate out")
    how = common.reading(options)
    design, _ = common.select(common.load(options.design, options.count, how, with_loss=False), options)
    like = common.load([options.like], options.count, how)
    law = JointLaw(split=common.split_of(options, design, like))
    progress = common.progress(options)
    progress(f"fitting {options.like} for the assumed truth")
    search = {"seed": options.seed, "workers": options.workers}
    truth = fit(like, law, starts=options.starts, **search)
    noise = _noise(options, like, truth)
    doubts = [] if truth.trusted else [f"the fit of {options.like}: {truth.message}"]
    if options.target is not None:
        return _design(options, design, law, truth, noise, doubts)
    asked = {name: getattr(options, name) for name in ("simulate", "candidates")}
    study = options.delta_phi
    found = plan(design, law, truth.parameters, noise, study=study, progress=progress, **asked, **search)
    numbers = found.to_dict() | {"truth": truth.to_dict(), "excluded": design.excluded}
    common.show(options, numbers, [*plan_sections(found), *left_out_sections(design)])
    if not found.trusted:
        doubts.append(f"the design: condition number {found.condition:.1e}, phi is hardly identified")
    return common.verdict(doubts)


def _noise(options: argparse.Namespace, like: Runs, truth: FitResult) -> Noise:
    """The noise as given, else the scatter of the runs and cells of --like about their fit."""
    from fitting.estimation.diagnostics import scatter
    from fitting.studies.planner import Noise

    run, cell = options.run_noise, options.cell_noise
    if run is None or cell is None:
        seen = scatter(truth.log_residuals, like.cell, len(truth.theta))
        run, cell = seen.run if run is None else run, seen.cell if cell is None else cell
    return Noise(run, cell)


def _design(
    options: argparse.Namespace, menu: Runs, law: JointLaw, truth: FitResult, noise: Noise, doubts: list[str]
) -> int:
    """Choose runs of the menu and print them. Raises `FitError`."""
    from fitting.report.sections import left_out_sections
    from fitting.report.study_sections import design_sections
    from fitting.studies.design import design

    existing = common.load(options.runs, options.count, common.reading(options)) if options.runs else None
    asked = {name: getattr(options, name) for name in ("target", "seeds", "seed", "workers")}
    progress = common.progress(options)
    found = design(menu, law, truth.parameters, noise, existing=existing, progress=progress, **asked)
    numbers = {**plain(found), "truth": truth.to_dict(), "excluded": menu.excluded}
    common.show(options, numbers, [*design_sections(found), *left_out_sections(menu)])
    if not found.reached:
        doubts.append(
            f"the design found gives {found.half_width:.3f}, not {found.target:g}. Give a wider menu"
        )
    return common.verdict(doubts)
