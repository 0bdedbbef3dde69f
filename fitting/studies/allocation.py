"""Compute-optimal size and tokens: from a law in closed form, from a law with the exact FLOPs, from parabolas.

All three are labelled, because they answer the question differently and their exponents differ by up to 0.1. C is in
training FLOPs, F in training FLOPs per token, N in parameters, D in tokens, L in nats per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.data.plain import optional
from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.results import FitResult
from fitting.laws import Law, OneTokenLaw
from fitting.studies.widths import Widths


@dataclass(frozen=True)
class Optimum:
    """The best model of one r at one budget; `refusal`, if any, says why its numbers should not be used."""

    method: str
    r: float
    flops: float
    n: float | None
    tokens: float | None
    loss: float | None
    refusal: str | None = None
    d_model: float | None = None


def law_optimum(
    law: Law, theta: np.ndarray, widths: Widths, flops: float, n_cap: float | None = None
) -> Optimum:
    """Minimise L(N, C/F(N)) over the width with the exact F; a minimum outside the sampled N is flagged.

    `n_cap` limits N (from an inference cap); the minimum is then the best allowed one.
    """
    top = np.log(widths.sampled[-1] * 8) if n_cap is None else np.log(widths.width_of(n_cap))
    low = np.log(widths.sampled[0] / 8)
    # The loss has one minimum in the width: a grid, then four zooms into the two intervals around its lowest point.
    points = 257
    for _ in range(5):
        grid = np.linspace(low, top, points)
        losses = law.log_loss_and_gradient(theta[None], widths.inputs(np.exp(grid), flops))[0][0]
        best = int(losses.argmin())
        low, top, points = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 33
    width = np.exp(grid[best : best + 1])
    n = float(widths.n_total(width)[0])
    outside = not widths.n_range[0] <= n <= widths.n_range[1]
    refusal = f"N* = {n:.3g} lies outside the sampled {widths.n_range[0]:.3g} to {widths.n_range[1]:.3g}"
    method = "law with exact F(N)" if widths.exact else "law with a smooth F(N)"
    tokens, loss = float(flops / widths.flops(width)[0]), float(np.exp(losses[best]))
    return Optimum(
        method, widths.r, float(flops), n, tokens, loss, refusal if outside else None, float(width[0])
    )


@dataclass(frozen=True)
class Parabola:
    """L = a + b·u + c·u², u = log N, of one (budget, r) cell, and its minimum (None with a reason if refused)."""

    r: float
    budget: float
    runs: int
    coefficients: tuple[float, float, float] | None
    optimum: Optimum


def parabola(runs: Runs, widths: Widths | None) -> Parabola:
    """The iso-FLOPs parabola of one cell's runs in log N, refused unless it opens upwards with its minimum inside.

    `widths` gives D* = C/F(N*); without it D* is left out.
    """
    r, budget, count = float(runs.r[0]), float(runs.budget[0]), len(runs)
    log_n = np.log(runs.n_total)
    low, high, sizes = log_n.min(), log_n.max(), len(np.unique(log_n.round(9)))
    refused = Optimum("parabola", r, budget, None, None, None)
    if sizes < 3:
        reason = f"{sizes} sizes do not make a parabola (3 needed)"
        return Parabola(r, budget, count, None, replace(refused, refusal=reason))
    centre = log_n.mean()
    c, b, a = np.polyfit(log_n - centre, runs.val_loss, 2)
    shifted = (float(a - b * centre + c * centre**2), float(b - 2 * c * centre), float(c))
    if c <= 0:
        reason = "the parabola opens downwards"
        return Parabola(r, budget, count, shifted, replace(refused, refusal=reason))
    at = centre - b / (2 * c)
    if not low <= at <= high:
        sampled = f"outside the sampled {np.exp(low):.3g} to {np.exp(high):.3g}"
        reason = f"the minimum N = {np.exp(at):.3g} lies {sampled}"
        return Parabola(r, budget, count, shifted, replace(refused, refusal=reason))
    n, loss = float(np.exp(at)), float(a - b * b / (4 * c))
    width = widths.width_of(n) if widths is not None else None
    tokens = float(budget / widths.flops(np.array([width]))[0]) if widths is not None else None
    optimum = Optimum("parabola", r, budget, n, tokens, loss, d_model=width)
    return Parabola(r, budget, count, shifted, optimum)


def parabolas(runs: Runs, law: Law) -> tuple[Parabola, ...]:
    """The parabola of every (budget, architecture) cell by r and budget, refused ones too."""
    found = []
    for index in range(runs.cell_count):
        cell = runs.take(runs.cell == index)
        try:
            widths: Widths | None = Widths.of(runs, law, float(cell.r[0]))
        except FitError:
            widths = None
        found.append(parabola(cell, widths))
    return tuple(sorted(found, key=lambda item: (item.r, item.budget)))


@dataclass(frozen=True)
class Minimum:
    """The best run of one (budget, architecture) cell, as measured; `parabola` is that of the cell's parabola."""

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


