"""Refits of resampled runs in one batch, and the intervals made of them.

Shapes: R resamples, G blocks, n runs, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.objective import DELTA, psi
from fitting.estimation.profile import profile_interval
from fitting.estimation.results import FitResult, Interval, Intervals
from fitting.estimation.solver import LARGE, Problem, minimise, multi_start
from fitting.laws import Inputs, Law

FEWEST_RESAMPLES = 20
_PERTURBED = 3
_SPREAD = 0.03
# The starts of a resample meet within a few steps: only the better ones go on.
_STAGES = ((8, 0.0, 2), (10, 0.0, 1))
_MANY_BLOCKS = 1000
# Steps on all runs from the solution for a part of them: what is left is a hundredth of an interval.
_STEPS_ON_ALL = 2
# Weights held at once.
_AT_ONCE = 10_000_000


@dataclass(frozen=True, eq=False)
class Resampled:
    """Refits of R resamples: theta (R, P) in solver coordinates, and block counts (R, G)."""

    law: Law
    theta: np.ndarray
    counts: np.ndarray

    def values(self, name: str) -> np.ndarray:
        """Reported values (R,) of one parameter."""
        return self.law.to_reported(self.theta)[:, self.law.param_names.index(name)]


def draw_counts(blocks: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """How often each of G blocks is in each of R resamples of G draws with replacement, (R, G)."""
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
    delta: float = DELTA,
    perturbed: int = _PERTURBED,
) -> np.ndarray:
    """Refit R weighted copies of the data from `theta` (P,) and `perturbed` starts around it; returns (R, P).

    `weights` is (R, n), `log_loss` (n,) or (R, n). Tests check that full searches find the same.
    """
    low, high = np.asarray(law.bounds, dtype=float).T
    moves = np.random.default_rng(seed).standard_normal((perturbed, len(theta)))
    starts = np.clip(np.vstack([theta, theta + _SPREAD * (high - low) * moves]), low, high)
    repeated = np.repeat(np.arange(len(weights)), len(starts))
    data = log_loss if log_loss.ndim == 1 else log_loss[repeated]
    problem = Problem(law, x, data, weights[repeated], low, high, delta)
    return multi_start(problem, np.tile(starts, (len(weights), 1)), repeated, workers, _STAGES).best.theta


def one_step(
    result: FitResult, x: Inputs, log_loss: np.ndarray, blocks: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """theta (R, P) of resamples by one Newton step from the fit, for more runs and blocks than refits can do.

    `blocks` (n,) numbers the block of each run, `counts` (R, G) how often each is drawn. The step is that of the Huber
    objective with the law linear around the fit: residuals beyond delta have no curvature.
    """
    log_predicted, jacobian = (part[0] for part in result.law.log_loss_and_gradient(result.theta[None], x))
    residual = log_predicted - log_loss
    inside = np.abs(residual) <= result.delta
    p, groups = len(result.theta), counts.shape[1]
    gradient = np.stack(
        [np.bincount(blocks, row, groups) for row in jacobian * psi(residual, result.delta)], axis=1
    )
    curvature = np.empty((groups, p, p))
    for i in range(p):
        for j in range(i + 1):
            sums = np.bincount(blocks, jacobian[i] * jacobian[j] * inside, groups)
            curvature[:, i, j] = curvature[:, j, i] = sums
    total = (counts @ curvature.reshape(groups, -1)).reshape(-1, p, p)
    scale = 1 / np.sqrt(np.maximum(np.einsum("rpp->rp", total), 1e-300))
    total = total * scale[:, :, None] * scale[:, None, :] + 1e-12 * np.eye(p)
    step = np.linalg.solve(total, ((counts @ gradient) * scale)[:, :, None])[:, :, 0] * scale
    low, high = np.asarray(result.law.bounds, dtype=float).T
    return np.asarray(np.clip(result.theta - step, low, high))


def refit_many(
    result: FitResult,
    x: Inputs,
    log_loss: np.ndarray,
    blocks: np.ndarray,
    counts: np.ndarray,
    workers: int | None = None,
) -> np.ndarray:
    """theta (R, P) of resamples of more than `LARGE` runs: refits on `LARGE` of them, then two steps on all.

    `blocks` and `counts` are as in `one_step`, good enough for many blocks, of which none moves the fit far. Of
    the paper's 24 cells with offsets beyond delta it makes intervals a sixth too wide.
    """
    if counts.shape[1] > _MANY_BLOCKS:
        return one_step(result, x, log_loss, blocks, counts)
    order = np.random.default_rng(result.seed).permutation(len(log_loss))
    order = order[np.argsort(blocks[order], kind="stable")]
    few = np.sort(order[np.linspace(0, len(order) - 1, LARGE).round().astype(int)])
    law, delta = result.law, result.delta
    weights = counts[:, blocks[few]]
    near = refit(law, x.take(few), log_loss[few], result.theta, weights, result.seed, workers, delta)
    low, high = np.asarray(law.bounds, dtype=float).T
    found, together = [], max(1, _AT_ONCE // len(log_loss))
    for first in range(0, len(counts), together):
        part = slice(first, first + together)
        problem = Problem(law, x, log_loss, counts[part][:, blocks], low, high, delta)
        found.append(minimise(problem, near[part], _STEPS_ON_ALL, workers, damping=1e-3).theta)
    return np.concatenate(found)


def no_bootstrap(blocks: int, parameters: int, resamples: int) -> str | None:
    """Why so many resamples of so many blocks give no interval; None if they give one."""
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
    """Resample whole blocks (n,), numbered 0..G-1, with replacement and refit.

    Raises `FitError` if there are too few resamples, or no more blocks than parameters.
    """
    count = int(blocks.max()) + 1
    reason = no_bootstrap(count, len(result.theta), resamples)
    if reason:
        raise FitError(reason)
    counts = draw_counts(count, resamples, np.random.default_rng(seed))
    if len(log_loss) > LARGE:
        return Resampled(result.law, refit_many(result, x, log_loss, blocks, counts, workers), counts)
    theta = refit(result.law, x, log_loss, result.theta, counts[:, blocks], seed, workers, result.delta)
    return Resampled(result.law, theta, counts)


def percentile_interval(values: np.ndarray, method: str, assumes: str, seed: int) -> Interval:
    """The 2.5 and 97.5 percentiles of resampled values."""
    low, high = map(float, np.percentile(values, (2.5, 97.5)))
    below, above = int((values <= 0).sum()), int((values >= 1).sum())
    return Interval(method, low, high, assumes, len(values), seed, below, above)


def widening(blocks: int, parameters: int) -> float:
    """How much wider than its percentiles a block bootstrap is quoted.

    Fitting p parameters to G blocks makes the spread too small by about (G-p)/G in variance. Where a resample holds no
    more distinct blocks than parameters, (1 - 1/e)·G on average, refits spread too far already and the factor is 1.
    tests/fitting/simulations/intervals.py measures the coverage.
    """
    few = (1 - math.exp(-1)) * blocks <= parameters
    return 1.0 if few else math.sqrt(blocks / (blocks - parameters))


def widened(
    interval: Interval,
    estimate: float,
    blocks: int,
    parameters: int,
    box: tuple[float, float] = (-math.inf, math.inf),
    log: bool = False,
) -> Interval:
    """The interval stretched around the estimate by `widening`, in logarithms if `log`, and cut to the box.

    All numbers are reported values.
    """
    factor = widening(blocks, parameters)
    solver, reported = (math.log, math.exp) if log else (float, float)
    centre, low, high = map(solver, (estimate, interval.low, interval.high))
    low = max(reported(centre - factor * (centre - low)), box[0])
    high = min(reported(centre + factor * (high - centre)), box[1])
    few = factor == 1
    by = "1, since resamples of so few cells are far apart" if few else f"sqrt(G/(G-p)) = {factor:.4f}"
    how = f"widened by {by}, G = {blocks} cells, p = {parameters}"
    return replace(
        interval,
        method="block bootstrap, widened",
        low=low,
        high=high,
        assumes=f"cells are independent; {how}",
        recommended=True,
    )


def reported_range(law: Law, name: str) -> tuple[tuple[float, float], bool]:
    """The ends of a parameter's box in reported values, and whether the solver takes its logarithm."""
    low, high = law.to_reported(np.asarray(law.bounds, dtype=float).T)[:, law.param_names.index(name)]
    return (float(low), float(high)), name in law.log_parameters


