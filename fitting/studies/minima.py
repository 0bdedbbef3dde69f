"""The lowest loss of every (budget, architecture) cell, as measured: where a grid has its minima."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Runs
from fitting.studies.allocation import Optimum, Parabola


@dataclass(frozen=True)
class Minimum:
    """The best run of one cell; `parabola` is what a parabola through the cell says."""

    r: float
    budget: float
    architecture: str
    runs: int
    d_models: tuple[float, ...]
    """Widths of the cell, ascending."""
    losses: tuple[float, ...]
    """The lowest loss at each of them, nats per token."""
    d_model: float
    n: float
    tokens: float
    loss: float
    interior: bool
    """Whether a narrower and a wider model of the cell are both worse."""
    parabola: Optimum


def minima(runs: Runs, parabolas: list[Parabola]) -> list[Minimum]:
    """One row per cell, by r and budget; `parabolas` are those of the same runs."""
    fitted = {(p.r, p.budget): p.optimum for p in parabolas}
    found = []
    for index in range(runs.cell_count):
        cell = runs.take(runs.cell == index)
        widths = np.unique(cell.d_model)
        losses = [float(cell.val_loss[cell.d_model == d].min()) for d in widths]
        best = int(cell.val_loss.argmin())
        r, budget = float(cell.r[0]), float(cell.budget[0])
        found.append(
            Minimum(
                r, budget, str(cell.architecture[0]), len(cell), tuple(widths.tolist()), tuple(losses),
                float(cell.d_model[best]), float(cell.n_total[best]), float(cell.tokens[best]),
                float(cell.val_loss[best]), bool(widths[0] < cell.d_model[best] < widths[-1]), fitted[r, budget],
            )
        )  # fmt: skip
    return sorted(found, key=lambda m: (m.r, m.budget))
