"""phi by iso-token matching: which r = 1 size, trained on as many tokens, reaches the loss of a looped run.

L_1(N_eq) = L_r gives phi = ln((N_eq - N_once)/N_rec)/ln r; no law of the loss enters. Shapes: S sets of losses at
once, c cells (runs that differ in the seed alone), P pairs (cells with r > 1 at a token count that has a curve).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.interpolate import PchipInterpolator

from fitting.data.runs import Runs
from fitting.laws import Law

SAME_TOKENS = 0.005
"""Token counts this close in logarithm are one."""
FEWEST_WIDTHS = 3
"""Of r = 1 at a token count: fewer make no curve."""
_POINTS = 64
"""Points of a curve between two of its sizes, where its crossing is looked for before Newton's steps."""
_POWER = -0.25
"""Scatter is taken about quadratics in N^-1/4: close to E + A·N^-alpha for any alpha from .1 to .5."""
_STEP = 1e-5
"""Nats, for derivatives of phi by losses."""


@dataclass(frozen=True, eq=False)
class CellNoise:
    """Variances of log-loss, (S,) each: of a run about its repeats, and of a cell about its curve beyond that."""

    run: np.ndarray
    cell: np.ndarray

    def of_means(self, repeats: np.ndarray) -> np.ndarray:
        """Variance (S, c) of the means of so many `repeats` (c,)."""
        return np.asarray(self.cell[:, None] + self.run[:, None] / repeats)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells at token counts that have a curve, each column (c,); `pairs` (P,) indexes those with r > 1."""

    r: np.ndarray
    d_model: np.ndarray
    tokens: np.ndarray
    group: np.ndarray
    """Number of the token count."""
    n_once: np.ndarray
    n_rec: np.ndarray
    repeats: np.ndarray
    pairs: np.ndarray
    runs: np.ndarray
    """Number (n,) of each run's cell, -1 for runs at token counts without a curve."""

    @classmethod
    def of(cls, runs: Runs, law: Law) -> Cells | None:
        """The cells of `runs`, counted as the law counts; None where no token count has a curve and a loop."""
        x = law.inputs(runs)
        group = token_groups(runs.tokens)
        cell = np.full(len(runs), -1)
        first: list[int] = []
        for number in np.unique(group):
            there = group == number
            alone = np.unique(runs.d_model[there & (runs.r == 1)])
            if len(alone) < FEWEST_WIDTHS or not (runs.r[there] > 1).any():
                continue
            keys = list(zip(runs.r[there].tolist(), runs.d_model[there].tolist(), strict=True))
            for key in sorted(set(keys)):
                members = np.flatnonzero(there)[[k == key for k in keys]]
                cell[members] = len(first)
                first.append(int(members[0]))
        if not first:
            return None
        at, repeats = np.array(first), np.bincount(cell[cell >= 0])
        mean = np.array([np.exp(np.log(runs.tokens[group == group[i]]).mean()) for i in at])
        pairs = np.flatnonzero(runs.r[at] > 1)
        columns = runs.r[at], runs.d_model[at], mean, group[at], x.n_once[at], x.n_rec[at]
        return cls(*columns, repeats, pairs, cell)

    def means(self, values: np.ndarray) -> np.ndarray:
        """Means (S, c) over each cell's repeats of values (S, n) of all runs."""
        inside = self.runs >= 0
        sums = np.zeros((len(self.r), len(values)))
        np.add.at(sums, self.runs[inside], values[:, inside].T)
        return np.asarray(sums.T / self.repeats)

    def sizes(self, loss: np.ndarray) -> np.ndarray:
        """ln N_eq (S, P) from losses (S, c) in nats; NaN for a loss outside of its curve: nothing is extrapolated."""
        found = np.full((len(loss), len(self.pairs)), np.nan)
        for number in np.unique(self.group):
            curve, mine = self.curve(number), self.group[self.pairs] == number
            log_n = np.log(self.n_once + self.n_rec)[curve]
            found[:, mine] = crossing(log_n, loss[:, curve], loss[:, self.pairs[mine]])
        return found

    def curve(self, number: int) -> np.ndarray:
        """Indices of the cells with r = 1 at a token count, smallest first."""
        there = np.flatnonzero((self.group == number) & (self.r == 1))
        return np.asarray(there[np.argsort((self.n_once + self.n_rec)[there])])

    def phi(self, loss: np.ndarray) -> np.ndarray:
        """phi (S, P) from losses (S, c): NaN outside of the curve, minus infinity where N_eq <= N_once."""
        once, rec = self.n_once[self.pairs], self.n_rec[self.pairs]
        beyond = np.exp(self.sizes(loss)) - once
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(np.where(beyond <= 0, 0.0, beyond) / rec) / np.log(self.r[self.pairs]))

    def slopes(self, loss: np.ndarray) -> np.ndarray:
        """Derivative (P, c) of phi by the losses (c,): by each pair's own and by those of its curve."""
        steps = _STEP * np.vstack([np.eye(len(loss)), -np.eye(len(loss))])
        up, down = np.split(self.phi(loss + steps), 2)
        with np.errstate(invalid="ignore"):
            return np.asarray((up - down).T / (2 * _STEP))

    def at_one_phi(self, loss: np.ndarray, phi: float) -> np.ndarray:
        """The losses (c,) with curves made smooth, and those of loops where these have them if phi is one for all.

        Smooth, since grids drawn about them would otherwise hold the noise of these runs as well.
        """
        changed = loss.copy()
        for members in self._lines():
            if self.r[members[0]] == 1:
                basis = self._basis(members)
                changed[members] = basis @ basis.T @ loss[members]
        for number in np.unique(self.group):
            curve, mine = self.curve(number), self.pairs[self.group[self.pairs] == number]
            log_n = np.log(self.n_once + self.n_rec)[curve]
            size = np.log(self.n_once[mine] + self.r[mine] ** phi * self.n_rec[mine])
            # Just inside, so that a derivative has both sides.
            margin = 1e-3 * np.ptp(log_n)
            inside = np.clip(size, log_n[0] + margin, log_n[-1] - margin)
            changed[mine] = PchipInterpolator(log_n, changed[curve])(inside)
        return changed

    @property
    def degrees(self) -> tuple[int, int]:
        """Degrees of freedom of the scatter between repeats, and of that of cells about their curves."""
        lines = sum(max(0, len(members) - 3) for members in self._lines())
        return int((self.repeats - 1).sum()), lines

    def _lines(self) -> list[np.ndarray]:
        keys = list(zip(self.group.tolist(), self.r.tolist(), strict=True))
        return [np.flatnonzero([k == key for k in keys]) for key in dict.fromkeys(keys)]

    def _basis(self, members: np.ndarray) -> np.ndarray:
        """Orthonormal basis of the quadratics in N^-1/4, one column for each of at most three powers."""
        z = (self.n_once + self.n_rec)[members] ** _POWER
        return np.linalg.qr(np.vander((z - z.mean()) / max(np.ptp(z), 1e-300), min(3, len(z))))[0]

    def noise(self, log_means: np.ndarray, within: np.ndarray) -> CellNoise:
        """What the runs say of their noise, from means of log-loss (S, c) and sums of squares about them (S,).

        Curves of r over the width are smooth, so what is left of a quadratic is scatter of cells, of which repeats tell
        the runs' part. Without repeats all of it counts as the runs'.
        """
        repeated, lines = self.degrees
        square = np.zeros(len(log_means))
        for members in self._lines():
            if len(members) > 3:
                basis, y = self._basis(members), log_means[:, members]
                square += ((y - y @ basis @ basis.T) ** 2).sum(axis=1)
        total = square / lines if lines else np.zeros(len(square))
        if not repeated:
            return CellNoise(total * len(self.repeats) / (1 / self.repeats).sum(), np.zeros(len(square)))
        run = within / repeated
        return CellNoise(run, np.maximum(0.0, total - run * (1 / self.repeats).mean()))


