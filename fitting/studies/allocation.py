"""Compute-optimal size and tokens: from a law in closed form, from a law with the exact FLOPs, from
parabolas.

All three are labelled, because they answer the question differently and their exponents differ by up to 0.1.
C is in training FLOPs, F in training FLOPs per token, N in parameters, D in tokens, L in nats per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.laws.laws import Inputs, Law

_EXACT = 1e-6


@dataclass(frozen=True, eq=False)
class Widths:
    """F(N) and the parameter counts of one architecture as smooth functions of the width.

    Counts and FLOPs of a fixed layout are polynomials c0 + c1·d + c2·d² in the width, so that least squares
    on the sampled widths gives them back exactly (`exact`); where it does not, log F is a quadratic in log
    N instead.
    """

    r: float
    sampled: np.ndarray
    """Sampled widths, ascending."""
    n_range: tuple[float, float]
    exact: bool
    slope: float
    """k: log-log slope of F over N across the sampled widths."""
    _once: np.ndarray
    _rec: np.ndarray
    _flops: np.ndarray
    _log_flops: np.ndarray

    @classmethod
    def of(cls, runs: Runs, law: Law, r: float) -> Widths:
        """From the runs with this r, counted as `law` counts. Raises `FitError` with fewer than two
        widths.
        """
        chosen = runs.take(runs.r == r)
        if not len(chosen):
            raise FitError(
                f"There are no runs with r={r:g}. Sampled: {', '.join(f'{v:g}' for v in runs.recurrences)}"
            )
        widths, first = np.unique(chosen.d_model, return_index=True)
        if len(widths) < 2:
            raise FitError(
                f"All runs with r={r:g} have d_model={widths[0]:g}: F(N) is unknown. Add another width"
            )
        x = law.inputs(chosen).take(first)
        flops = chosen.flops_per_token[first]
        once, rec, poly = (_polynomial(widths, column) for column in (x.n_once, x.n_rec, flops))
        log_n, log_f = np.log(chosen.n_total[first]), np.log(flops)
        smooth = np.polyfit(log_n, log_f, min(2, len(widths) - 1))
        fits = (
            np.abs(_value(poly, widths) / flops - 1).max(),
            np.abs(_value(rec, widths) / x.n_rec - 1).max(),
        )
        n_total = chosen.n_total[first]
        return cls(
            r, widths, (float(n_total.min()), float(n_total.max())), bool(max(fits) < _EXACT),
            float(np.polyfit(log_n, log_f, 1)[0]), once, rec, poly, np.asarray(smooth),
        )  # fmt: skip

    def counts(self, width: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(N_once, N_rec) at widths (k,)."""
        return _value(self._once, width), _value(self._rec, width)

    def n_total(self, width: np.ndarray) -> np.ndarray:
        """N at widths (k,)."""
        once, rec = self.counts(width)
        return np.asarray(once + rec)

    def flops(self, width: np.ndarray) -> np.ndarray:
        """F at widths (k,)."""
        if self.exact:
            return _value(self._flops, width)
        return np.asarray(np.exp(np.polyval(self._log_flops, np.log(self.n_total(width)))))

    def width_of(self, n: float) -> float:
        """The width whose N is `n`, between an eighth of the smallest and eight times the largest sampled
        one. Raises `FitError` outside.
        """
        grid = np.geomspace(self.sampled[0] / 8, self.sampled[-1] * 8, 4000)
        totals = self.n_total(grid)
        if not totals[0] * (1 - 1e-9) <= n <= totals[-1] * (1 + 1e-9):
            raise FitError(
                f"N = {n:.4g} at r={self.r:g} is out of reach: the sampled widths {self.sampled[0]:g} to "
                f"{self.sampled[-1]:g} carry from {totals[0]:.3g} to {totals[-1]:.3g} parameters (an eighth to "
                "eight times the width). Choose N in between"
            )
        return float(np.exp(np.interp(np.log(n), np.log(totals), np.log(grid))))

    def inputs(self, width: np.ndarray, flops: float | np.ndarray) -> Inputs:
        """Law inputs for models of these widths (k,) trained with `flops` C each."""
        once, rec = self.counts(width)
        total = np.broadcast_to(np.asarray(flops, dtype=float), width.shape)
        return Inputs(
            once, rec, np.full(len(width), self.r), total / self.flops(width), total, np.zeros(len(width))
        )


def _polynomial(width: np.ndarray, values: np.ndarray) -> np.ndarray:
    powers = (1, 2) if len(width) < 3 else (0, 1, 2)
    scale = width.max()
    basis = np.stack([(width / scale) ** p for p in powers], axis=1)
    found = np.linalg.lstsq(basis / values[:, None], np.ones(len(values)), rcond=None)[0]
    coefficients = np.zeros(3)
    for power, value in zip(powers, found, strict=True):
        coefficients[power] = value / scale**power
    return coefficients


