"""Fit the shipped grid of the paper and print every value beside the published one.

--bootstrap N also gives the intervals under each split.
"""

from __future__ import annotations

import argparse

from fitting.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting published`."""
    common.add_search_options(parser, starts=100, resamples=0)
    common.add_output_options(parser, report=False)


def run(options: argparse.Namespace) -> int:
    """Fit the grid and print the comparison."""
    from fitting.published import load_grid, reference
    from fitting.report.study_sections import replication_sections
    from fitting.studies.paper import replicate

    found = replicate(
        load_grid(),
        starts=options.starts,
        seed=options.seed,
        resamples=options.resamples,
        workers=options.workers,
        progress=common.progress(options),
    )
    paper = reference()
    common.show(options, {"fitted": found, "published": paper}, replication_sections(found, paper))
    fits = [*found.chinchilla.values(), *(row.fit for row in found.joint)]
    return common.verdict(f"{fit.law}, {fit.split}: {fit.message}" for fit in fits if fit.status != "ok")
