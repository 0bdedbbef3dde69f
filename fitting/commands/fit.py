"""Fit a scaling law to runs, with intervals, diagnostics and allocation.

Exit status: 0; 1 if the fit is not to be trusted (the reason goes to stderr); 2 for bad input.
"""

from __future__ import annotations

import argparse

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
    from fitting.analysis import Settings, analyse
    from fitting.provenance import describe, source_files
    from fitting.report import check_folder, write_report
    from fitting.sections import sections

    if options.report:
        check_folder(options.report, options.overwrite)
    kept, chosen = common.select(common.load(options.runs), options)
    settings = Settings(
        starts=options.starts,
        seed=options.seed,
        resamples=options.bootstrap,
        rivals=not options.no_rivals,
        all_splits=options.all_splits,
        workers=options.workers,
    )
    progress = common.progress(options)
    analysis = analyse(kept, common.law_of(options), settings, without_exclusions=chosen, progress=progress)
    choices = {name: getattr(options, name) for name in ("where", "exclude", "law", "phi", "split")}
    files = source_files(str(source) for source in chosen.source)
    analysis["provenance"] = describe(options.runs, files, choices)
    if options.json:
        common.print_json(analysis)
    else:
        print("\n\n".join(section.text() for section in sections(analysis)))
    if options.report:
        for path in write_report(analysis, options.report, progress):
            progress(f"wrote {path}")
    fit = analysis["fit"]
    doubts = [] if fit["status"] == "ok" else [fit["message"]]
    others = [split for split in analysis.get("splits", ()) if split["split"] != fit["split"]]
    doubts += [
        f"split {split['split']}: {split['message']}"
        for split in others
        if split["status"] not in ("ok", "undefined")
    ]
    return common.verdict(doubts)