def minima(runs: Runs, parabolas: Sequence[Parabola]) -> tuple[Minimum, ...]:
    """One row per cell, by r and budget; `parabolas` are those of the same runs."""
    fitted = {(p.r, p.budget): p.optimum for p in parabolas}
    found = []
    for index in range(runs.cell_count):
        cell = runs.take(runs.cell == index)
        if np.isnan(cell.d_model).any():
            continue  # Ordinary transformers of unknown width.
        widths = np.unique(cell.d_model)
        losses = tuple(float(cell.val_loss[cell.d_model == d].min()) for d in widths)
        best = int(cell.val_loss.argmin())
        r, budget = float(cell.r[0]), float(cell.budget[0])
        found.append(
            Minimum(
                r, budget, str(cell.architecture[0]), len(cell), tuple(widths.tolist()), losses,
                float(cell.d_model[best]), float(cell.n_total[best]), float(cell.tokens[best]),
                float(cell.val_loss[best]), bool(widths[0] < cell.d_model[best] < widths[-1]), fitted[r, budget],
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda m: (m.r, m.budget)))


Exponents = tuple[float, float]
"""Log-log slopes of N* and of D* over C."""


def closed_form_exponents(alpha: float, beta: float, slope: float) -> Exponents:
    """Of N*(C) and D*(C) for F ~ N^k, as in the paper: beta/(alpha + k·beta) and alpha/(alpha + k·beta)."""
    return beta / (alpha + slope * beta), alpha / (alpha + slope * beta)


def exponents(optima: Sequence[Optimum]) -> Exponents | None:
    """Log-log slopes of N* and D* over C; None with fewer than two budgets."""
    usable = [o for o in optima if o.n is not None and o.tokens is not None]
    if len({o.flops for o in usable}) < 2:
        return None
    log_c = np.log([o.flops for o in usable])
    n, tokens = ([getattr(o, key) for o in usable] for key in ("n", "tokens"))
    return float(np.polyfit(log_c, np.log(n), 1)[0]), float(np.polyfit(log_c, np.log(tokens), 1)[0])


@dataclass(frozen=True)
class Gap:
    """L*_r(C) - L*_base(C), in nats."""

    r: float
    flops: float
    gap: float


def frontier_gaps(optima: Sequence[Optimum], base: float = 1.0) -> tuple[Gap, ...]:
    """The gap of every r to `base` wherever both are known."""
    floor = {o.flops: o.loss for o in optima if o.r == base and o.loss is not None}
    known = [(o.r, o.flops, o.loss) for o in optima if o.r != base and o.loss is not None]
    return tuple(Gap(r, flops, loss - floor[flops]) for r, flops, loss in known if flops in floor)


@dataclass(frozen=True)
class FromLaw:
    """Optima under one law for every budget, and the exponents of N* and D*."""

    optima: tuple[Optimum, ...]
    exponents: Exponents | None
    status: str = optional()
    """Of the Chinchilla law fitted to one r alone."""
    closed_form_exponents: Exponents = optional()
    """By the paper's formula, for that law."""


@dataclass(frozen=True)
class AllocationOfR:
    """Compute-optimal allocation at one r, in each of the three ways."""

    r: float
    exact_flops: bool
    flops_slope: float
    from_joint_law: FromLaw
    from_parabolas: dict[str, Exponents | None]
    """Of their minima, under the key `exponents`."""
    from_own_chinchilla: FromLaw | None = optional()


@dataclass(frozen=True)
class AllocationRefused:
    """Why there is no allocation at one r."""

    r: float
    refusal: str


@dataclass(frozen=True)
class Allocation:
    """Everything on allocation that a report holds."""

    parabolas: tuple[Parabola, ...]
    per_r: tuple[AllocationOfR | AllocationRefused, ...]
    frontier_gaps: dict[str, tuple[Gap, ...]]
    """Gaps to r=1: of the minima of `parabolas`, and under the `joint_law`."""


def allocate(
    runs: Runs, result: FitResult, alone: Mapping[float, FitResult], curves: tuple[Parabola, ...]
) -> Allocation:
    """Allocation at every r: under the fitted law, under the Chinchilla fit of each r `alone`, and from parabolas."""
    budgets = np.unique(runs.budget)
    optima = [p.optimum for p in curves]
    rows: list[AllocationOfR | AllocationRefused] = []
    joint_optima: list[Optimum] = []
    for r in map(float, runs.recurrences):
        if isinstance(result.law, OneTokenLaw):
            rows.append(AllocationRefused(r, "runs of one token count do not say what tokens are worth"))
            continue
        try:
            widths = Widths.of(runs, result.law, r)
        except FitError as error:
            rows.append(AllocationRefused(r, str(error)))
            continue
        joint = tuple(law_optimum(result.law, result.theta, widths, c) for c in budgets)
        joint_optima += joint
        own, from_own = alone.get(r), None
        if own is not None:
            best = tuple(law_optimum(own.law, own.theta, widths, c) for c in budgets)
            closed = closed_form_exponents(own["alpha"], own["beta"], widths.slope)
            from_own = FromLaw(best, exponents(best), own.status.value, closed)
        from_parabolas = {"exponents": exponents([o for o in optima if o.r == r])}
        from_joint = FromLaw(joint, exponents(joint))
        rows.append(AllocationOfR(r, widths.exact, widths.slope, from_joint, from_parabolas, from_own))
    gaps = {"parabolas": frontier_gaps(optima), "joint_law": frontier_gaps(joint_optima)}
    return Allocation(curves, tuple(rows), gaps)
