"""How often the interval to quote holds the true phi, by design: the table in fitting/README.md."""

from __future__ import annotations

import sys

import numpy as np

from fitting.estimation.resampling import draw_counts, percentile_interval, refit, widened
from fitting.report.document import table
from tests.fitting.simulations.grids import designs, truth

GRIDS, RESAMPLES = 200, 200


def coverage(name: str, grids: int = GRIDS) -> tuple[float, float, float, float]:
    """True half-width (of the central 95% of estimates), median quoted one, coverage of quoted and plain intervals."""
    runs, noise = designs()[name]
    base = truth(runs)
    law, x, cells, at = base.law, base.law.inputs(runs), runs.cell_count, base.theta
    clean = law.log_loss_and_gradient(at[None], x)[0][0]
    observed = clean + noise.draw(runs.cell, grids, np.random.default_rng(1))
    fitted = refit(law, x, observed, at, np.ones((grids, len(runs))), 2, 1)
    halves, quoted, plain = [], 0, 0
    for i in range(grids):
        counts = draw_counts(cells, RESAMPLES, np.random.default_rng([3, i]))
        values = refit(law, x, observed[i], fitted[i], counts[:, runs.cell], 3, 1)[:, -1]
        block = percentile_interval(values, "", "", 3)
        wide = widened(block, float(fitted[i, -1]), cells, len(at), (-3.0, 3.0))
        halves.append((wide.high - wide.low) / 2)
        quoted += wide.low <= at[-1] <= wide.high
        plain += block.low <= at[-1] <= block.high
    low, high = np.percentile(fitted[:, -1], (2.5, 97.5))
    return float(high - low) / 2, float(np.median(halves)), quoted / grids, plain / grids


def main() -> None:
    """Print the table, one line as each is done."""
    rows = []
    for name in designs():
        true, half, quoted, plain = coverage(name)
        rows.append([name, f"{true:.3f}", f"{half:.3f}", f"{quoted:.3f}", f"{plain:.3f}"])
        print(*rows[-1], file=sys.stderr, flush=True)
    print(table(["design", "true half-width", "quoted", "coverage", "plain bootstrap's"], rows))


if __name__ == "__main__":
    main()
