"""What a law is: the class to subclass, and the columns of the runs that it may read.

Shapes, for S parameter vectors at once on n runs with P parameters: theta (S, P) in solver coordinates, predictions
(S, n) in nats per token, gradients (S, P, n).

A law of your own sets `param_names` and `bounds` and implements `predict` and `gradient`. Name it by class path
(`--law mypackage.mymodule.MyLaw`) or pass an instance to `fitting.fit`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from fitting.data.runs import Runs
from fitting.data.splits import PAPER, Split
from fitting.errors import FitError


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a law may read, each (n,): parameters under one split, recurrences, tokens, training FLOPs.

    `study` is 1 for a run of a case study and 0 for its baseline (zeros in plain fits).
    """

    n_once: np.ndarray
    n_rec: np.ndarray
    r: np.ndarray
    tokens: np.ndarray
    flops: np.ndarray
    study: np.ndarray

    @classmethod
    def of(cls, runs: Runs, split: Split, study: np.ndarray | None = None) -> Inputs:
        """The inputs of `runs` counted under `split`. Raises `FitError` where that is undefined."""
        n_once, n_rec = split(runs)
        study = np.zeros(len(runs)) if study is None else study
        return cls(n_once, n_rec, runs.r, runs.tokens, runs.training_flops, study)

    def take(self, chosen: np.ndarray) -> Inputs:
        """The inputs of the runs at `chosen` (mask or indices)."""
        return Inputs(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.r)

    @cached_property
    def log_tokens(self) -> np.ndarray:
        """log D."""
        return np.log(self.tokens)

    @cached_property
    def n_total(self) -> np.ndarray:
        """N_once + N_rec."""
        return self.n_once + self.n_rec


class Law(ABC):
    """A parametric loss surface L(theta; run).

    `param_names` names the P parameters as reported. `bounds` (P, 2) is the box of the starts and of the
    solution, in solver coordinates: the natural logarithms of `log_parameters`, the reported values of all others.
    """

    name: str = ""
    param_names: tuple[str, ...]
    bounds: np.ndarray
    log_parameters: frozenset[str] = frozenset()
    split: Split = PAPER
    needs_several_r: bool = False
    """Whether some parameter has no meaning when all runs have one r."""

    @abstractmethod
    def predict(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        """Loss in nats per token, (S, n), for theta (S, P)."""

    @abstractmethod
    def gradient(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        """Derivative of `predict` with respect to theta, (S, P, n)."""

    def log_loss_and_gradient(self, theta: np.ndarray, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """log L (S, n) and its derivative (S, P, n). Override it if log L has the simpler form."""
        loss = self.predict(theta, x)
        return np.log(loss), self.gradient(theta, x) / loss[:, None, :]

    def bound_to(self, x: Inputs) -> Law:
        """This law with the constants that it takes from the data, if any."""
        return self

    def inputs(self, runs: Runs) -> Inputs:
        """The inputs of `runs` counted as this law counts them."""
        return Inputs.of(runs, self.split)

    def improve_starts(self, theta: np.ndarray, x: Inputs, log_loss: np.ndarray) -> np.ndarray:
        """Starts (S, P), moved to better ones where the law's form allows it."""
        return theta

    def to_reported(self, theta: np.ndarray) -> np.ndarray:
        """Solver coordinates (..., P) to reported values."""
        return np.where(self._is_log, np.exp(np.where(self._is_log, theta, 0.0)), theta)

    def named(self, theta: np.ndarray) -> dict[str, float]:
        """Reported values by name, from solver coordinates (P,)."""
        return dict(zip(self.param_names, self.to_reported(theta).tolist(), strict=True))

    def to_theta(self, values: Mapping[str, float] | Sequence[float] | np.ndarray) -> np.ndarray:
        """Reported values (a mapping by name, or (P,)) to solver coordinates. Raises `FitError`."""
        if isinstance(values, Mapping):
            missing = [name for name in self.param_names if name not in values]
            if missing:
                raise FitError(f"The law {self.name} needs a value for {', '.join(missing)}")
            values = [values[name] for name in self.param_names]
        array = np.asarray(values, dtype=float)
        if (array[..., self._is_log] <= 0).any():
            raise FitError(f"{', '.join(sorted(self.log_parameters))} must be positive, not {array.tolist()}")
        return np.where(self._is_log, np.log(np.where(self._is_log, array, 1.0)), array)

    @property
    def _is_log(self) -> np.ndarray:
        return np.array([name in self.log_parameters for name in self.param_names], dtype=bool)
