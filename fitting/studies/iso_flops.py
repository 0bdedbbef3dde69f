"""phi from a grid of equal budgets: a looped run beside the r = 1 run of its width and budget, a few percent off in
tokens.

Constants of a law take the tokens' difference out of the loss and turn the rest into a size M (`IsoFlops.sizes`); near
M = N_1 little of the law enters. Shapes: S sets of losses at once, n runs, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Runs
from fitting.laws import Inputs, Law

LIMIT = 3.0
"""Simulated phi are cut to the box of the fits, plus and minus this."""


@dataclass(frozen=True, eq=False)
class IsoFlops:
    """Looped runs `pairs` (P,), and in `partners` (P, n) how much each run of r = 1 counts in a pair's other side."""

    x: Inputs
    pairs: np.ndarray
    partners: np.ndarray

    @classmethod
    def of(cls, runs: Runs, law: Law) -> IsoFlops | None:
        """The pairs of runs with a nominal budget, counted as the law counts; None without any."""
        same = (runs.d_model[:, None] == runs.d_model) & (runs.flops_budget[:, None] == runs.flops_budget)
        same &= (runs.r[:, None] > 1) & (runs.r == 1)
        pairs = np.flatnonzero(same.any(axis=1))
        if not len(pairs):
            return None
        return cls(law.inputs(runs), pairs, same[pairs] / same[pairs].sum(axis=1, keepdims=True))

    def sizes(self, loss: np.ndarray, constants: np.ndarray) -> np.ndarray:
        """M (S, P) of losses (S, n) in nats: the r = 1 size with the pair's loss at the tokens of its r = 1 run.

        L' = L_r - B(D_r^-beta - D_1^-beta), M = [N_1^-alpha + (L' - L_1)/A]^(-1/alpha), with (A, alpha, B, beta) the
        first of the constants (S, 4 or more); infinite where the loss is below what any size reaches.
        """
        a, alpha, b, beta = (constants[:, i : i + 1] for i in range(4))
        tokens = self.x.tokens[self.pairs] ** -beta - (self.partners @ self.x.tokens) ** -beta
        above = loss[:, self.pairs] - b * tokens - loss @ self.partners.T
        term = self.n_at_r1**-alpha + above / a
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return np.asarray(np.where(term > 0, np.abs(term) ** (-1 / alpha), np.inf))

    @property
    def n_at_r1(self) -> np.ndarray:
        """N_1 (P,): the counted n_once + n_rec of the r = 1 runs."""
        return np.asarray(self.partners @ self.x.n_total)

    def phi(self, loss: np.ndarray, constants: np.ndarray) -> np.ndarray:
        """phi (S, P): minus infinity where M <= N_once."""
        once, rec, r = (column[self.pairs] for column in (self.x.n_once, self.x.n_rec, self.x.r))
        beyond = self.sizes(loss, constants) - once
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(np.where(beyond <= 0, 0.0, beyond) / rec) / np.log(r))
