"""Phi by one way of matching: pair by pair, over groups of pairs, and whether it is one number.

Shapes: S sets of losses at once, n runs, c cells of equal tokens, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import t as student

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.diagnostics import no_cell_with_two_runs, scatter
from fitting.estimation.fits import fit
from fitting.estimation.noise import Noise
from fitting.estimation.resampling import refit
from fitting.estimation.results import FitResult
from fitting.laws import ChinchillaLaw, JointLaw, Law
from fitting.studies.iso_flops import LIMIT, IsoFlops
from fitting.studies.iso_token import CellNoise, Cells

ISO_TOKEN = "equal tokens"
OF_R1, OF_JOINT = "equal budgets, constants of r = 1", "equal budgets, constants of the joint fit"
OUTSIDE, BELOW, BEYOND = "outside of the curve", "N_eq <= N_once: minus infinity", "extrapolated: M > N(r=1)"
_Z = 1.959964
Draw = Callable[[int, np.random.Generator], np.ndarray]
"""Offsets (S, n) of log-loss."""


@dataclass(frozen=True)
class Pair:
    """One looped run (or the mean of its `seeds`) and the r = 1 size that reaches its loss (nats)."""

    r: float
    d_model: float
    budget: float | None
    """Nominal training FLOPs of a pair of equal budgets; None at equal tokens."""
    tokens: float
    seeds: int
    loss: float
    size: float | None
    phi: float | None
    """None where there is no size, or phi is minus infinity; `note` says which."""
    error: float | None
    low: float | None
    """None beside an error: an open end, beyond the curve or at minus infinity. So for `high`."""
    high: float | None
    weight: float
    """In the mean of all pairs."""
    note: str


@dataclass(frozen=True)
class Group:
    """phi of the pairs that share an r, width, token count or budget (`value`), its standard error and 95% interval."""

    value: float | None
    pairs: int
    """Those with a phi; minus infinity counts in the median only."""
    phi: float | None
    error: float | None
    low: float | None
    high: float | None
    median: float | None


@dataclass(frozen=True)
class Trend:
    """phi = `at_centre` + `slope`·log10(value/`centre`), over token counts or budgets; `error` is the slope's."""

    over: str
    centre: float
    at_centre: float
    slope: float
    error: float


@dataclass(frozen=True)
class Reading:
    """Phi by one way of matching.

    At equal tokens a group's phi is the mean with inverse-variance weights, fixed where all pairs have one phi: those
    of the estimates themselves, or of generalised least squares, would follow the noise. At equal budgets it is the
    median. Errors take account of what pairs share.
    """

    method: str
    constants: dict[str, float] | None
    """Those of the law that pairs of equal budgets need."""
    noise: Noise | None
    """Of log-loss; None if the runs do not tell it."""
    pooled: Group
    groups: dict[str, tuple[Group, ...]]
    """By r, d_model, and tokens or budget."""
    heterogeneity: float | None
    """Share of grids of one phi that scatter as much between pairs; None without simulation."""
    trend: Trend | None
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, eq=False)
class Made:
    """A reading with what simulations need: its pooled phi (S,) of losses (S, n), and draws of its noise."""

    reading: Reading
    of: Callable[[np.ndarray], np.ndarray]
    draw: Draw | None


def share_of_grids(found: float, drawn: np.ndarray) -> float:
    """p of a statistic under simulation; never 0, as the grid itself counts among those drawn (S,)."""
    return float((1 + (drawn >= found).sum()) / (1 + len(drawn)))


# ---- Equal tokens ---------------------------------------------------------------------------------------------------


def equal_tokens(runs: Runs, cells: Cells, simulations: int, seed: int) -> Made:
    """The reading of runs at equal tokens; their scatter tells the noise."""
    log_loss = np.log(runs.val_loss)[None]
    log_means, loss = cells.means(log_loss), cells.means(runs.val_loss[None])[0]
    found = cells.noise(log_means, _within(cells, log_loss, log_means))
    repeated, lines = cells.degrees
    told = float(found.of_means(cells.repeats).min()) > 0
    reading, weights = of_cells(cells, loss, found if told else None, lines or repeated)

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        own = np.where(cells.runs < 0, len(cells.r) + np.arange(len(runs)), cells.runs)
        shared = rng.standard_normal((count, len(cells.r) + len(runs)))[:, own]
        run, cell = np.sqrt(found.run[0]), np.sqrt(found.cell[0])
        return np.asarray(run * rng.standard_normal((count, len(runs))) + cell * shared)

    def of(losses: np.ndarray) -> np.ndarray:
        return _weighted(cells.phi(cells.means(losses)), weights)

    if told and simulations and reading.pooled.pairs > 1 and reading.pooled.phi is not None:
        same = cells.at_one_phi(loss, reading.pooled.phi)
        # Runs at token counts without a curve are in no mean.
        clean = np.where(cells.runs >= 0, np.log(same)[np.maximum(cells.runs, 0)], 0.0)
        drawn = clean + draw(simulations, np.random.default_rng([seed, 1]))
        p = _one_phi(cells, cells.phi(loss[None]), found, weights, drawn)
        reading = replace(reading, heterogeneity=p)
    return Made(reading, of, draw if told else None)


