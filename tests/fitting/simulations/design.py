"""The cheapest design for phi to ±.05 at the paper's scale, and what fresh grids of it quote: for fitting/README.md."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

import fitting.studies.design as designs
from fitting.data.runs import Runs
from fitting.laws import JointLaw
from fitting.published import load_grid
from fitting.studies.design import _Pool, design
from fitting.studies.widths import Widths
from tests.fitting.simulations.grids import PAPER_NOISE

TRUTH = {"A": 28.13, "alpha": 0.1996, "B": 928.1, "beta": 0.3693, "E": 1.5697, "phi": 0.46}
GRIDS = 200


def menu(budgets: np.ndarray) -> Runs:
    """Runs of the paper's layouts at these budgets, with the grid's widths and ratios of tokens to parameters."""
    grid, law = load_grid(), JointLaw()
    ratio = grid.tokens / grid.n_total
    parts = []
    for r in grid.recurrences:
        widths = Widths.of(grid, law, float(r))
        first = {d: int(np.flatnonzero((grid.r == r) & (grid.d_model == d))[0]) for d in widths.sampled}
        for budget in budgets:
            rows = grid.take(np.array(list(first.values())))
            tokens = budget / rows.flops_per_token
            runs = dataclasses.replace(rows, tokens=tokens, flops_budget=np.full(len(rows), budget))
            share = runs.tokens / runs.n_total
            parts.append(runs.take((share >= ratio.min()) & (share <= ratio.max())))
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _columns(parts[0])}
    return dataclasses.replace(parts[0], **joined, extra={})


def _columns(runs: Runs) -> list[str]:
    """Names of the columns of a table."""
    return [f.name for f in dataclasses.fields(runs) if isinstance(getattr(runs, f.name), np.ndarray)]


def main() -> None:
    """Print the design, its cost, and the half-widths that fresh grids quote."""
    offered = menu(np.geomspace(4.64e17, 2.15e19, 11))
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    found = design(offered, JointLaw(), TRUTH, PAPER_NOISE, 0.05, workers=1, progress=say)
    seeds = [chosen.seed for chosen in found.runs]
    print(
        f"{len(offered)} runs offered; {len(found.runs)} chosen, {seeds.count(0)} of them different, in {found.cells} "
        f"cells: {found.training_flops:.3g} FLOPs. Predicted half-width {found.half_width:.4f}."
    )
    designs._SIMULATED = GRIDS
    pool = _Pool.of(offered, 0, JointLaw(), TRUTH, PAPER_NOISE, 3)
    row = {
        (r, d, c): i
        for i, (r, d, c) in enumerate(zip(offered.r, offered.d_model, offered.budget, strict=True))
    }
    order = [row[c.r, c.d_model, c.budget] for c in found.runs]
    halves = pool.simulated(order, 99, 1)
    low, median, high = np.percentile(halves, (10, 50, 90))
    print(
        f"{GRIDS} fresh grids: median {median:.4f} ({median / found.half_width - 1:+.1%}), 80% {low:.3f} to {high:.3f}."
    )


if __name__ == "__main__":
    main()
