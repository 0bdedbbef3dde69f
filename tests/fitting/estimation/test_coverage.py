"""How often the 95% intervals hold the true phi, over 200 synthetic grids of the shipped design. Takes
minutes.

Run with `pytest -m slow -s tests/fitting/estimation/test_coverage.py` to see the table.
"""

import numpy as np
import pytest

from fitting.estimation.objective import normal_psi_moments, robust_scale
from fitting.estimation.profile import CUT
from fitting.estimation.resampling import draw_counts, refit
from fitting.estimation.solver import Problem, minimise
from fitting.laws import JointLaw
from fitting.published import load_grid
from fitting.report.document import table

GRID = load_grid()
LAW = JointLaw()
X = LAW.inputs(GRID)
TRUTH = LAW.to_theta({"A": 28.13, "alpha": 0.1996, "B": 928.1, "beta": 0.3693, "E": 1.5697, "phi": 0.4332})
GRIDS, RESAMPLES, BATCH = 200, 200, 20
NOISES = {"run .003": (0.003, 0.0), "run .01": (0.01, 0.0), "run .003, cell .0026": (0.003, 0.0026)}


def simulate(run, cell, seed):
    rng = np.random.default_rng(seed)
    clean = LAW.log_loss_and_gradient(TRUTH[None], X)[0][0]
    offsets = cell * rng.standard_normal((GRIDS, GRID.cell_count))[:, GRID.cell]
    return clean + offsets + run * rng.standard_normal((GRIDS, len(GRID)))


def bootstrap_phi(observed, fitted, blocks, seed):
    """phi (grids, resamples) of resample refits, in batches of grids that share a start each."""
    out = np.empty((len(observed), RESAMPLES))
    for i in range(len(observed)):
        counts = draw_counts(int(blocks.max()) + 1, RESAMPLES, np.random.default_rng([seed, i]))
        out[i] = refit(LAW, X, observed[i], fitted[i], counts[:, blocks], seed)[:, 5]
    return out


def profile_holds_truth(observed, fitted, objective):
    """Whether T at the true phi stays under the cut, for each grid."""
    count = len(observed)
    low, high = (np.tile(side, (count, 1)) for side in np.asarray(LAW.bounds).T)
    low[:, 5] = high[:, 5] = TRUTH[5]
    held = minimise(Problem(LAW, X, observed, np.ones(len(GRID)), low, high), fitted).objective
    residual = LAW.log_loss_and_gradient(fitted, X)[0] - observed
    statistic = []
    for i in range(count):
        slope, square = normal_psi_moments(robust_scale(residual[i]) * np.sqrt(116 / 110))
        statistic.append(2 * (held[i] - objective[i]) * slope / square)
    return np.array(statistic) < CUT


@pytest.mark.slow
def test_the_recommended_interval_covers_and_the_others_are_shown():
    rows, recommended = [], {}
    for name, (run, cell) in NOISES.items():
        observed = simulate(run, cell, seed=1)
        weights = np.ones((GRIDS, len(GRID)))
        fitted = refit(LAW, X, observed, TRUTH, weights, seed=2)
        low, high = np.asarray(LAW.bounds).T
        objective = minimise(Problem(LAW, X, observed, np.ones(len(GRID)), low, high), fitted, 0).objective
        by_cell = np.percentile(bootstrap_phi(observed, fitted, GRID.cell, 3), (2.5, 97.5), axis=1)
        by_run = np.percentile(bootstrap_phi(observed, fitted, np.arange(len(GRID)), 4), (2.5, 97.5), axis=1)
        factor = np.sqrt(24 / 18)
        wide = fitted[:, 5] + factor * (by_cell - fitted[:, 5])
        coverage = {
            "widened": np.mean((wide[0] <= TRUTH[5]) & (TRUTH[5] <= wide[1])),
            "block": np.mean((by_cell[0] <= TRUTH[5]) & (TRUTH[5] <= by_cell[1])),
            "run": np.mean((by_run[0] <= TRUTH[5]) & (TRUTH[5] <= by_run[1])),
            "profile": np.mean(profile_holds_truth(observed, fitted, objective)),
        }
        recommended[name] = coverage["widened"]
        rows.append(
            [name, *[f"{value:.3f}" for value in coverage.values()], f"{np.mean(wide[1] - wide[0]) / 2:.4f}"]
        )
    print(
        "\n"
        + table(["noise of log-loss", "widened block", "block", "run-level", "profile", "half-width"], rows)
    )
    assert all(0.90 <= value <= 0.99 for value in recommended.values()), recommended
