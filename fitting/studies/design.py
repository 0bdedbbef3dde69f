"""The cheapest runs of a menu whose quoted interval of phi would be as narrow as asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Runs, concatenate
from fitting.errors import FitError
from fitting.estimation.resampling import draw_counts, refit, widening
from fitting.laws import Inputs, JointLaw, Law, OneTokenLaw
from fitting.laws.forms import SAME_TOKENS
from fitting.studies.planner import Noise, psi_moments

SAME_RATIO = 0.02
"""Ratios of tokens to parameters this close in logarithm are one."""
_Z = 1.959964
_SIMULATED, _RESAMPLES, _ROUNDS = 100, 100, 5


@dataclass(frozen=True)
class Chosen:
    """A run to train, in the order of what it gives per FLOP, and the expected quoted half-width after it."""

    source: str
    r: float
    d_model: float
    budget: float
    tokens: float
    seed: int
    """Counts its repeats in the design from 0."""
    half_width: float


@dataclass(frozen=True)
class Design:
    """The cheapest design that was found for a target, and what it would give. Half-widths are those of phi."""

    law: str
    split: str
    noise: Noise
    target: float
    reached: bool
    half_width: float
    """Median quoted half-width over `simulated` grids of the design."""
    spread: tuple[float, float]
    """Its 10th and 90th percentile: single grids vary."""
    simulated: int
    existing: int
    runs: tuple[Chosen, ...]
    cells: int
    training_flops: float
    """Of the runs to train."""
    seed: int


def law_for(runs: Runs, multiplier_law: JointLaw) -> Law:
    """The joint law, or that of one token count. Raises `FitError` where size and tokens move together.

    There any alpha with its own beta explains the same losses, whatever phi.
    """
    if np.ptp(np.log(runs.tokens)) < SAME_TOKENS:
        return OneTokenLaw(multiplier_law.multiplier, multiplier_law.split)
    ratio = np.log(runs.tokens / runs.n_total)
    if np.ptp(ratio) < SAME_RATIO:
        raise FitError(
            f"All {len(runs)} runs of the menu have one ratio of tokens to parameters, {np.exp(ratio.mean()):.3g}: "
            "size and tokens move together, so alpha, beta and phi are not identified. Give several ratios, as runs of "
            "equal budget and different width have, or one token count"
        )
    return multiplier_law


def design(
    menu: Runs,
    law: JointLaw,
    values: dict[str, float],
    noise: Noise,
    target: float,
    *,
    existing: Runs | None = None,
    seeds: int = 3,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Design:
    """Choose runs of the menu, each up to `seeds` times, one by one by what they give per FLOP, then drop what is idle.

    `values` are the law's true parameters, `existing` runs that are there already. What a bootstrap would quote is
    simulated, and the choice is made again until it meets the `target`. Raises `FitError` for a menu that cannot
    identify phi, a target that is not positive, or one that the whole menu does not reach.
    """
    if not target > 0:
        raise FitError(f"--target is {target:g}; it must be positive")
    if seeds < 1:
        raise FitError(f"--seeds is {seeds}; it must be at least 1")
    everything = menu if existing is None else concatenate(existing, menu)
    own = law_for(everything, law)
    pool = _Pool.of(everything, 0 if existing is None else len(existing), own, values, noise, seeds)
    ratio, order, tried = 1.0, pool.chosen(target), list[list[int]]()
    for _ in range(_ROUNDS):
        progress(f"simulating {_SIMULATED} grids of {len(order)} runs beside {pool.existing}")
        median = float(np.median(pool.simulated(order, seed, workers)))
        here = median / pool.half_width(order)
        tried += [order] if median <= target else []
        # Few cells have heavier tails than many, so a design that is good enough teaches half of it to a cheaper one.
        ratio = math.sqrt(ratio * here) if median <= target else 1.05 * max(ratio, here)
        if not pool.reachable(target / ratio):
            break
        order = pool.chosen(target / ratio)
    order = min(tried or [order], key=lambda rows: everything.training_flops[rows].sum())
    # Other grids than those that the choice was made with.
    halves = pool.simulated(order, seed + 1, workers)
    median = float(np.median(halves))
    low, high = map(float, np.percentile(halves, (10, 90)))
    widest = float(np.ptp(np.asarray(own.bounds, dtype=float)[-1])) / 2
    before = [order[: i + 1] for i in range(len(order))]
    scale = median / pool.half_width(order)
    runs = tuple(
        Chosen(
            str(everything.source[row]), float(everything.r[row]), float(everything.d_model[row]),
            float(everything.budget[row]), float(everything.tokens[row]), order[:i].count(row),
            min(scale * pool.half_width(before[i]), widest),
        )
        for i, row in enumerate(order)
    )  # fmt: skip
    cost = float(everything.training_flops[order].sum())
    return Design(
        own.name, own.split.name, noise, target, median <= 1.05 * target, median, (low, high), _SIMULATED,
        pool.existing, runs, pool.cell_count(order), cost, seed,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Pool:
    """Runs that are there (the first `existing`) and that may be added, and what they tell of the parameters."""

    law: Law
    theta: np.ndarray
    x: Inputs
    cell: np.ndarray
    flops: np.ndarray
    jacobian: np.ndarray
    existing: int
    noise: Noise
    seeds: int
    prior: np.ndarray
    """Precision (P,) of the solver's coordinates within their box: a design of few runs needs one."""

    @classmethod
    def of(
        cls, runs: Runs, existing: int, law: Law, values: dict[str, float], noise: Noise, seeds: int
    ) -> _Pool:
        if isinstance(law, OneTokenLaw):
            # E holds the tokens' term.
            tokens = float(np.exp(np.log(runs.tokens).mean()))
            values = {**values, "E": values["E"] + values["B"] * tokens ** -values["beta"]}
        theta, x = law.to_theta(values), law.inputs(runs)
        jacobian = law.log_loss_and_gradient(theta[None], x)[1][0]
        width = np.ptp(np.asarray(law.bounds, dtype=float), axis=1)
        cell = runs.cell
        return cls(
            law, theta, x, cell, runs.training_flops, jacobian, existing, noise, seeds, 12.0 / width**2
        )

    def rows(self, order: list[int]) -> np.ndarray:
        """Indices of the runs that are there and of those chosen."""
        return np.array([*range(self.existing), *order], dtype=int)

    def cell_count(self, order: list[int]) -> int:
        """Distinct cells of a design."""
        return len(np.unique(self.cell[self.rows(order)]))

    def half_width(self, order: list[int]) -> float:
        """Half-width of phi that would be quoted, by Gauss-Newton, with the box as a prior."""
        return float(self._half_widths(order, np.array([-1]))[0])

    def _half_widths(self, order: list[int], added: np.ndarray) -> np.ndarray:
        """The same (k,) with each of the runs `added` (k,) in turn; -1 adds none."""
        slope, square, shared = psi_moments(self.noise)
        rows = self.rows(order)
        cells = int(self.cell.max()) + 1
        sums = np.zeros((cells, len(self.theta)))
        np.add.at(sums, self.cell[rows], self.jacobian[:, rows].T)
        curvature = self.jacobian[:, rows] @ self.jacobian[:, rows].T
        between = sums.T @ sums
        new = np.where(added[:, None] >= 0, self.jacobian[:, added].T, 0.0)  # (k,P)
        own = sums[self.cell[added]]
        outer = new[:, :, None] * new[:, None, :]
        cross = own[:, :, None] * new[:, None, :]
        curvature = curvature + outer
        between = between + outer + cross + cross.transpose(0, 2, 1)
        prior = np.diag(self.prior) * square / slope**2
        middle = square * curvature + shared * (between - curvature) + square * prior
        # In units of each coordinate's own precision: curvatures differ by many orders.
        scale = 1 / np.sqrt(np.einsum("kpp->kp", curvature + prior))
        inverse = np.linalg.inv((curvature + prior) * scale[:, :, None] * scale[:, None, :])
        covariance = inverse @ (middle * scale[:, :, None] * scale[:, None, :]) @ inverse / slope**2
        half = _Z * scale[:, -1] * np.sqrt(np.maximum(covariance[:, -1, -1], 0.0))
        there = np.zeros(cells, dtype=bool)
        there[self.cell[rows]] = True
        count = there.sum() + np.where((added >= 0) & ~there[self.cell[added]], 1, 0)
        return np.asarray(half * [_factor(int(g), len(self.theta)) for g in count])

    def reachable(self, target: float) -> bool:
        """Whether every run of the menu, with all its repeats, gives the target."""
        every = list(range(self.existing, len(self.x))) * self.seeds
        return self.half_width(every) <= target

    def chosen(self, target: float) -> list[int]:
        """The runs to add, in order. Raises `FitError` for a target out of reach."""
        menu = np.arange(self.existing, len(self.x))
        if not self.reachable(target):
            best = self.half_width(menu.tolist() * self.seeds)
            raise FitError(
                f"The whole menu, {len(menu)} runs of {self.seeds} seeds each beside {self.existing}, would give a "
                f"half-width of about {best:.3f}: too wide. Offer more widths, recurrences, budgets or --seeds"
            )
        order: list[int] = []
        now = self.half_width(order)
        need = fewest_cells(len(self.theta))
        while now > target or self.cell_count(order) < need:
            open_ = np.array([row for row in menu.tolist() if order.count(row) < self.seeds])
            halves = self._half_widths(order, open_)
            gain = (np.log(now) - np.log(halves)) / self.flops[open_]
            if self.cell_count(order) < need:
                there = set(self.cell[self.rows(order)].tolist())
                fresh = np.array([self.cell[row] not in there for row in open_])
                gain = np.where(fresh, gain, -np.inf) if fresh.any() else gain
            best = int(gain.argmax())
            order.append(int(open_[best]))
            now = float(halves[best])
        while (idle := self._idle(order, target, need)) is not None:
            del order[idle]
        return order

    def _idle(self, order: list[int], target: float, need: int) -> int | None:
        """The place in `order` of the most expensive run that the target does not need; None if all are needed."""
        for row in sorted(set(order), key=lambda row: -self.flops[row]):
            last = len(order) - 1 - order[::-1].index(row)
            fewer = order[:last] + order[last + 1 :]
            if self.cell_count(fewer) >= need and self.half_width(fewer) <= target:
                return last
        return None

    def simulated(self, order: list[int], seed: int, workers: int | None) -> np.ndarray:
        """Half-widths of phi that block bootstraps of simulated grids would quote."""
        rows = self.rows(order)
        x = self.x.take(rows)
        _, cell = np.unique(self.cell[rows], return_inverse=True)
        rng = np.random.default_rng(seed)
        clean = self.law.log_loss_and_gradient(self.theta[None], x)[0]
        observed = clean + self.noise.draw(cell, _SIMULATED, rng)
        fitted = refit(self.law, x, observed, self.theta, np.ones((_SIMULATED, len(rows))), seed, workers)
        cells, box = int(cell.max()) + 1, np.asarray(self.law.bounds, dtype=float)[-1]
        factor = widening(cells, len(self.theta))
        halves = []
        for one, at in zip(observed, fitted, strict=True):
            weights = draw_counts(cells, _RESAMPLES, rng)[:, cell]
            phi = refit(self.law, x, one, at, weights, seed, workers)[:, -1]
            ends = at[-1] + factor * (np.percentile(phi, (2.5, 97.5)) - at[-1])
            halves.append(float(np.ptp(np.clip(ends, *box))) / 2)
        return np.array(halves)


def _factor(cells: int, parameters: int) -> float:
    """The widening of a bootstrap over so many cells; of the fewest that carry one where there are fewer."""
    return widening(max(cells, fewest_cells(parameters)), parameters)


def fewest_cells(parameters: int) -> int:
    """Cells of which a resample holds more distinct ones than there are parameters, on average.

    With fewer, resamples are far apart: the intervals that single grids quote differ several times over.
    """
    return int(parameters / (1 - math.exp(-1))) + 1
