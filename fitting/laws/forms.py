"""The shipped laws: Chinchilla's, the joint law over recurrences, and a law plus a constant shift."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from fitting.data.splits import PAPER, Split
from fitting.errors import FitError
from fitting.laws.law import Inputs, Law
from fitting.laws.multipliers import Multiplier, Power

# The box of the paper's fits, in solver coordinates.
_LOG_AMPLITUDE, _EXPONENT, _LOG_E = (-5.0, 35.0), (0.0, 2.5), (-3.0, 2.0)


SAME_TOKENS = 0.02
"""Token counts this close in logarithm are one."""


class AdditiveLaw(Law):
    """L = E + A·M^-alpha + B·D^-beta with an effective size M(psi): equations 1 and 2 of arXiv 2604.21106.

    Solver coordinates are (log A, alpha, log B, beta, log E, psi...).
    """

    log_parameters = frozenset({"A", "B", "E"})
    first_psi = 5
    """Where the coordinates psi begin."""

    @abstractmethod
    def effective_size(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """log M (S, n) or (1, n), and its derivative by psi (S, q, n), for psi (S, q)."""

    def log_loss_and_gradient(self, theta: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
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
        gradient = np.empty((len(theta), theta.shape[1], len(x)))
        gradient[:, 0] = size_share
        gradient[:, 1] = -size_share * log_m
        gradient[:, 2] = data_share
        gradient[:, 3] = -data_share * x.log_tokens
        gradient[:, 4] = floor_share / total
        gradient[:, 5:] = -(alpha * size_share)[:, None, :] * by_psi
        return largest + np.log(total), gradient

    def improve_starts(self, theta: np.ndarray, x: Inputs, log_loss: np.ndarray) -> np.ndarray:
        """Give each start the least-squares A, B and E, if those are in the box: drawn values are far off."""
        log_m, _ = self.effective_size(theta[:, 5:], x)
        size = -theta[:, 1:2] * (log_m - log_m.mean(axis=1, keepdims=True))
        data = -theta[:, 3:4] * (x.log_tokens - x.log_tokens.mean())
        weight = np.exp(-log_loss)
        columns = np.stack([np.exp(size), np.exp(data), np.ones_like(size)], axis=1) * weight
        matrix = columns @ columns.transpose(0, 2, 1)
        matrix[:, range(3), range(3)] *= 1 + 1e-9
        solved = np.linalg.solve(matrix, columns.sum(axis=2)[:, :, None])[:, :, 0]
        with np.errstate(all="ignore"):
            logs = np.log(solved)
        moved = theta.copy()
        moved[:, 0] = logs[:, 0] + theta[:, 1] * log_m.mean(axis=1)
        moved[:, 2] = logs[:, 1] + theta[:, 3] * x.log_tokens.mean()
        moved[:, 4] = logs[:, 2]
        low, high = np.asarray(self.bounds, dtype=float).T
        inside = (np.isfinite(moved) & (moved >= low) & (moved <= high)).all(axis=1)
        return np.where(inside[:, None], moved, theta)

    def predict(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        return np.exp(self.log_loss_and_gradient(theta, x)[0])

    def gradient(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        log_loss, gradient = self.log_loss_and_gradient(theta, x)
        return np.exp(log_loss)[:, None, :] * gradient


class ChinchillaLaw(AdditiveLaw):
    """L = E + A·N^-alpha + B·D^-beta, N = N_once + N_rec: one fit per architecture.

    It takes N whole, wherever the injection is counted; `count` is what `Split.saying` puts into its split's name.
    """

    name = "chinchilla"
    param_names: tuple[str, ...] = ("A", "alpha", "B", "beta", "E")
    bounds = np.array([_LOG_AMPLITUDE, _EXPONENT, _LOG_AMPLITUDE, _EXPONENT, _LOG_E])

    def __init__(self, count: str = "") -> None:
        self.split = PAPER.saying(count)

    def effective_size(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        return np.log(x.n_total)[None], np.empty((len(psi), 0, len(x)))


class EqualExponentsLaw(ChinchillaLaw):
    """L = E + A·N^-alpha + B·D^-alpha: Chinchilla's law with one exponent, so that N* and D* grow alike."""

    name = "chinchilla, alpha = beta"
    param_names = ("A", "alpha", "B", "E")
    bounds = np.array([_LOG_AMPLITUDE, _EXPONENT, _LOG_AMPLITUDE, _LOG_E])

    def log_loss_and_gradient(self, theta: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        log_loss, gradient = super().log_loss_and_gradient(theta[:, [0, 1, 2, 1, 3]], x)
        gradient[:, 1] += gradient[:, 3]
        return log_loss, gradient[:, [0, 1, 2, 4]]

    def improve_starts(self, theta: np.ndarray, x: Inputs, log_loss: np.ndarray) -> np.ndarray:
        whole = theta[:, [0, 1, 2, 1, 3]]
        found = ChinchillaLaw(self.split.count).improve_starts(whole, x, log_loss)
        return found[:, [0, 1, 2, 4]]


class JointLaw(AdditiveLaw):
    """L = E + A·(N_once + m(r)·N_rec)^-alpha + B·D^-beta over all r; paper equation 2 has m = r^phi.

    `multiplier` is the form of m (phi free by default), `split` says where the injection is counted.
    """

    def __init__(self, multiplier: Multiplier | None = None, split: Split = PAPER) -> None:
        self.multiplier = multiplier if multiplier is not None else Power()
        self.split = split
        self.name = f"joint, m = {self.multiplier.formula}"
        self.param_names = (*ChinchillaLaw.param_names, *self.multiplier.param_names)
        self.bounds = np.array([*ChinchillaLaw.bounds.tolist(), *self.multiplier.bounds])
        self.log_parameters = AdditiveLaw.log_parameters | self.multiplier.log_parameters
        self.needs_several_r = bool(self.multiplier.param_names)

    def bound_to(self, x: Inputs) -> JointLaw:
        return JointLaw(self.multiplier.bound_to(x.r, x.flops, x.tokens), self.split)

    def effective_size(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        m, by_psi = self.multiplier(psi, x)
        recurrent = m * x.n_rec
        size = x.n_once + recurrent
        return np.log(size), (x.n_rec / size)[:, None, :] * by_psi


class OneTokenLaw(AdditiveLaw):
    """L = E + A·(N_once + m(r)·N_rec)^-alpha for runs that all saw the same D: E holds the tokens' term.

    phi is exact there without beta. `multiplier` and `split` are as in `JointLaw`.
    """

    first_psi = 3
    _WITHOUT = (2, 3)  # B and beta among the coordinates of an additive law.
    _NO_AMPLITUDE = -700.0

    def __init__(self, multiplier: Multiplier | None = None, split: Split = PAPER) -> None:
        self.joint = JointLaw(multiplier, split)
        self.split = split
        self.name = f"one token count, m = {self.joint.multiplier.formula}"
        kept = [i for i in range(len(self.joint.param_names)) if i not in self._WITHOUT]
        self.param_names = tuple(self.joint.param_names[i] for i in kept)
        self.bounds = self.joint.bounds[kept]
        self.log_parameters = self.joint.log_parameters - {"B"}
        self.needs_several_r = self.joint.needs_several_r

    def bound_to(self, x: Inputs) -> OneTokenLaw:
        """This law. Raises `FitError` for runs of several token counts, whose differences it cannot explain."""
        if np.ptp(x.log_tokens) > SAME_TOKENS:
            raise FitError(
                f"The runs saw from {x.tokens.min():.3g} to {x.tokens.max():.3g} tokens, and this law is for one token "
                "count. Choose one with --where, or fit the joint law"
            )
        return OneTokenLaw(self.joint.multiplier.bound_to(x.r, x.flops, x.tokens), self.split)

    def effective_size(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        return self.joint.effective_size(psi, x)

    def log_loss_and_gradient(self, theta: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        whole = np.insert(theta, [2, 2], [self._NO_AMPLITUDE, 0.0], axis=1)
        log_loss, gradient = self.joint.log_loss_and_gradient(whole, x)
        return log_loss, np.delete(gradient, self._WITHOUT, axis=1)

    def improve_starts(self, theta: np.ndarray, x: Inputs, log_loss: np.ndarray) -> np.ndarray:
        """Give each start the least-squares A and E, if those are in the box."""
        log_m, _ = self.effective_size(theta[:, self.first_psi :], x)
        size = np.exp(-theta[:, 1:2] * (log_m - log_m.mean(axis=1, keepdims=True)))
        loss = np.exp(log_loss)
        centred = size - size.mean(axis=1, keepdims=True)
        slope = (centred * loss).sum(axis=1) / ((centred**2).sum(axis=1) + 1e-300)
        floor = loss.mean() - slope * size.mean(axis=1)
        moved = theta.copy()
        with np.errstate(all="ignore"):
            moved[:, 0] = np.log(slope) + theta[:, 1] * log_m.mean(axis=1)
            moved[:, 2] = np.log(floor)
        low, high = np.asarray(self.bounds, dtype=float).T
        inside = (np.isfinite(moved) & (moved >= low) & (moved <= high)).all(axis=1)
        return np.where(inside[:, None], moved, theta)


class LossShift(Law):
    """Another law plus a constant shift (nats) of the study's r>1 runs: the rival of a change of phi."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self.split = law.split
        self.name = f"{law.name}, plus shift"
        self.param_names = (*law.param_names, "shift")
        self.bounds = np.array([*np.asarray(law.bounds).tolist(), (-1.0, 1.0)])
        self.log_parameters = law.log_parameters
        self.needs_several_r = True

    def bound_to(self, x: Inputs) -> LossShift:
        return LossShift(self.law.bound_to(x))

    def improve_starts(self, theta: np.ndarray, x: Inputs, log_loss: np.ndarray) -> np.ndarray:
        inner = self.law.improve_starts(theta[:, :-1], x, log_loss)
        return np.concatenate([inner, theta[:, -1:]], axis=1)

    def predict(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        # The sum may fall below zero far from any solution; log L must stay finite there.
        return np.maximum(self.law.predict(theta[:, :-1], x) + theta[:, -1:] * self._where(x), 1e-6)

    def gradient(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        inner = self.law.gradient(theta[:, :-1], x)
        return np.concatenate([inner, np.broadcast_to(self._where(x), inner[:, :1].shape)], axis=1)

    @staticmethod
    def _where(x: Inputs) -> np.ndarray:
        return np.where(x.r > 1, x.study, 0.0)
