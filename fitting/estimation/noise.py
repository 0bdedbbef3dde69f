"""Noise of log-loss with a part that the runs of a cell share: drawn for grids, and estimated from residuals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fitting.errors import FitError

_LEAST = 1e-12
"""Of a run, in log-loss: below rounding error, so that runs without noise can be drawn again, too."""


@dataclass(frozen=True)
class Noise:
    """Standard deviations of log-loss: of a run, and of the offset that a cell's runs share.

    Raises `FitError` unless `run` is positive and `cell` not negative.
    """

    run: float
    cell: float = 0.0

    def __post_init__(self) -> None:
        if not (self.run > 0 and self.cell >= 0):
            both = f"Noise of run {self.run} and cell {self.cell}"
            raise FitError(f"{both}: the first must be positive, the second not negative")

    def draw(self, cell: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count, n) offsets of log-loss."""
        offsets = rng.standard_normal((count, int(cell.max()) + 1))[:, cell]
        return np.asarray(self.run * rng.standard_normal((count, len(cell))) + self.cell * offsets)


def estimated(residuals: np.ndarray, jacobian: np.ndarray, cell: np.ndarray) -> Noise:
    """The noise that a fit left in the log-residuals (n,), given its derivatives (P, n) and cells (n,).

    Henderson's method: the squares of the residuals between and within cells are set to their expectations, in which a
    least-squares fit of P parameters has M = I - H. Where no cell has two runs, all of it counts as of runs.
    """
    n = len(residuals)
    _, cell, counts = np.unique(cell, return_inverse=True, return_counts=True)
    left, values, _ = np.linalg.svd(jacobian.T / np.linalg.norm(jacobian, axis=1), full_matrices=False)
    left = left[:, values > 1e-10 * values[0]]

    def sums(columns: np.ndarray) -> np.ndarray:
        """(G, k) sums over each cell's runs of (n, k)."""
        return np.stack([np.bincount(cell, column, len(counts)) for column in columns.T], axis=1)

    e = residuals - left @ (left.T @ residuals)
    between = float((sums(e[:, None])[:, 0] ** 2 / counts).sum())
    squares = np.array([between, e @ e - between])
    # Traces of M, of M with the cells' means and with the cells' sums, without any (n, n) matrix.
    of_left = sums(left)
    shared, means = of_left.T @ of_left, (of_left.T / counts) @ of_left
    of_run, of_cell = len(counts) - np.trace(means), n - 2 * np.trace(shared) + np.trace(means @ shared)
    expected = np.array([[of_run, of_cell], [n - left.shape[1] - of_run, n - np.trace(shared) - of_cell]])
    run = cell_part = -1.0
    if len(counts) < n and np.linalg.matrix_rank(expected) == 2:
        run, cell_part = np.linalg.solve(expected, squares)
    if min(run, cell_part) <= 0:
        run, cell_part = squares.sum() / max(n - left.shape[1], 1), 0.0
    return Noise(max(float(np.sqrt(run)), _LEAST), float(np.sqrt(cell_part)))
