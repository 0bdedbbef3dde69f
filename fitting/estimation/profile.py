"""The profile likelihood of one parameter under the Huber objective.

T(v) = 2·[Q(v) - Q_min]·E[psi']/E[psi²], with Q(v) minimised over all other parameters at v, is chi-squared with
one degree of freedom if runs are independent; the interval is where T < 3.84. The expectations are those of normal
residuals with the scale of the bulk (median absolute deviation), corrected for the number of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fitting.estimation.objective import normal_psi_moments, robust_scale
from fitting.estimation.results import FitResult, Interval
from fitting.estimation.solver import Problem, minimise
from fitting.laws import Inputs

CUT = 3.84
_POINTS = 41


@dataclass(frozen=True, eq=False)
class Profile:
    """T (k,) at the solver coordinates `theta` (k,) and reported values (k,) of one parameter."""

    theta: np.ndarray
    values: np.ndarray
    statistic: np.ndarray


def profile(
    result: FitResult,
    x: Inputs,
    log_loss: np.ndarray,
    name: str,
    theta: np.ndarray,
    workers: int | None = None,
) -> Profile:
    """T at the given solver coordinates (k,) of the parameter `name`."""
    index = result.law.param_names.index(name)
    low, high = np.asarray(result.law.bounds, dtype=float).T
    lower, upper, starts = (np.tile(point, (len(theta), 1)) for point in (low, high, result.theta))
    lower[:, index] = upper[:, index] = starts[:, index] = theta
    problem = Problem(result.law, x, log_loss, np.ones(len(log_loss)), lower, upper, result.delta)
    found = minimise(problem, starts, workers=workers)
    freedom = len(log_loss) / (len(log_loss) - len(result.theta))
    scale = robust_scale(result.log_residuals) * np.sqrt(freedom)
    statistic = np.zeros(len(theta))
    if scale > 0:
        slope, square = normal_psi_moments(float(scale), result.delta)
        statistic = 2 * np.maximum(found.objective - result.objective, 0.0) * slope / square
    return Profile(theta, result.law.to_reported(starts)[:, index], statistic)


def profile_curve(
    result: FitResult, x: Inputs, log_loss: np.ndarray, name: str, workers: int | None = None
) -> Profile:
    """T around the optimum, past the cut on both sides where the box allows it."""
    index = result.law.param_names.index(name)
    low, high = np.asarray(result.law.bounds, dtype=float)[index]
    centre = float(result.theta[index])
    reach = 0.02 * (high - low)
    for _ in range(8):
        grid = np.linspace(max(low, centre - reach), min(high, centre + reach), _POINTS)
        curve = profile(result, x, log_loss, name, np.sort(np.append(grid, centre)), workers)
        ends = curve.statistic[[0, -1]]
        if (grid[0] > low and ends[0] < CUT) or (grid[-1] < high and ends[1] < CUT):
            reach *= 2
        elif ends.min() < 9 * CUT or (curve.statistic < CUT).sum() > 8:
            break
        else:
            reach /= 4
    return curve


def profile_interval(
    result: FitResult, x: Inputs, log_loss: np.ndarray, name: str, workers: int | None = None
) -> Interval:
    """Where T < 3.84, by interpolation of sqrt(T). If the box cuts an end off, that end is the box's."""
    curve, estimate = profile_curve(result, x, log_loss, name, workers), result[name]
    root = np.sqrt(curve.statistic)
    ends = []
    for side in (-1, 1):
        chosen = curve.values <= estimate if side < 0 else curve.values >= estimate
        order = np.argsort(np.abs(curve.values[chosen] - estimate))
        values, heights = curve.values[chosen][order], root[chosen][order]
        above = np.flatnonzero(heights >= np.sqrt(CUT))
        if not len(above) or above[0] == 0:
            ends.append(float(values[-1]))
            continue
        k = above[0]
        share = (np.sqrt(CUT) - heights[k - 1]) / (heights[k] - heights[k - 1])
        ends.append(float(values[k - 1] + share * (values[k] - values[k - 1])))
    assumes = "assumes independent runs; scale from the median absolute deviation"
    return Interval("profile likelihood", ends[0], ends[1], assumes)