def _value(coefficients: np.ndarray, width: np.ndarray) -> np.ndarray:
    return np.asarray(coefficients[0] + coefficients[1] * width + coefficients[2] * width**2)


# ---------------------------------------------------------------------------------------------- optima


@dataclass(frozen=True)
class Optimum:
    """The best model of one r at one budget; `refusal` says why a number should not be used, if so."""

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

    # The loss has one minimum in the width: a grid, then four zooms into the two intervals around its
    # lowest point.
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
    return Optimum(
        "law with exact F(N)" if widths.exact else "law with a smooth F(N)",
        widths.r,
        flops,
        n,
        float(flops / widths.flops(width)[0]),
        float(np.exp(losses[best])),
        refusal if outside else None,
        float(width[0]),
    )


@dataclass(frozen=True)
class Parabola:
    """L = a + b·u + c·u², u = log N, of one (budget, r) cell, and its minimum (None with a reason if
    refused).
    """

    r: float
    budget: float
    runs: int
    coefficients: tuple[float, float, float] | None
    optimum: Optimum


def parabola(runs: Runs, widths: Widths | None) -> Parabola:
    """The iso-FLOPs parabola of one cell's runs in log N; F34: refused unless it opens upwards with its
    minimum inside.

    `widths` gives D* = C/F(N*); without it D* is left out.
    """
    r, budget = float(runs.r[0]), float(runs.budget[0])
    log_n = np.log(runs.n_total)
    sizes = len(np.unique(log_n.round(9)))

    def refused(reason: str, coefficients: tuple[float, float, float] | None = None) -> Parabola:
        return Parabola(
            r, budget, len(runs), coefficients, Optimum("parabola", r, budget, None, None, None, reason)
        )

    if sizes < 3:
        return refused(f"{sizes} sizes do not make a parabola (3 needed)")
    centre = log_n.mean()
    c, b, a = np.polyfit(log_n - centre, runs.val_loss, 2)
    shifted = (float(a - b * centre + c * centre**2), float(b - 2 * c * centre), float(c))
    if c <= 0:
        return refused("the parabola opens downwards", shifted)
    at = centre - b / (2 * c)
    if not log_n.min() <= at <= log_n.max():
        return refused(
            f"the minimum N = {np.exp(at):.3g} lies outside the sampled {np.exp(log_n.min()):.3g} to "
            f"{np.exp(log_n.max()):.3g}",
            shifted,
        )
    n, loss = float(np.exp(at)), float(a - b * b / (4 * c))
    width = widths.width_of(n) if widths is not None else None
    tokens = float(budget / widths.flops(np.array([width]))[0]) if widths is not None else None
    optimum = Optimum("parabola", r, budget, n, tokens, loss, d_model=width)
    return Parabola(r, budget, len(runs), shifted, optimum)


def parabolas(runs: Runs, law: Law) -> list[Parabola]:
    """The parabola of every (budget, architecture) cell, refused ones too."""
    found = []
    for index in range(runs.cell_count):
        cell = runs.take(runs.cell == index)
        try:
            widths: Widths | None = Widths.of(runs, law, float(cell.r[0]))
        except FitError:
            widths = None
        found.append(parabola(cell, widths))
    return sorted(found, key=lambda item: (item.r, item.budget))


def closed_form_exponents(alpha: float, beta: float, slope: float) -> tuple[float, float]:
    """Exponents of N*(C) and D*(C) for F ~ N^k: beta/(alpha + k·beta) and alpha/(alpha + k·beta); the
    paper's.
    """
    return beta / (alpha + slope * beta), alpha / (alpha + slope * beta)


def exponents(optima: list[Optimum]) -> tuple[float, float] | None:
    """Log-log slopes of N* and D* over C; None with fewer than two budgets."""
    usable = [o for o in optima if o.n is not None and o.tokens is not None]
    if len({o.flops for o in usable}) < 2:
        return None
    log_c = np.log([o.flops for o in usable])
    slopes = [
        float(np.polyfit(log_c, np.log([getattr(o, k) for o in usable]), 1)[0]) for k in ("n", "tokens")
    ]
    return slopes[0], slopes[1]


def frontier_gaps(optima: list[Optimum], base: float = 1.0) -> list[dict[str, float]]:
    """L*_r(C) - L*_base(C) in nats wherever both are known."""
    floor = {o.flops: o.loss for o in optima if o.r == base and o.loss is not None}
    return [
        {"r": o.r, "flops": o.flops, "gap": o.loss - floor[o.flops]}
        for o in optima
        if o.r != base and o.loss is not None and o.flops in floor
    ]
