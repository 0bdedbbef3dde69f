"""m(r): how many once-used parameters one recurrent parameter is worth at r recurrences.

The paper's form is r^phi; the others are its rivals. Every form gives m(1) = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from fitting.laws.law import Inputs

_PHI_BOX = (-3.0, 3.0)


class Multiplier(ABC):
    """One form of m(r; psi), for S vectors psi (S, q) of the q parameters at once, on n runs."""

    formula: str
    param_names: tuple[str, ...] = ()
    bounds: tuple[tuple[float, float], ...] = ()
    log_parameters: frozenset[str] = frozenset()

    @abstractmethod
    def __call__(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """m (S, n) or (1, n) and its derivative by psi (S, q, n)."""

    def bound_to(self, r: np.ndarray, flops: np.ndarray, tokens: np.ndarray) -> Multiplier:
        """This form with the constants it takes from the data."""
        return self


class Power(Multiplier):
    """m = r^phi (paper equation 2)."""

    formula = "r^phi"
    param_names = ("phi",)
    bounds = (_PHI_BOX,)

    def __call__(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        log_r = np.log(x.r)
        m = np.exp(psi * log_r)
        return m, (m * log_r)[:, None, :]


class FixedPower(Multiplier):
    """m = r^phi with phi given, as in the paper's fits with phi = 0 and phi = 1."""

    def __init__(self, phi: float) -> None:
        self.phi = float(phi)
        self.formula = f"r^{self.phi:g}"

    def __call__(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        return (x.r**self.phi)[None], np.empty((len(psi), 0, len(x.r)))


class PerRecurrence(Multiplier):
    """A free m for every r > 1 of the data: the yardstick for the other forms."""

    formula = "free for each r"

    def __init__(self, recurrences: tuple[float, ...] = ()) -> None:
        self.recurrences = recurrences
        self.param_names = tuple(f"m_{r:g}" for r in recurrences)
        self.bounds = tuple((-3 * np.log(r), 3 * np.log(r)) for r in recurrences)
        self.log_parameters = frozenset(self.param_names)

    def __call__(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        member = (x.r == np.array(self.recurrences)[:, None]).astype(float)
        m = np.exp(psi @ member)
        return m, m[:, None, :] * member

    def bound_to(self, r: np.ndarray, flops: np.ndarray, tokens: np.ndarray) -> PerRecurrence:
        return PerRecurrence(tuple(float(value) for value in np.unique(r) if value > 1))


class Saturating(Multiplier):
    """m = 1 + c·(1 - r^-k), at most 1 + c. As k goes to 0 it nears 1 + c·k·log r, which leaves only c·k determined."""

    formula = "1 + c(1 - r^-k)"
    param_names = ("c", "k")
    bounds = ((-1.0, 50.0), (0.01, 5.0))

    def __call__(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        c, k = psi[:, :1], psi[:, 1:]
        log_r = np.log(x.r)
        decay = np.exp(-k * log_r)
        return 1 + c * (1 - decay), np.stack([1 - decay, c * decay * log_r], axis=1)


class LogGrowth(Multiplier):
    """m = 1 + c·log r, kept above 0.01; where loops help, it never gets that low."""

    formula = "1 + c log r"
    param_names = ("c",)
    bounds = ((-0.3, 20.0),)

    def __call__(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        log_r = np.log(x.r)
        m = 1 + psi * log_r
        low = m < 0.01
        return np.where(low, 0.01, m), np.where(low, 0.0, log_r)[:, None, :]


class _TiltedPower(Multiplier):
    """m = r^(phi + tilt·z) for some column z of the runs."""

    @abstractmethod
    def _column(self, x: Inputs) -> np.ndarray:
        """z (n,)."""

    def __call__(self, psi: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        log_r, z = np.log(x.r), self._column(x)
        m = np.exp((psi[:, :1] + psi[:, 1:] * z) * log_r)
        return m, np.stack([m * log_r, m * log_r * z], axis=1)


class DriftingPower(_TiltedPower):
    """m = r^(phi + slope·log(z/z_ref)) with z the training FLOPs.

    phi is the exponent at z_ref: the geometric mean over the data unless given. The formula states its value.
    """

    param_names = ("phi", "slope")
    bounds = (_PHI_BOX, (-1.0, 1.0))
    letter = "C"

    def __init__(self, reference: float | None = None) -> None:
        self.reference = reference
        at = f"{self.letter}_ref" if reference is None else f"{reference:.4g}"
        self.formula = f"r^(phi + slope·log({self.letter}/{at}))"

    def _column(self, x: Inputs) -> np.ndarray:
        return np.log(self._variable(x.flops, x.tokens) / (self.reference or 1.0))

    def bound_to(self, r: np.ndarray, flops: np.ndarray, tokens: np.ndarray) -> DriftingPower:
        if self.reference is not None:
            return self
        return type(self)(float(np.exp(np.log(self._variable(flops, tokens)).mean())))

    @staticmethod
    def _variable(flops: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return flops


class TokenDriftingPower(DriftingPower):
    """`DriftingPower` with the training tokens D in place of the FLOPs."""

    letter = "D"

    @staticmethod
    def _variable(flops: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return tokens


class StudyPower(_TiltedPower):
    """m = r^(phi + delta_phi·x), x = 1 for the runs of a case study: the paired change of phi."""

    formula = "r^(phi + delta_phi·study)"
    param_names = ("phi", "delta_phi")
    bounds = (_PHI_BOX, (-3.0, 3.0))

    def _column(self, x: Inputs) -> np.ndarray:
        return x.study
