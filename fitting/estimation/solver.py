"""All starts of all fits as one batch: damped Gauss-Newton steps on the Huber objective, in numpy.

Shapes: S problems (starts, resamples, simulated grids), n runs, P parameters.

A step solves `(Jᵀ V J + damping) step = -Jᵀ psi` with V = 1 where a residual is inside ±delta (the true
curvature) and V = min(1, lambda)·delta/|residual| outside. With lambda = 1 that is iteratively reweighted least
squares, which is safe; as steps succeed lambda falls and the step becomes Newton's. A parameter at a bound whose
gradient points outwards is held.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fitting.estimation.objective import DELTA, huber, psi
from fitting.laws import Inputs, Law

LARGE = 5000
"""Runs from which on the search sees a part of them, and resamples take few steps on all."""
CHUNK = 50
"""Problems of up to `LARGE` runs solved together: few enough for the cache, and a fixed number, so that workers change
no result."""
MAX_ITERATIONS = 400
# After so many iterations, a multi-start keeps this fraction of a group's starts, and at least so many.
STAGES = ((10, 0.4, 60), (10, 0.2, 40), (16, 0.08, 24), (40, 0.04, 12))
_DAMPING = 0.01
_FASTER, _SLOWER = 0.3, 4.0
_CONVERGED = 1e-14
"""A problem is done when the predicted relative decrease is smaller than this."""
_TINY = 1e-300


@dataclass(frozen=True, eq=False)
class Problem:
    """What is minimised, for S problems at once: sum of weights·Huber(log L_pred - log_loss)."""

    law: Law
    x: Inputs
    log_loss: np.ndarray
    """(n,) when all problems share it, else (S, n); the same holds for the weights."""
    weights: np.ndarray
    lower: np.ndarray
    """(P,) or (S, P); the same holds for the upper bound."""
    upper: np.ndarray
    delta: float = DELTA
    """Where Huber's function turns linear."""

    def of_runs(self, chosen: np.ndarray) -> Problem:
        """The same problem for the runs at `chosen`."""
        log_loss, weights = (values[..., chosen] for values in (self.log_loss, self.weights))
        return replace(self, x=self.x.take(chosen), log_loss=log_loss, weights=weights)

    def take(self, chosen: np.ndarray) -> Problem:
        """The problems at `chosen`."""
        names = ("log_loss", "weights", "lower", "upper")
        many = {name: getattr(self, name)[chosen] for name in names if getattr(self, name).ndim == 2}
        return replace(self, **many)


class Solutions(NamedTuple):
    """Where S problems ended: theta and gradient are (S, P), all else (S,)."""

    theta: np.ndarray
    objective: np.ndarray
    gradient: np.ndarray
    predicted: np.ndarray
    """Decrease that the local model still predicts."""
    iterations: np.ndarray

    def take(self, chosen: np.ndarray) -> Solutions:
        """The solutions at `chosen`."""
        return Solutions(*(part[chosen] for part in self))


