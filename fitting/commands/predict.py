"""What a fitted law says about budgets: size, tokens, loss with prediction interval, and the best r.

--equivalent N also gives the looped models as wide as an r=1 model of N parameters, and what they are worth.
"""

from __future__ import annotations

import argparse

from fitting.commands import common
from fitting.errors import FitError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting predict`."""
    common.add_law_options(parser)
    text = "training FLOPs"
    parser.add_argument("--budget", type=float, action="append", default=[], metavar="C", help=text)
    parser.add_argument("--inference-cap", type=float, metavar="F", help="most forward FLOPs per token")
    parser.add_argument("--equivalent", type=float, metavar="N", help="parameters of an r=1 model")
    common.add_search_options(parser)
    common.add_output_options(parser, report=False)


def run(options: argparse.Namespace) -> int:
    """Fit, predict, print. Raises `FitError` and `RecordError` for bad input."""
    from fitting.estimation.diagnostics import attempt
    from fitting.estimation.fits import fit
    from fitting.report.document import Section, Table
    from fitting.report.sections import left_out_sections, with_them_text
    from fitting.report.study_sections import equivalent_section, forecast_sections
    from fitting.studies.analysis import parameter_of_interest
    from fitting.studies.prediction import draw, equivalents, forecast

    if not options.budget and options.equivalent is None:
        raise FitError("Nothing to predict. Give --budget C (more than once if you like) or --equivalent N")
    if options.inference_cap is not None and not options.inference_cap > 0:
        raise FitError(f"--inference-cap {options.inference_cap} must be positive")
    runs, before = common.select(common.load(options.runs, options.count, common.reading(options)), options)
    progress = common.progress(options)
    progress("fitting")
    law = common.law_of(options, before)
    search = {"starts": options.starts, "seed": options.seed, "workers": options.workers}
    result = fit(runs, law, **search)
    common.check_unit(options, result, runs)
    found: dict = {"fit": result.to_dict(), "forecasts": [], "equivalents": [], "mixed": runs.mixed}
    name, split = parameter_of_interest(result), result.law.split.name
    said: list[str | Table] = [
        f"{result.law.name}, split {split}, {len(runs)} runs: {name} = {result[name]:.4f}. Status: "
        f"{result.status.value} ({result.message})."
    ]
    if len(before) != len(runs):
        with_them = found["with_excluded_runs"] = attempt(before, law, "not defined", search)
        text = with_them_text(with_them, name)
        said.append(f"{name} = {result[name]:.4f} without the runs of --exclude, {text}.")
    sections = [Section("Fit", said)]
    if options.budget:
        progress(f"bootstrap, {options.resamples} resamples")
        drawn = draw(runs, result, options.resamples, options.seed, options.workers)
        for budget in options.budget:
            forecasted = forecast(runs, result, budget, drawn, options.inference_cap)
            found["forecasts"].append(forecasted)
            sections += forecast_sections(forecasted)
    if options.equivalent is not None:
        found["equivalents"] = equivalents(runs, result, options.equivalent)
        sections.append(equivalent_section(options.equivalent, split, found["equivalents"]))
    common.show(options, found, [*sections, *left_out_sections(runs)])
    return common.verdict([] if result.trusted else [result.message])