def of_cells(
    cells: Cells, loss: np.ndarray, noise: CellNoise | None, degrees: int
) -> tuple[Reading, np.ndarray]:
    """The reading of mean losses (c,) with noise of so many degrees of freedom, and the weights (P,) of its mean."""
    phi, sizes = cells.phi(loss[None])[0], np.exp(cells.sizes(loss[None])[0])
    inside = np.isfinite(phi)
    unknown = np.full(len(phi), math.nan)
    weights, errors, low, high = inside.astype(float), unknown, unknown, unknown
    covariance = np.full((len(phi), len(phi)), math.nan)
    quantile = float(student.ppf(0.975, max(1, degrees)))
    if noise is not None and inside.any():
        variance = noise.of_means(cells.repeats)[0] * loss**2
        slopes = cells.slopes(loss)
        covariance = (slopes * variance) @ slopes.T
        errors = np.where(inside, np.sqrt(np.diag(covariance)), math.nan)
        low, high = _ends(cells, loss, slopes, quantile * errors)
        at_one = cells.slopes(cells.at_one_phi(loss, float(np.median(phi[inside])))) ** 2 @ variance
        weights = np.where(inside & np.isfinite(errors) & np.isfinite(at_one), 1 / at_one, 0.0)
    weights /= weights.sum() or 1.0

    def group(value: float | None, chosen: np.ndarray) -> Group:
        told, used = phi[chosen & ~np.isnan(phi)], chosen & (weights > 0)
        median = float(np.median(told)) if len(told) else math.nan
        if not used.any():
            return _group(value, 0, math.nan, math.nan, quantile, median)
        share = weights[used] / weights[used].sum()
        error = math.sqrt(share @ covariance[np.ix_(used, used)] @ share)
        return _group(value, int(used.sum()), float(share @ phi[used]), error, quantile, median)

    at = {name: getattr(cells, name)[cells.pairs] for name in ("r", "d_model", "tokens")}
    notes = np.where(np.isnan(phi), OUTSIDE, np.where(np.isneginf(phi), BELOW, ""))
    pairs = _pairs(
        at["r"], at["d_model"], unknown, at["tokens"], cells.repeats[cells.pairs], loss[cells.pairs], sizes, phi,
        errors, low, high, weights, notes,
    )  # fmt: skip
    spread = Noise(*(math.sqrt(part[0]) for part in (noise.run, noise.cell))) if noise else None
    everything, trend = group(None, phi == phi), _trend("tokens", at["tokens"], phi, weights, covariance)
    return Reading(ISO_TOKEN, None, spread, everything, _groups(at, group), None, trend, pairs), weights