def workers_available() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def minimise(
    problem: Problem,
    starts: np.ndarray,
    max_iterations: int = MAX_ITERATIONS,
    workers: int | None = None,
    damping: float = 1.0,
) -> Solutions:
    """Minimise S problems from `starts` (S, P). Any number of workers gives the same bits.

    `damping` is that of the first step: less than 1 where the starts are near the solution.
    """
    chunk = max(1, min(CHUNK, CHUNK * LARGE // len(problem.x)))
    slices = [np.arange(i, min(i + chunk, len(starts))) for i in range(0, len(starts), chunk)]

    def solve(part: np.ndarray) -> Solutions:
        return _minimise_chunk(problem.take(part), starts[part], max_iterations, damping)

    with ThreadPoolExecutor(min(workers or workers_available(), len(slices))) as pool:
        parts = list(pool.map(solve, slices))
    return Solutions(*map(np.concatenate, zip(*parts, strict=True)))


@dataclass(frozen=True, eq=False)
class MultiStart:
    """The best solution of each of G groups of starts, and how the other starts fared, (G,) each."""

    best: Solutions
    dropped: np.ndarray
    agreeing: np.ndarray
    """Starts that ended within 1e-6 relative of the best objective."""


def multi_start(
    problem: Problem,
    starts: np.ndarray,
    group: np.ndarray | None = None,
    workers: int | None = None,
    stages: Sequence[tuple[int, float, int]] = STAGES,
) -> MultiStart:
    """Minimise from `starts` (S, P) and keep the best of each group (S,), numbered 0..G-1.

    Hopeless starts are dropped early, by comparison with the others of their group.
    """
    group = np.zeros(len(starts), dtype=int) if group is None else group
    count = int(group.max()) + 1
    alive = np.arange(len(starts))
    theta = starts
    for iterations, fraction, least in stages:
        if len(alive) <= least * count:
            continue
        found = minimise(problem.take(alive), theta, iterations, workers)
        order = np.lexsort((found.objective, group[alive]))
        ranked = group[alive][order]
        place = np.arange(len(order)) - np.searchsorted(ranked, ranked)
        keep = np.maximum(least, np.ceil(fraction * np.bincount(group, minlength=count))).astype(int)
        kept = np.sort(order[place < keep[ranked]])
        alive, theta = alive[kept], found.theta[kept]
    found = minimise(problem.take(alive), theta, MAX_ITERATIONS, workers)
    survivors = group[alive]
    order = np.lexsort((found.objective, survivors))
    best = order[np.searchsorted(survivors[order], np.arange(count))]
    # With noise-free data a fit ends at rounding error: below this, objectives count as equal.
    floor = 1e-20 * problem.log_loss.shape[-1]
    near = found.objective <= found.objective[best][survivors] * (1 + 1e-6) + floor
    dropped = np.bincount(group, minlength=count) - np.bincount(survivors, minlength=count)
    return MultiStart(found.take(best), dropped, np.bincount(survivors[near], minlength=count))


def uniform_starts(law: Law, count: int, rng: np.random.Generator) -> np.ndarray:
    """Starts drawn uniformly from the law's box, (count, P)."""
    low, high = np.asarray(law.bounds, dtype=float).T
    return rng.uniform(low, high, (count, len(low)))


class _State(NamedTuple):
    """The present point of S problems: residuals are (S, n), the Jacobian of log L (S, P, n)."""

    theta: np.ndarray
    residual: np.ndarray
    jacobian: np.ndarray
    objective: np.ndarray


def _evaluate(problem: Problem, theta: np.ndarray) -> _State:
    with np.errstate(all="ignore"):
        log_loss, jacobian = problem.law.log_loss_and_gradient(theta, problem.x)
        residual = log_loss - problem.log_loss
        objective = (problem.weights * huber(residual, problem.delta)).sum(axis=1)
    finite = np.isfinite(objective) & np.isfinite(jacobian).all(axis=(1, 2))
    if not finite.all():
        # The law is not defined there: infinitely bad, with nothing that could enter a linear solve.
        objective = np.where(finite, objective, np.inf)
        residual = np.where(finite[:, None], residual, 0.0)
        jacobian = np.where(finite[:, None, None], jacobian, 0.0)
    return _State(theta, residual, jacobian, objective)


def _step(problem: Problem, state: _State, damping: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step (S, P), projected gradient (S, P) and the decrease that the local model predicts (S,)."""
    size, delta = np.abs(state.residual), problem.delta
    outside = np.minimum(1.0, damping)[:, None] * np.minimum(1.0, delta / np.maximum(size, _TINY))
    curvature = problem.weights * np.where(size <= delta, 1.0, outside)
    gradient = (state.jacobian @ (problem.weights * psi(state.residual, delta))[:, :, None])[:, :, 0]
    matrix = (state.jacobian * curvature[:, None, :]) @ state.jacobian.transpose(0, 2, 1)
    held = (state.theta <= problem.lower) & (gradient > 0)
    held |= (state.theta >= problem.upper) & (gradient < 0)
    held |= problem.lower == problem.upper
    gradient = np.where(held, 0.0, gradient)
    diagonal = np.einsum("spp->sp", matrix).copy()
    diagonal += (_DAMPING * damping)[:, None] * diagonal + 1e-13 * diagonal.max(axis=1, keepdims=True) + _TINY
    index = np.arange(gradient.shape[1])
    matrix[:, index, index] = diagonal
    free = ~held
    matrix *= free[:, :, None] & free[:, None, :]
    matrix[:, index, index] = np.where(held, 1.0, diagonal)
    scale = 1 / np.sqrt(matrix[:, index, index])
    scaled = matrix * scale[:, :, None] * scale[:, None, :]
    step = -np.linalg.solve(scaled, (gradient * scale)[:, :, None])[:, :, 0] * scale
    return step, gradient, -0.5 * (step * gradient).sum(axis=1)


def _minimise_chunk(problem: Problem, starts: np.ndarray, max_iterations: int, first: float) -> Solutions:
    state = _evaluate(problem, np.clip(starts, problem.lower, problem.upper))
    size = len(starts)
    vectors, numbers = np.empty_like(state.theta), np.empty(size)
    final = Solutions(vectors, numbers, vectors.copy(), numbers.copy(), np.empty(size, dtype=int))
    part, active, damping = problem, np.arange(size), np.full(size, first)
    for iteration in range(max_iterations + 1):
        step, gradient, predicted = _step(part, state, damping)
        # Converged; or at rounding error, where no step is measurably better.
        done = (predicted <= _CONVERGED * state.objective) & (damping <= 1.0)
        done |= (predicted <= 4e-16 * state.objective) | (state.objective <= 1e-26 * state.residual.shape[1])
        done |= iteration == max_iterations
        if done.any():
            ended = active[done]
            final.iterations[ended] = iteration
            found = (state.theta, state.objective, gradient, predicted)
            for values, now in zip(final, found, strict=False):
                values[ended] = now[done]
            left = ~done
            if not left.any():
                break
            active, damping, step = active[left], damping[left], step[left]
            state = _State(*(values[left] for values in state))
            part = problem.take(active)
        trial = _evaluate(part, np.clip(state.theta + step, part.lower, part.upper))
        better = trial.objective < state.objective
        damping = np.where(better, np.maximum(damping * _FASTER, 1e-9), damping * _SLOWER)
        state = _State(
            np.where(better[:, None], trial.theta, state.theta),
            np.where(better[:, None], trial.residual, state.residual),
            np.where(better[:, None, None], trial.jacobian, state.jacobian),
            np.where(better, trial.objective, state.objective),
        )
    return final
