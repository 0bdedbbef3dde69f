"""Claims with an error rate: how often a law's gain over a simpler one would be as large if the simpler one were true.

AICc takes residuals as independent, and finds gains above 4 in many times the nominal share of grids. Here both laws
are fitted again to grids drawn from the simpler one, with the noise of runs and cells that it leaves in the residuals.
Shapes: n runs, P parameters, K laws, R simulated grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fitting.errors import FitError
from fitting.estimation.noise import Noise, estimated
from fitting.estimation.objective import DELTA, huber
from fitting.estimation.resampling import refit
from fitting.laws import Inputs, Law

LEVEL = 0.05
"""A verdict needs a smaller share of simulated grids than this."""
FEWEST_GRIDS = 20
"""With fewer, no share can be that small."""
_ROUNDING = 1e-22


class Fitted(NamedTuple):
    """A law and its best coordinates (P,) on some runs, and where the objective's Huber function turns linear."""

    law: Law
    theta: np.ndarray
    delta: float = DELTA


@dataclass(frozen=True)
class Claim:
    """That runs prefer one law to a simpler one: `gain` is log(Q simpler / Q richer), Q the objective.

    `share` is that of grids drawn from the simpler law in which the gain is as large; the runs count as one.
    """

    simpler: str
    richer: str
    gain: float
    share: float
    grids: int
    noise: Noise
    """Of those grids: what the simpler law leaves in the log-losses."""

    @property
    def holds(self) -> bool:
        """Whether the share is below 5%."""
        return self.share < LEVEL


def check_grids(grids: int) -> None:
    """Raise `FitError` where so many grids, if any, are too few for a verdict."""
    if 0 < grids < FEWEST_GRIDS:
        raise FitError(
            f"{grids} simulated grids give no verdict at the level of {LEVEL:.0%}. Ask for at least {FEWEST_GRIDS}, or "
            "for 0 and the rule of AICc, whose error rate is not known"
        )


def noise_left(fitted: Fitted, x: Inputs, log_loss: np.ndarray, cell: np.ndarray) -> Noise:
    """The noise of runs and cells (n,) in the residuals of a fit to `log_loss` (n,)."""
    predicted, jacobian = (part[0] for part in fitted.law.log_loss_and_gradient(fitted.theta[None], x))
    return estimated(log_loss - predicted, jacobian, cell)


def gain(simpler: np.ndarray, richer: np.ndarray) -> np.ndarray:
    """log(Q simpler / Q richer) of objectives of any shape; of two that are rounding errors, 0."""
    return np.asarray(np.log(np.maximum(simpler, _ROUNDING) / np.maximum(richer, _ROUNDING)))


def objectives(
    law: Law, theta: np.ndarray, x: Inputs, log_loss: np.ndarray, delta: float = DELTA
) -> np.ndarray:
    """The objective (R,) of theta (R, P) on log_loss (R, n) or (n,)."""
    return np.asarray(huber(law.log_loss_and_gradient(theta, x)[0] - log_loss, delta).sum(axis=1))


def simulated_gains(
    simpler: Fitted,
    richer: Sequence[Fitted],
    x: Inputs,
    cell: np.ndarray,
    noise: Noise,
    grids: int,
    seed: int,
    workers: int | None = None,
) -> np.ndarray:
    """log(Q simpler / Q richer), (K, R), on grids drawn from the simpler law with `noise` over cells (n,).

    A refit starts from the law's coordinates on the runs alone: a test shows that more starts find the same.
    """
    drawn = noise.draw(cell, grids, np.random.default_rng(seed))
    observed = simpler.law.log_loss_and_gradient(simpler.theta[None], x)[0] + drawn
    weights = np.ones(observed.shape)

    def best(one: Fitted) -> np.ndarray:
        theta = refit(one.law, x, observed, one.theta, weights, seed, workers, one.delta, perturbed=0)
        return objectives(one.law, theta, x, observed, one.delta)

    lowest = best(simpler)
    return np.array([gain(lowest, best(one)) for one in richer])


def share(observed: float, simulated: np.ndarray) -> float:
    """Share of gains (R,) that are as large as the observed one, which counts as one of them."""
    return float((1 + (simulated >= observed).sum()) / (1 + len(simulated)))