def _ends(
    cells: Cells, loss: np.ndarray, slopes: np.ndarray, away: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ends (P,) of intervals that are `away` (P,) from phi to first order: phi at the losses that far off.

    phi is far from linear in the loss near N_once. NaN or minus infinity is an open end.
    """
    own = np.abs(slopes[np.arange(len(away)), cells.pairs])
    both = np.vstack([loss, loss])
    both[:, cells.pairs] += np.outer([1.0, -1.0], np.nan_to_num(away / own))
    low, high = np.where(np.isfinite(away), cells.phi(both), math.nan)
    return low, high


def _within(cells: Cells, log_loss: np.ndarray, log_means: np.ndarray) -> np.ndarray:
    """Sums of squares (S,) of log-loss (S, n) about the means (S, c) of its cells."""
    inside = cells.runs >= 0
    return np.asarray(((log_loss[:, inside] - log_means[:, cells.runs[inside]]) ** 2).sum(axis=1))


def _one_phi(
    cells: Cells, phi: np.ndarray, found: CellNoise, weights: np.ndarray, drawn: np.ndarray
) -> float:
    """p of the scatter of phi (1, P), among grids of one phi with log-losses `drawn` (S, n).

    Every grid estimates its own noise, as this one did: with it taken as known, true nulls are rejected too often.
    """

    def statistic(values: np.ndarray, noise: CellNoise) -> np.ndarray:
        counted = np.isfinite(values) & (weights > 0)
        apart = np.where(counted, values, 0.0) - _weighted(values, weights)[:, None]
        square = (np.where(counted, weights, 0.0) * apart**2).sum(axis=1)
        louder = (noise.of_means(cells.repeats) / found.of_means(cells.repeats)).mean(axis=1)
        return np.asarray(square / np.maximum(counted.sum(axis=1) - 1, 1) / louder)

    log_means = cells.means(drawn)
    noise = cells.noise(log_means, _within(cells, drawn, log_means))
    values = cells.phi(cells.means(np.exp(drawn)))
    return share_of_grids(float(statistic(phi, found)[0]), statistic(values, noise))


# ---- Equal budgets --------------------------------------------------------------------------------------------------


def equal_budgets(
    runs: Runs,
    equal: IsoFlops,
    law: Law,
    joint: FitResult | None,
    simulations: int,
    search: dict[str, Any],
) -> list[Made]:
    """With the constants of the r = 1 runs' own fit, right also where loops follow others, then the joint fit's.

    Cells scatter as about the joint fit, its misfit included: errors of what cells share are rather too wide.
    """
    fitted = []
    with suppress(FitError):
        alone = runs.take(runs.r == 1)
        fitted.append((OF_R1, fit(alone, ChinchillaLaw(law.split.count), **search), runs.r == 1))
    if joint is not None and isinstance(joint.law, JointLaw):
        fitted.append((OF_JOINT, joint, np.ones(len(runs), dtype=bool)))
    noise = None if joint is None else _noise_of_grid(runs, joint)
    grids = simulations if noise else 0
    return [
        _of_constants(runs, equal, method, result, chosen, joint, noise, grids, search)
        for method, result, chosen in fitted
    ]


def _noise_of_grid(runs: Runs, joint: FitResult) -> Noise | None:
    """Scatter of runs about the parabolas in log N of their cells, and of cells about the joint fit.

    Runs about the joint fit, in a grid without cells of four widths. None where nothing scatters.
    """
    if no_cell_with_two_runs(runs.cell):
        return None
    seen = scatter(joint.log_residuals, runs.cell, len(joint.theta))
    square, degrees = 0.0, 0
    for cell in np.unique(runs.cell):
        x, y = (column[runs.cell == cell] for column in (np.log(runs.n_total), np.log(runs.val_loss)))
        if len(np.unique(x)) > 3:
            line = np.polynomial.Polynomial.fit(x, y, 2)
            square, degrees = square + float(((y - line(x)) ** 2).sum()), degrees + len(x) - 3
    run = math.sqrt(square / degrees) if degrees else seen.run
    return Noise(run, seen.cell) if run > 0 else None


def _of_constants(
    runs: Runs,
    equal: IsoFlops,
    method: str,
    result: FitResult,
    chosen: np.ndarray,
    joint: FitResult | None,
    noise: Noise | None,
    simulations: int,
    search: dict[str, Any],
) -> Made:
    """A reading with the constants of a fit to the `chosen` runs (n,), which every simulated grid fits again."""
    law, x, seed = result.law, result.law.inputs(runs.take(chosen)), search["seed"]
    constants, loss = law.to_reported(result.theta)[None], runs.val_loss[None]
    phi, sizes = equal.phi(loss, constants)[0], equal.sizes(loss, constants)[0]

    def pairs_of(losses: np.ndarray) -> np.ndarray:
        observed = np.log(losses[:, chosen])
        even = np.ones(observed.shape)
        theta = refit(law, x, observed, result.theta, even, seed, search["workers"], result.delta)
        return np.clip(equal.phi(losses, law.to_reported(theta)), -LIMIT, LIMIT)

    def draw(count: int, rng: np.random.Generator) -> np.ndarray:
        assert noise is not None
        return noise.draw(runs.cell, count, rng)

    def of(losses: np.ndarray) -> np.ndarray:
        return np.asarray(np.median(pairs_of(losses), axis=1))

    # Without simulation, errors are not known.
    drawn, p = np.full((1, len(phi)), math.nan), None
    if simulations and joint is not None:
        log_loss = np.log(runs.val_loss)
        drawn = pairs_of(np.exp(log_loss + draw(simulations, np.random.default_rng([seed, 3]))))
        clean = log_loss - joint.log_residuals
        null = pairs_of(np.exp(clean + draw(simulations, np.random.default_rng([seed, 1]))))
        weights = _precision(_spread(drawn))

        def statistic(values: np.ndarray) -> np.ndarray:
            apart = np.clip(values, -LIMIT, LIMIT) - np.median(values, axis=1, keepdims=True)
            return np.asarray((weights * apart**2).sum(axis=1))

        p = share_of_grids(float(statistic(phi[None])[0]), statistic(null))
    errors = _spread(drawn)
    inside = np.isfinite(phi)

    def group(value: float | None, members: np.ndarray) -> Group:
        middle = float(np.median(phi[members]))
        error = float(_spread(np.median(drawn[:, members], axis=1)[:, None])[0])
        return _group(value, int((members & inside).sum()), middle, error, _Z, middle)

    at = {name: getattr(runs, name)[equal.pairs] for name in ("r", "d_model", "budget")}
    beyond = np.where(sizes > equal.n_at_r1, BEYOND, "")
    once, even = np.ones(len(phi), dtype=int), np.full(len(phi), 1 / len(phi))
    pairs = _pairs(
        at["r"], at["d_model"], at["budget"], runs.tokens[equal.pairs], once, runs.val_loss[equal.pairs], sizes, phi,
        errors, phi - _Z * errors, phi + _Z * errors, even, np.where(np.isneginf(phi), BELOW, beyond),
    )  # fmt: skip
    centred = drawn - drawn.mean(axis=0)
    trend = _trend(
        "budget",
        at["budget"],
        phi,
        np.where(inside, _precision(errors), 0.0),
        centred.T @ centred / len(drawn),
    )
    everything = group(None, phi == phi)
    told = {name: result[name] for name in ("A", "alpha", "B", "beta")}
    reading = Reading(method, told, noise, everything, _groups(at, group), p, trend, pairs)
    return Made(reading, of, draw if noise else None)


# ---- Both -----------------------------------------------------------------------------------------------------------


def _weighted(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Means (S,) of values (S, P) with weights (P,) over those that are finite."""
    there = np.where(np.isfinite(values), weights, 0.0)
    with np.errstate(invalid="ignore"):
        return np.asarray((there * np.where(there > 0, values, 0.0)).sum(axis=1) / there.sum(axis=1))


def _spread(values: np.ndarray) -> np.ndarray:
    """Robust standard deviations (P,) of draws (S, P): half of the central 68.27%."""
    low, high = np.percentile(values, (15.865, 84.135), axis=0)
    return np.asarray(high - low) / 2


def _precision(errors: np.ndarray) -> np.ndarray:
    """1/error²; 0 where draws never differ, as those that all lie beyond what is compared."""
    return np.asarray(np.divide(1, errors**2, out=np.zeros_like(errors), where=errors > 0))


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _pairs(*columns: np.ndarray) -> tuple[Pair, ...]:
    """Pairs from columns (P,) in the order of `Pair`; what is not finite is None."""
    rows = zip(*(column.tolist() for column in columns), strict=True)
    told: list[list[Any]] = [
        [None if isinstance(v, float) and not math.isfinite(v) else v for v in row] for row in rows
    ]
    return tuple(Pair(*row) for row in told)


def _group(
    value: float | None, pairs: int, phi: float, error: float, quantile: float, median: float
) -> Group:
    low, high = phi - quantile * error, phi + quantile * error
    return Group(value, pairs, _number(phi), _number(error), _number(low), _number(high), _number(median))


def _groups(
    columns: dict[str, np.ndarray], group: Callable[[float | None, np.ndarray], Group]
) -> dict[str, tuple[Group, ...]]:
    return {
        name: tuple(group(float(value), column == value) for value in np.unique(column))
        for name, column in columns.items()
    }


def _trend(
    over: str, values: np.ndarray, phi: np.ndarray, weights: np.ndarray, covariance: np.ndarray
) -> Trend | None:
    """Weighted least squares of phi (P,) on the logarithm of values (P,); None if these are all the same, or without
    errors."""
    used = weights > 0
    known = covariance[np.ix_(used, used)]
    if len(np.unique(values[used])) < 2 or not np.isfinite(known).all():
        return None
    x, w = np.log10(values[used]), weights[used] / weights[used].sum()
    centre = float(w @ x)
    line = w * (x - centre) / (w @ (x - centre) ** 2)
    middle, slope = float(w @ phi[used]), float(line @ phi[used])
    return Trend(over, float(10**centre), middle, slope, math.sqrt(line @ known @ line))