def token_groups(tokens: np.ndarray) -> np.ndarray:
    """Number (n,) of the token count of each run; counts within `SAME_TOKENS` of the smallest of a group are one."""
    group, start, number = np.empty(len(tokens), dtype=int), -np.inf, -1
    for i in np.argsort(tokens, kind="stable"):
        if np.log(tokens[i]) > start + SAME_TOKENS:
            start, number = float(np.log(tokens[i])), number + 1
        group[i] = number
    return group


def crossing(x: np.ndarray, y: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Where curves through (x, y), x (k,) ascending and y (S, k), first come down to `target` (S, p); NaN where they
    do not, or start below. Between the points the curve is a monotone cubic (PCHIP): straight lines would bias phi."""
    curves = PchipInterpolator(x, y, axis=1)
    grid = np.append((x[:-1, None] + np.diff(x)[:, None] * np.arange(_POINTS) / _POINTS).ravel(), x[-1])
    values = curves(grid)
    below = values[:, None, :] <= target[:, :, None]
    last = below.argmax(axis=2)
    inside = below.any(axis=2) & ((last > 0) | (values[:, :1] == target))
    last = np.maximum(last, 1)
    low, high = grid[last - 1], grid[last]
    piece, row = (last - 1) // _POINTS, np.arange(len(y))[:, None]
    a, b, c, d = curves.c[:, piece, row]
    found = (low + high) / 2
    for _ in range(4):
        t = found - x[piece]
        with np.errstate(divide="ignore", invalid="ignore"):
            found = found - (((a * t + b) * t + c) * t + d - target) / ((3 * a * t + 2 * b) * t + c)
        found = np.clip(np.where(np.isfinite(found), found, (low + high) / 2), low, high)
    return np.where(inside, found, np.nan)