def bootstrap(
    runs: Runs,
    result: FitResult,
    *,
    resamples: int = 200,
    seed: int = 0,
    names: Sequence[str] | None = None,
    workers: int | None = None,
) -> FitResult:
    """The result with 95% intervals for its parameters (or those in `names`), the same bits for the same seed.

    They come from a block bootstrap over (budget, architecture) cells as in the paper, the same widened (recommended),
    a run-level bootstrap, and the profile likelihood. Raises `FitError` for too few cells or resamples.
    """
    x = result.law.inputs(runs)
    log_loss = np.log(runs.val_loss)
    by_cell = resample(result, x, log_loss, runs.cell, resamples, seed, workers)
    large = len(runs) > LARGE
    # Of very many runs, hundreds of bins are as good as runs of their own.
    by_run = resample(
        result, x, log_loss, np.arange(len(runs)) % (LARGE if large else len(runs)), resamples, seed, workers
    )
    found: Intervals = {}
    for name in names if names is not None else result.law.param_names:
        assumes = "cells (budget, architecture) are independent"
        block = percentile_interval(by_cell.values(name), "block bootstrap", assumes, seed)
        profile = () if large else (profile_interval(result, x, log_loss, name, workers),)
        found[name] = (
            widened(
                block, result[name], runs.cell_count, len(result.theta), *reported_range(result.law, name)
            ),
            block,
            percentile_interval(by_run.values(name), "run-level bootstrap", "runs are independent", seed),
            *profile,
        )
    return replace(result, intervals={**result.intervals, **found})
