"""How well a planned grid would determine phi (or delta phi), and which added run helps most per FLOP.

DESIGN has the columns r, size or d_model, flops_budget, flops_per_token and tokens; no losses are needed. The truth is
taken from a fit of --like (the shipped grid by default), and the noise from --run-noise and --cell-noise.
"""

from __future__ import annotations

import argparse

from fitting.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting plan`."""
    parser.add_argument("design", nargs="+", metavar="DESIGN", help="CSV files, run records, or published")
    common.add_run_options(parser, with_and_without=False)
    truth = "runs whose fit (with --starts) is taken as the truth"
    parser.add_argument("--like", default="published", metavar="RUNS", help=truth)
    of_run, of_cell = "log-loss noise of a run", "log-loss offset shared by a cell"
    parser.add_argument("--run-noise", type=float, default=0.003, help=f"{of_run} (default: 0.003)")
    parser.add_argument("--cell-noise", type=float, default=0.0026, help=f"{of_cell} (default: 0.0026)")
    parser.add_argument("--delta-phi", action="store_true", help="plan a study: r>1 runs beside a baseline")
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="simulate N grids as well")
    parser.add_argument("--candidates", type=int, default=5, help="added runs to list (default: 5)")
    common.add_search_options(parser, starts=200, resamples=None)
    common.add_output_options(parser, report=False)


def run(options: argparse.Namespace) -> int:
    """Plan and print. Raises `FitError` and `RecordError` for bad input."""
    from fitting.estimation.fits import fit
    from fitting.laws import JointLaw
    from fitting.report.sections import left_out_sections
    from fitting.report.study_sections import plan_sections
    from fitting.studies.planner import Noise, plan

    noise = Noise(options.run_noise, options.cell_noise)
    design, _ = common.select(common.load(options.design, options.count, with_loss=False), options)
    like = common.load([options.like], options.count)
    law = JointLaw(split=common.split_of(options, design, like))
    progress = common.progress(options)
    progress(f"fitting {options.like} for the assumed truth")
    search = {"seed": options.seed, "workers": options.workers}
    truth = fit(like, law, starts=options.starts, **search)
    asked = {name: getattr(options, name) for name in ("simulate", "candidates")}
    study = options.delta_phi
    found = plan(design, law, truth.parameters, noise, study=study, progress=progress, **asked, **search)
    numbers = found.to_dict() | {"truth": truth.to_dict(), "excluded": design.excluded}
    common.show(options, numbers, [*plan_sections(found), *left_out_sections(design.excluded)])
    doubts = [] if truth.trusted else [f"the fit of {options.like}: {truth.message}"]
    if not found.trusted:
        doubts.append(f"the design: condition number {found.condition:.1e}, phi is hardly identified")
    return common.verdict(doubts)
