"""How well a planned grid would determine phi (or delta phi), and which added run helps most per FLOP.

DESIGN has the columns r, size or d_model, flops_budget, flops_per_token and tokens; no losses are needed. The truth is
taken from a fit of --like (the shipped grid by default), the noise from --run-noise and --cell-noise.
"""

from __future__ import annotations

import argparse

from fitting.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting plan`."""
    parser.add_argument("design", nargs="+", metavar="DESIGN", help="CSV files or run records, or published")
    common.add_run_options(parser, runs=False, with_and_without=False)
    parser.add_argument(
        "--like", default="published", metavar="RUNS", help="runs whose fit is taken as the truth"
    )
    parser.add_argument("--split", default="paper", help="where the injection is counted (default: paper)")
    parser.add_argument(
        "--run-noise", type=float, default=0.003, help="log-loss noise of a run (default: 0.003)"
    )
    parser.add_argument(
        "--cell-noise", type=float, default=0.0026, help="log-loss offset shared by a cell (default: 0.0026)"
    )
    parser.add_argument(
        "--delta-phi", action="store_true", help="plan a study: its r>1 runs beside the baseline's"
    )
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="simulate N grids as well")
    parser.add_argument("--candidates", type=int, default=5, help="added runs to list (default: 5)")
    parser.add_argument("--starts", type=int, default=200, help="starts of the fit of --like (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the fit and the simulation (default: 0)")
    parser.add_argument("--workers", type=int, help="threads (default: all cores)")
    common.add_output_options(parser, report=False)


def run(options: argparse.Namespace) -> int:
    """Plan and print. Raises `FitError` and `RecordError` for bad input."""
    from fitting.data.splits import split_named
    from fitting.estimation.fits import fit
    from fitting.laws import JointLaw
    from fitting.report.sections import left_out_sections
    from fitting.report.study_sections import plan_sections
    from fitting.studies.planner import Noise, plan

    noise = Noise(options.run_noise, options.cell_noise)
    law = JointLaw(split=split_named(options.split))
    design, _ = common.select(common.load(options.design, with_loss=False), options)
    progress = common.progress(options)
    progress(f"fitting {options.like} for the assumed truth")
    like = common.load([options.like])
    truth = fit(like, law, starts=options.starts, seed=options.seed, workers=options.workers)
    found = plan(
        design,
        law,
        truth.parameters,
        noise,
        study=options.delta_phi,
        simulate=options.simulate,
        candidates=options.candidates,
        seed=options.seed,
        workers=options.workers,
        progress=progress,
    )
    if options.json:
        common.print_json(found.to_dict() | {"truth": truth.to_dict(), "excluded": design.excluded})
    else:
        common.print_sections([*plan_sections(found), *left_out_sections(design.excluded)])
    doubts = [] if truth.trusted else [f"the fit of {options.like}: {truth.message}"]
    if not found.trusted:
        doubts.append(f"the design: condition number {found.condition:.1e}, phi is hardly identified")
    return common.verdict(doubts)
