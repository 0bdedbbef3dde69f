"""How often a simulated grid is doubted, by the true half-width of its design: the table in fitting/README.md."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from fitting.data.runs import Runs
from fitting.estimation.fits import fit
from fitting.estimation.identification import Limits, judged
from fitting.estimation.resampling import bootstrap, refit
from fitting.report.document import table
from fitting.studies.planner import Noise
from tests.fitting.simulations.grids import designs, drawn, truth

GRIDS, RESAMPLES = 200, 200
#: Design, and how much louder its noise is made.
NARROW = (("paper, 24 cells", 1.0), ("nano, quiet", 1.0), ("9 cells", 1.0))
WIDE = (("paper, 24 cells", 10.0), ("nano, 12 cells", 3.25), ("8 cells", 5.5))


def design(name: str, louder: float) -> tuple[Runs, Noise]:
    """A design and its noise, `louder` times as strong."""
    runs, noise = designs()[name]
    return runs, Noise(noise.run * louder, noise.cell * louder)


def half_width(name: str, louder: float, grids: int = 400) -> float:
    """Half of the central 95% of phi over simulated grids."""
    runs, noise = design(name, louder)
    base = truth(runs)
    x = base.law.inputs(runs)
    clean = base.law.log_loss_and_gradient(base.theta[None], x)[0][0]
    observed = clean + noise.draw(runs.cell, grids, np.random.default_rng(5))
    phi = refit(base.law, x, observed, base.theta, np.ones((grids, len(runs))), 6, 1)[:, -1]
    low, high = np.percentile(phi, (2.5, 97.5))
    return float(high - low) / 2


def doubted(name: str, louder: float, grids: int = GRIDS) -> Counter[str]:
    """How many simulated grids have each status, the worst of a grid."""
    runs, noise = design(name, louder)
    found: Counter[str] = Counter()
    for grid in drawn(runs, truth(runs), noise, grids, seed=7):
        result = fit(grid, starts=60, workers=1)
        result = bootstrap(grid, result, resamples=RESAMPLES, names=["phi"], workers=1)
        found[judged(grid, result, "phi", Limits(), 1)[0].status.value] += 1
    return found


def main() -> None:
    """Print the table, one line as each is done."""
    rows = []
    for name, louder in (*NARROW, *WIDE):
        found = doubted(name, louder)
        reasons = ", ".join(f"{count} {status}" for status, count in found.most_common() if status != "ok")
        true = f"{half_width(name, louder):.3f}"
        rows.append([name, f"{louder:g}", true, f"{GRIDS - found['ok']} of {GRIDS}", reasons or "-"])
        print(*rows[-1], file=sys.stderr, flush=True)
    print(table(["design", "noise", "true half-width", "doubted", "why"], rows))


if __name__ == "__main__":
    main()
