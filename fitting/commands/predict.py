"""What a fitted joint law says about budgets: size, tokens, loss with its prediction interval, and the best
r.

With --equivalent N also the looped models as wide as an r=1 model of N parameters, and what they are worth.
"""

from __future__ import annotations

import argparse

from fitting.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting predict`."""
    common.add_run_options(parser)
    parser.add_argument(
        "--budget", type=float, action="append", default=[], metavar="C", help="training FLOPs"
    )
    parser.add_argument(
        "--inference-cap", type=float, metavar="F", help="largest forward FLOPs per token that is allowed"
    )
    parser.add_argument("--equivalent", type=float, metavar="N", help="parameters of an r=1 model")
    common.add_law_options(parser)
    common.add_search_options(parser)
    common.add_output_options(parser, report=False)


def run(options: argparse.Namespace) -> int:
    """Fit, predict, print. Raises `FitError` and `RecordError` for bad input."""
    from fitting.errors import FitError
    from fitting.estimation.fits import fit
    from fitting.report.sections import with_them_text
    from fitting.report.tables import significant, table
    from fitting.studies.analysis import parameter_of_interest, with_excluded_runs
    from fitting.studies.prediction import draw, equivalents, forecast

    if not options.budget and options.equivalent is None:
        raise FitError("Nothing to predict. Give --budget C (more than once if you like) or --equivalent N")
    if options.inference_cap is not None and not options.inference_cap > 0:
        raise FitError(f"--inference-cap {options.inference_cap} must be positive")
    runs, chosen = common.select(common.load(options.runs), options)
    progress = common.progress(options)
    progress("fitting")
    result = fit(
        runs, common.law_of(options), starts=options.starts, seed=options.seed, workers=options.workers
    )
    found: dict = {"fit": result.to_dict(), "forecasts": [], "equivalents": []}
    name = parameter_of_interest(result)
    texts = [
        f"{result.law.name}, split {result.law.split.name}, {len(runs)} runs: {name} = {result[name]:.4f}. "
        f"Status: {result.status.value} ({result.message})."
    ]
    if len(chosen) != len(runs):
        search = {"starts": options.starts, "seed": options.seed, "workers": options.workers}
        found["with_excluded_runs"] = with_excluded_runs(chosen, common.law_of(options), search)
        text = with_them_text(found["with_excluded_runs"], name)
        texts.append(f"{name} = {result[name]:.4f} without the runs of --exclude, {text}.")
    if options.budget:
        progress(f"bootstrap, {options.bootstrap} resamples")
        drawn = draw(runs, result, options.bootstrap, options.seed, options.workers)
        for budget in options.budget:
            forecasted = forecast(runs, result, budget, drawn, options.inference_cap)
            found["forecasts"].append(forecasted.to_dict())
            texts.append(str(forecasted))
    if options.equivalent is not None:
        rows = equivalents(runs, result, options.equivalent)
        found["equivalents"] = [vars(row) for row in rows]
        cells = [[f"{e.r:g}", significant(e.unique, 4), significant(e.effective, 4), e.note] for e in rows]
        head = (
            f"As wide as an r=1 model of {options.equivalent:.4g} parameters (d_model {rows[0].d_model:.0f}):"
        )
        texts.append(
            "\n".join(
                [head, table(["r", "unique", f"effective, split {result.law.split.name}", "note"], cells)]
            )
        )
    if options.json:
        common.print_json(found)
    else:
        print("\n\n".join(texts))
        common.print_excluded(runs)
    return common.verdict([] if result.trusted else [result.message])
