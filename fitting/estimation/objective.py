"""The objective of the paper's fits: the sum over runs of Huber(log L_pred - log L) with delta = 1e-3.

It is not the mean: solvers with absolute tolerances would stop n times as early on a mean.
"""

from __future__ import annotations

import math

import numpy as np

DELTA = 1e-3
"""Where Huber's function turns linear, in log-loss (about 0.0025 nats at L = 2.5)."""


def huber(residual: np.ndarray) -> np.ndarray:
    """Huber function of log-residuals, any shape: x²/2 inside ±DELTA, DELTA·(|x| - DELTA/2) outside."""
    size = np.abs(residual)
    return np.where(size <= DELTA, 0.5 * residual * residual, DELTA * (size - 0.5 * DELTA))


def psi(residual: np.ndarray) -> np.ndarray:
    """The Huber function's derivative: the residual clipped to ±DELTA."""
    return np.clip(residual, -DELTA, DELTA)


def robust_scale(residual: np.ndarray) -> float:
    """Standard deviation of the bulk: 1.4826 times the median absolute deviation."""
    return 1.4826 * float(np.median(np.abs(residual - np.median(residual))))


def normal_psi_moments(sigma: float) -> tuple[float, float]:
    """(E[psi'], E[psi²]) for residuals N(0, sigma²), in closed form."""
    z = DELTA / sigma
    inside = math.erf(z / math.sqrt(2))
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return inside, sigma * sigma * (inside - 2 * z * density) + DELTA * DELTA * (1 - inside)
