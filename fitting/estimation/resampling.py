"""Refits of resampled runs in one batch, and the intervals made of them.

Shapes: R resamples, G blocks, n runs, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.profile import profile_interval
from fitting.estimation.results import FitResult, Interval
from fitting.estimation.solver import Problem, multi_start
from fitting.laws import Inputs, Law

LEVEL = (2.5, 97.5)
FEWEST_RESAMPLES = 20
_PERTURBED = 3
_SPREAD = 0.03
# The starts of a resample meet within a few steps: only the better ones go on.
_STAGES = ((8, 0.0, 2), (10, 0.0, 1))


@dataclass(frozen=True, eq=False)
class Resampled:
    """Refits of R resamples: theta (R, P) in solver coordinates, and the block counts (R, G) that made them."""

    law: Law
    theta: np.ndarray
    counts: np.ndarray
    seed: int

    def values(self, name: str) -> np.ndarray:
        """Reported values (R,) of one parameter."""
        return np.asarray(self.law.to_reported(self.theta)[:, self.law.param_names.index(name)])


def draw_counts(blocks: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """How often each of G blocks is drawn in each of R resamples of G draws with replacement, (R, G)."""
    drawn = rng.integers(0, blocks, (resamples, blocks))
    counts = np.zeros((resamples, blocks))
    np.add.at(counts, (np.arange(resamples)[:, None], drawn), 1)
    return counts


def refit(
    law: Law,
    x: Inputs,
    log_loss: np.ndarray,
    theta: np.ndarray,
    weights: np.ndarray,
    seed: int,
    workers: int | None = None,
) -> np.ndarray:
    """Refit R weighted copies of the data from `theta` (P,) and starts perturbed around it; returns (R, P).

    `weights` is (R, n); `log_loss` (n,) or (R, n). This is much cheaper than a full search for each resample and gives
    the same wherever the optimum of a resample grows out of that of all data, which the tests check.
    """
    bounds = np.asarray(law.bounds, dtype=float)
    rng = np.random.default_rng(seed)
    width = bounds[:, 1] - bounds[:, 0]
    moves = _SPREAD * width * rng.standard_normal((_PERTURBED, len(theta)))
    starts = np.clip(np.vstack([theta, theta + moves]), bounds[:, 0], bounds[:, 1])
    count, tries = len(weights), len(starts)
    repeated = np.repeat(np.arange(count), tries)
    data = log_loss if log_loss.ndim == 1 else log_loss[repeated]
    problem = Problem(law, x, data, weights[repeated], bounds[:, 0], bounds[:, 1])
    return multi_start(problem, np.tile(starts, (count, 1)), repeated, workers, _STAGES).best.theta


def no_bootstrap(blocks: int, parameters: int, resamples: int) -> str | None:
    """Why so many resamples of so many blocks give no interval for a law of so many parameters, if so."""
    if blocks <= parameters:
        return f"{blocks} blocks cannot carry a bootstrap of {parameters} parameters. Add budgets or architectures"
    if resamples < FEWEST_RESAMPLES:
        return f"{resamples} resamples give no percentiles. Ask for at least {FEWEST_RESAMPLES}; the paper used 200"
    return None


def resample(
    result: FitResult,
    x: Inputs,
    log_loss: np.ndarray,
    blocks: np.ndarray,
    resamples: int,
    seed: int,
    workers: int | None = None,
) -> Resampled:
    """Resample whole blocks (n,) of runs with replacement and refit; `blocks` numbers them 0..G-1.

    Raises `FitError` for fewer blocks than parameters: resamples would then fit anything.
    """
    count = int(blocks.max()) + 1
    reason = no_bootstrap(count, len(result.theta), resamples)
    if reason:
        raise FitError(reason)
    counts = draw_counts(count, resamples, np.random.default_rng(seed))
    theta = refit(result.law, x, log_loss, result.theta, counts[:, blocks], seed, workers)
    return Resampled(result.law, theta, counts, seed)


def percentile_interval(values: np.ndarray, method: str, assumes: str, seed: int) -> Interval:
    """The 2.5 and 97.5 percentiles of resampled values."""
    low, high = np.percentile(values, LEVEL)
    return Interval(
        method,
        float(low),
        float(high),
        assumes,
        resamples=len(values),
        seed=seed,
        at_or_below_zero=int((values <= 0).sum()),
        at_or_above_one=int((values >= 1).sum()),
    )


def widened(interval: Interval, estimate: float, blocks: int, parameters: int, seed: int) -> Interval:
    """The interval stretched around the estimate by sqrt(G/(G-p)).

    A bootstrap of G blocks fits p parameters to each resample, so its residuals, and with them its spread,
    are too small by about (G-p)/G in variance, as in any regression.
    """
    factor = float(np.sqrt(blocks / (blocks - parameters)))
    return Interval(
        "block bootstrap, widened",
        estimate - factor * (estimate - interval.low),
        estimate + factor * (interval.high - estimate),
        f"cells are independent; widened by sqrt(G/(G-p)) = {factor:.4f}, G = {blocks} cells, p = {parameters}",
        resamples=interval.resamples,
        seed=seed,
        at_or_below_zero=interval.at_or_below_zero,
        at_or_above_one=interval.at_or_above_one,
        recommended=True,
    )


def bootstrap(
    runs: Runs,
    result: FitResult,
    *,
    resamples: int = 200,
    seed: int = 0,
    names: Sequence[str] | None = None,
    workers: int | None = None,
) -> FitResult:
    """The result with 95% intervals for its parameters (or those in `names`), four kinds side by side.

    They are a block bootstrap over (budget, architecture) cells as in the paper, the same widened (recommended), a
    run-level bootstrap, and the profile likelihood of the Huber objective. The same seed gives the same bits. Raises
    `FitError` where `no_bootstrap` says why.
    """
    x = result.law.inputs(runs)
    log_loss = np.log(runs.val_loss)
    by_cell = resample(result, x, log_loss, runs.cell, resamples, seed, workers)
    by_run = resample(result, x, log_loss, np.arange(len(runs)), resamples, seed, workers)
    for name in names if names is not None else result.law.param_names:
        block = percentile_interval(
            by_cell.values(name), "block bootstrap", "cells (budget, architecture) are independent", seed
        )
        intervals = (
            widened(block, result[name], runs.cell_count, len(result.theta), seed),
            block,
            percentile_interval(by_run.values(name), "run-level bootstrap", "runs are independent", seed),
            profile_interval(result, x, log_loss, name, workers),
        )
        result = result.with_intervals(name, intervals)
    return result
