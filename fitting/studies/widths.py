"""The parameter counts and the FLOPs per token of one architecture as functions of its width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.laws import Inputs, Law

_EXACT = 1e-6


@dataclass(frozen=True, eq=False)
class Widths:
    """F(N) and the parameter counts of one architecture as smooth functions of the width.

    Counts and FLOPs of a fixed layout are polynomials c0 + c1·d + c2·d² in the width, so least squares on the
    sampled widths gives them back exactly (`exact`). If it does not, log F is a quadratic in log N instead.
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
        """From the runs with this r, counted as `law` counts. Raises `FitError` with fewer than two widths."""
        chosen = runs.take(runs.r == r)
        if not len(chosen):
            sampled = ", ".join(f"{v:g}" for v in runs.recurrences)
            raise FitError(f"There are no runs with r={r:g}. Sampled: {sampled}")
        widths, first = np.unique(chosen.d_model, return_index=True)
        if len(widths) < 2:
            where = f"All runs with r={r:g} have d_model={widths[0]:g}"
            raise FitError(f"{where}: F(N) is unknown. Add another width")
        x = law.inputs(chosen).take(first)
        flops, n_total = chosen.flops_per_token[first], chosen.n_total[first]
        once, rec, poly = (_polynomial(widths, column) for column in (x.n_once, x.n_rec, flops))
        log_n, log_f = np.log(n_total), np.log(flops)
        smooth = np.polyfit(log_n, log_f, min(2, len(widths) - 1))
        of_flops = np.abs(_value(poly, widths) / flops - 1).max()
        of_rec = np.abs(_value(rec, widths) / x.n_rec - 1).max()
        n_range = float(n_total.min()), float(n_total.max())
        slope = float(np.polyfit(log_n, log_f, 1)[0])
        exact = bool(max(of_flops, of_rec) < _EXACT)
        return cls(r, widths, n_range, exact, slope, once, rec, poly, np.asarray(smooth))

    def counts(self, width: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(N_once, N_rec) at widths (k,)."""
        return _value(self._once, width), _value(self._rec, width)

    def n_total(self, width: np.ndarray) -> np.ndarray:
        """N at widths (k,)."""
        return np.asarray(sum(self.counts(width)))

    def flops(self, width: np.ndarray) -> np.ndarray:
        """F at widths (k,)."""
        if self.exact:
            return _value(self._flops, width)
        return np.asarray(np.exp(np.polyval(self._log_flops, np.log(self.n_total(width)))))

    def width_of(self, n: float) -> float:
        """The width whose N is `n`. Raises `FitError` unless it is between an eighth of the smallest and eight times
        the largest sampled width."""
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
        total = np.broadcast_to(np.asarray(flops, dtype=float), width.shape)
        r, study = np.full(len(width), self.r), np.zeros(len(width))
        return Inputs(*self.counts(width), r, total / self.flops(width), total, study)


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
