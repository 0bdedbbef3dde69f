"""The batched solver beside a plain loop of scipy.optimize.minimize: python tests/benchmarks/fit_speed.py [STARTS]

The loop is L-BFGS-B with analytic gradients, the objective times 1e6, ftol 1e-15, gtol 1e-9, 10,000 iterations.
Linear algebra has one thread in both: more threads only slow the loop down, by up to 25 times.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from scipy.optimize import minimize as scipy_minimize  # noqa: E402

from fitting.estimation.fits import fit  # noqa: E402
from fitting.estimation.objective import huber, psi  # noqa: E402
from fitting.estimation.resampling import resample  # noqa: E402
from fitting.estimation.solver import Problem, multi_start, uniform_starts  # noqa: E402
from fitting.laws import JointLaw  # noqa: E402
from fitting.published import load_grid  # noqa: E402
from tests.support.full_search import refit_fully  # noqa: E402


def main(starts: int) -> None:
    """Print times, their ratio, and how far apart the optima are."""
    runs, law = load_grid(), JointLaw()
    x, observed = law.inputs(runs), np.log(runs.val_loss)
    low, high = np.asarray(law.bounds).T
    points = uniform_starts(law, starts, np.random.default_rng(0))
    problem = Problem(law, x, observed, np.ones(len(runs)), low, high)

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        log_loss, jacobian = law.log_loss_and_gradient(theta[None], x)
        residual = log_loss[0] - observed
        return 1e6 * huber(residual).sum(), 1e6 * (jacobian[0] @ psi(residual))

    began = time.perf_counter()
    batch = multi_start(problem, points)
    ours = time.perf_counter() - began
    began = time.perf_counter()
    options = {"maxiter": 10_000, "maxfun": 10**6, "ftol": 1e-15, "gtol": 1e-9}
    box = list(zip(low, high, strict=True))
    loop = [
        scipy_minimize(objective, p, jac=True, method="L-BFGS-B", bounds=box, options=options) for p in points
    ]
    theirs = time.perf_counter() - began
    best = min(loop, key=lambda found: found.fun)
    relative = batch.best.objective[0] / (best.fun * 1e-6) - 1
    print(
        f"one joint fit, {starts} starts: batch {ours:.3f} s, loop {theirs:.2f} s, ratio {theirs / ours:.0f}"
    )
    print(
        f"  objective batch/loop - 1 = {relative:+.1e}, phi apart by "
        f"{abs(batch.best.theta[0, 5] - best.x[5]):.1e}"
    )
    began = time.perf_counter()
    fit(runs, law, starts=starts)
    print(f"  fit() with its checks: {time.perf_counter() - began:.3f} s")

    result = fit(runs, law)
    began = time.perf_counter()
    drawn = resample(result, x, observed, runs.cell, 200, seed=0)
    refits = time.perf_counter() - began
    began = time.perf_counter()
    full = refit_fully(law, x, observed, drawn.counts[:, runs.cell], 500, seed=3)
    print(
        f"200 resample refits: {refits:.2f} s; with 500 starts each: {time.perf_counter() - began:.1f} s, phi apart by "
        f"at most {np.abs(full.best.theta[:, 5] - drawn.theta[:, 5]).max():.1e}"
    )
    for extra in ([], ["--bootstrap", "1000"]):
        began = time.perf_counter()
        command = [sys.executable, "-m", "fitting", "published", "--quiet", *extra]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        print(f"python -m fitting published {' '.join(extra)}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("starts", nargs="?", type=int, default=500, help="default: %(default)s")
    main(parser.parse_args().starts)
