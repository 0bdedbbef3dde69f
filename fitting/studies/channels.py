"""Where a loss difference between matched runs comes from, exact because the law is additive.

Two runs of one (r, size, C), arm 0 the baseline and arm 1 the study, with phi0 and phi1 and shared A,
alpha, B, beta:

    token       B·(D1^-beta - D0^-beta)                  more or fewer tokens for the same FLOPs
    parameters  A·(M1(phi0)^-alpha - M0(phi0)^-alpha)    more or fewer parameters, at the baseline's phi
    capacity    A·(M1(phi1)^-alpha - M1(phi0)^-alpha)    what a recurrence is worth: the change of phi
    unexplained (L1 - L0) - their sum                    everything else; always printed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fitting.errors import FitError
from fitting.laws.laws import Inputs


@dataclass(frozen=True)
class Channels:
    """The four channels and the difference of one matched pair, in nats."""

    r: float
    d_model: float
    flops: float
    difference: float
    token: float
    parameters: float
    capacity: float
    unexplained: float


def matched_pairs(
    arms: np.ndarray, r: np.ndarray, d_model: np.ndarray, budget: np.ndarray
) -> list[tuple[int, int]]:
    """Indices (baseline, study) of runs with equal r, width and budget; r = 1 has no study arm of its own."""
    keys = list(zip(r.tolist(), d_model.tolist(), budget.tolist(), strict=True))
    base = {key: i for i, key in enumerate(keys) if arms[i] == 0}
    return [(base[key], i) for i, key in enumerate(keys) if arms[i] == 1 and key[0] > 1 and key in base]


def channels(
    pairs: list[tuple[int, int]],
    x: Inputs,
    loss: np.ndarray,
    d_model: np.ndarray,
    budget: np.ndarray,
    law: Mapping[str, float],
    phi: tuple[float, float],
) -> list[Channels]:
    """The channels of every matched pair; `law` holds A, alpha, B, beta, `phi` is (phi0, phi1)."""
    if not pairs:
        raise FitError(
            "No run of the study matches a baseline run in r, d_model and budget, so channels are empty"
        )
    first, second = (np.array(side) for side in zip(*pairs, strict=True))

    def size_term(i: np.ndarray, exponent: float) -> np.ndarray:
        effective = x.n_once[i] + x.r[i] ** exponent * x.n_rec[i]
        return np.asarray(law["A"] * effective ** -law["alpha"])

    token = law["B"] * (x.tokens[second] ** -law["beta"] - x.tokens[first] ** -law["beta"])
    parameters = size_term(second, phi[0]) - size_term(first, phi[0])
    capacity = size_term(second, phi[1]) - size_term(second, phi[0])
    difference = loss[second] - loss[first]
    unexplained = difference - (token + parameters + capacity)
    columns = (
        x.r[first],
        d_model[first],
        budget[first],
        difference,
        token,
        parameters,
        capacity,
        unexplained,
    )
    return [Channels(*map(float, row)) for row in zip(*columns, strict=True)]
