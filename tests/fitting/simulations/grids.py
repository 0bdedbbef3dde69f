"""Designs and the noisy grids drawn on them, shared by the scripts here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fitting.data.loading import load_runs
from fitting.data.runs import Runs
from fitting.estimation.fits import fit
from fitting.estimation.results import FitResult
from fitting.laws import JointLaw
from fitting.published import load_grid
from fitting.studies.planner import Noise

NANO = Path(__file__).parents[3] / "results" / "nano_iso_depth"
PAPER_NOISE, NANO_NOISE = Noise(0.003, 0.0026), Noise(0.012, 0.012)


def designs() -> dict[str, tuple[Runs, Noise]]:
    """Name -> runs whose losses do not count, and their noise in log-loss."""
    paper, nano = load_grid(), load_runs(NANO)
    budgets = np.unique(paper.budget)
    ends = np.isin(paper.budget, budgets[[0, -1]])
    three = np.isin(paper.budget, budgets[[0, 2, 5]]) & np.isin(paper.r, (1, 2, 8))
    return {
        "paper, 24 cells": (paper, PAPER_NOISE),
        "nano, 12 cells": (nano, NANO_NOISE),
        "nano, quiet": (nano, PAPER_NOISE),
        "8 cells": (paper.take(ends), PAPER_NOISE),
        "9 cells": (paper.take(three), PAPER_NOISE),
    }


def truth(runs: Runs) -> FitResult:
    """The joint law fitted to the runs: what simulated grids take for the truth."""
    return fit(runs, JointLaw(), starts=100, workers=1)


def drawn(runs: Runs, law: FitResult, noise: Noise, count: int, seed: int) -> Iterator[Runs]:
    """`count` grids of the design `runs` with losses of the law and noise."""
    clean = np.log(runs.val_loss) - law.log_residuals
    for offsets in noise.draw(runs.cell, count, np.random.default_rng(seed)):
        yield runs.with_loss(np.exp(clean + offsets))
