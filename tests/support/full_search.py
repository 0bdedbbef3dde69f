"""A full search for every resample: the yardstick for the cheap refits of the bootstrap."""

import numpy as np

from fitting.estimation.solver import MultiStart, Problem, multi_start, uniform_starts
from fitting.laws import Inputs, Law


def refit_fully(
    law: Law,
    x: Inputs,
    log_loss: np.ndarray,
    weights: np.ndarray,
    starts: int,
    seed: int,
    workers: int | None = None,
) -> MultiStart:
    """Refit R weighted copies (R, n) of the data, each from `starts` uniform starts; `log_loss` is (n,) or (R, n)."""
    bounds = np.asarray(law.bounds, dtype=float)
    count = len(weights)
    group = np.repeat(np.arange(count), starts)
    data = log_loss if log_loss.ndim == 1 else log_loss[group]
    problem = Problem(law, x, data, weights[group], bounds[:, 0], bounds[:, 1])
    points = np.tile(uniform_starts(law, starts, np.random.default_rng(seed)), (count, 1))
    return multi_start(problem, points, group, workers)
