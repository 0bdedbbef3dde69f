"""The laws that are shipped: Chinchilla's, the joint law over recurrences, and a law plus a constant shift.

Shapes as in `fitting.laws.law`: theta (S, P), predictions (S, n) in nats per token, gradients (S, P, n).
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from fitting.data.splits import PAPER, Split
from fitting.laws.law import Inputs, Law
from fitting.laws.multipliers import Multiplier, Power

# The box of the paper's fits, in solver coordinates.
_LOG_AMPLITUDE, _EXPONENT, _LOG_E = (-5.0, 35.0), (0.0, 2.5), (-3.0, 2.0)


class AdditiveLaw(Law):
    """L = E + A·M^-alpha + B·D^-beta with some effective size M(psi; run): equations 1 and 2 of arXiv 2604.21106.

    Solver coordinates are (log A, alpha, log B, beta, log E, psi...), evaluated by log-sum-exp.
    """

    log_parameters = frozenset({"A", "B", "E"})

    @abstractmethod
    def effective_size(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """log M (S, n) or (1, n), and its derivative by the psi (S, q, n), for psi (S, q)."""

    def log_loss_and_gradient(self, theta: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """log L (S, n) and its derivative (S, P, n)."""
        a, alpha, b, beta, e = (theta[:, i : i + 1] for i in range(5))
        log_m, by_psi = self.effective_size(theta[:, 5:], x)
        size_term, data_term = a - alpha * log_m, b - beta * x.log_tokens
        largest = np.maximum(np.maximum(size_term, data_term), e)
        size_share = np.exp(size_term - largest)
        data_share = np.exp(data_term - largest)
        floor_share = np.exp(e - largest)
        total = size_share + data_share + floor_share
        size_share /= total
        data_share /= total
        floor_share /= total
        gradient = np.empty((len(theta), theta.shape[1], len(x)))
        gradient[:, 0] = size_share
        gradient[:, 1] = -size_share * log_m
        gradient[:, 2] = data_share
        gradient[:, 3] = -data_share * x.log_tokens
        gradient[:, 4] = floor_share
        if theta.shape[1] > 5:
            gradient[:, 5:] = -(alpha * size_share)[:, None, :] * by_psi
        return largest + np.log(total), gradient

    def improve_starts(self, theta: np.ndarray, x: Inputs, log_loss: np.ndarray) -> np.ndarray:
        """A, B and E enter linearly: give each start its least-squares ones, where those lie in the box.

        Uniform starts alone are mostly wasted: their amplitudes are orders of magnitude off.
        """
        log_m, _ = self.effective_size(theta[:, 5:], x)
        size = -theta[:, 1:2] * (log_m - log_m.mean(axis=1, keepdims=True))
        data = -theta[:, 3:4] * (x.log_tokens - x.log_tokens.mean())
        weight = np.exp(-log_loss)
        columns = np.stack([np.exp(size), np.exp(data), np.ones_like(size)], axis=1) * weight
        matrix = columns @ columns.transpose(0, 2, 1)
        index = np.arange(3)
        matrix[:, index, index] *= 1 + 1e-9
        solved = np.linalg.solve(matrix, columns.sum(axis=2)[:, :, None])[:, :, 0]
        with np.errstate(all="ignore"):
            logs = np.log(solved)
        moved = theta.copy()
        moved[:, 0] = logs[:, 0] + theta[:, 1] * log_m.mean(axis=1)
        moved[:, 2] = logs[:, 1] + theta[:, 3] * x.log_tokens.mean()
        moved[:, 4] = logs[:, 2]
        bounds = np.asarray(self.bounds, dtype=float)
        inside = (np.isfinite(moved) & (moved >= bounds[:, 0]) & (moved <= bounds[:, 1])).all(axis=1)
        return np.where(inside[:, None], moved, theta)

    def predict(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        """Loss in nats per token, (S, n)."""
        return np.asarray(np.exp(self.log_loss_and_gradient(theta, x)[0]))

    def gradient(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        """Derivative of the loss, (S, P, n)."""
        log_loss, gradient = self.log_loss_and_gradient(theta, x)
        return np.asarray(np.exp(log_loss)[:, None, :] * gradient)


class ChinchillaLaw(AdditiveLaw):
    """L = E + A·N^-alpha + B·D^-beta on unique parameters N = N_once + N_rec: one fit per architecture."""

    name = "chinchilla"
    param_names = ("A", "alpha", "B", "beta", "E")
    bounds = np.array([_LOG_AMPLITUDE, _EXPONENT, _LOG_AMPLITUDE, _EXPONENT, _LOG_E])

    def effective_size(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """log N (1, n); no further parameters."""
        return np.log(x.n_total)[None], np.empty((len(psi), 0, len(x)))


class JointLaw(AdditiveLaw):
    """L = E + A·(N_once + m(r)·N_rec)^-alpha + B·D^-beta over all recurrences; paper equation 2 has m = r^phi.

    Args:
        multiplier: the form of m; `Power()` (phi free) by default.
        split: where the injection is counted; see `fitting.data.splits`.
    """

    def __init__(self, multiplier: Multiplier | None = None, split: Split = PAPER) -> None:
        self.multiplier = multiplier if multiplier is not None else Power()
        self.split = split
        self.name = f"joint, m = {self.multiplier.formula}"
        self.param_names = ("A", "alpha", "B", "beta", "E", *self.multiplier.param_names)
        self.bounds = np.array([*ChinchillaLaw.bounds.tolist(), *self.multiplier.bounds])
        self.log_parameters = frozenset({"A", "B", "E"}) | self.multiplier.log_parameters
        self.needs_several_r = bool(self.multiplier.param_names)

    def bound_to(self, x: Inputs) -> JointLaw:
        """With the multiplier's constants (reference point, set of r) taken from the data."""
        return JointLaw(self.multiplier.bound_to(x.r, x.flops, x.tokens), self.split)

    def effective_size(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """log(N_once + m·N_rec) (S, n) and its derivative (S, q, n)."""
        m, by_psi = self.multiplier(psi, x)
        recurrent = m * x.n_rec
        size = x.n_once + recurrent
        return np.log(size), (x.n_rec / size)[:, None, :] * by_psi


class LossShift(Law):
    """Another law plus a constant shift, in nats, for the r>1 runs of the case study: the rival of a change of phi."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self.split = law.split
        self.name = f"{law.name}, plus shift"
        self.param_names = (*law.param_names, "shift")
        self.bounds = np.array([*np.asarray(law.bounds).tolist(), (-1.0, 1.0)])
        self.log_parameters = law.log_parameters
        self.needs_several_r = True

    def bound_to(self, x: Inputs) -> LossShift:
        """With the inner law's constants taken from the data."""
        return LossShift(self.law.bound_to(x))

    def improve_starts(self, theta: np.ndarray, x: Inputs, log_loss: np.ndarray) -> np.ndarray:
        """The inner law's starts improved, the shift as drawn."""
        inner = self.law.improve_starts(theta[:, :-1], x, log_loss)
        return np.concatenate([inner, theta[:, -1:]], axis=1)

    def predict(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        """Loss in nats per token, (S, n)."""
        # The sum may pass zero far from any solution; log L must stay finite there.
        shifted = self.law.predict(theta[:, :-1], x) + theta[:, -1:] * self._where(x)
        return np.asarray(np.maximum(shifted, 1e-6))

    def gradient(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        """Derivative of the loss, (S, P, n)."""
        inner = self.law.gradient(theta[:, :-1], x)
        return np.concatenate([inner, np.broadcast_to(self._where(x), inner[:, :1].shape)], axis=1)

    @staticmethod
    def _where(x: Inputs) -> np.ndarray:
        return np.where(x.r > 1, x.study, 0.0)
