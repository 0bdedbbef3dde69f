"""What a fit returns: frozen, with its status beside every number, and the part of it that a report holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np

from fitting.data.plain import optional, plain
from fitting.data.runs import Exclusion
from fitting.estimation.objective import DELTA
from fitting.laws import Law


class Status(Enum):
    """How far a fit is to be trusted, worst last."""

    OK = "ok"
    ONE_RUN_DECIDES = "one run decides"
    POOR_FIT = "poor fit"
    NOT_IDENTIFIED = "not identified"
    AT_BOUND = "at bound"
    ILL_CONDITIONED = "ill-conditioned"
    STARTS_DISAGREE = "starts disagree"
    SOLVERS_DISAGREE = "solvers disagree"
    NOT_CONVERGED = "not converged"
    WRONG_GRADIENT = "wrong gradient"


@dataclass(frozen=True)
class Interval:
    """A 95% interval of one parameter, with how it was made and what it `assumes`.

    `at_or_below_zero` and `at_or_above_one` count resamples; both are None if it was made without any.
    """

    method: str
    low: float
    high: float
    assumes: str
    resamples: int | None = None
    seed: int | None = None
    at_or_below_zero: int | None = None
    at_or_above_one: int | None = None
    recommended: bool = False


@dataclass(frozen=True)
class SolverCheck:
    """What a second, different solver found from points near the winner."""

    solver: str
    objective: float
    largest_difference: float
    """Of any exponent (alpha, beta, phi, ...; not log A, log B, log E) from the winner's."""


Intervals = dict[str, tuple[Interval, ...]]
"""The intervals of every parameter that has some, by its name."""


def recommended(intervals: Sequence[Interval]) -> Interval | None:
    """The interval to quote; None if none was estimated."""
    return next((interval for interval in intervals if interval.recommended), None)


@dataclass(frozen=True)
class Starts:
    """How the starts of a search fared."""

    total: int
    dropped_early: int
    agreeing: int
    """Those that ended within 1e-6, relative, of the best objective."""


@dataclass(frozen=True)
class EffectiveRatio:
    """Sizes at r recurrences relative to those of r=1 at one width, and training FLOPs per token.

    `effective` is (N_once + m·N_rec)/N(r=1), which hardly depends on the split; `unique` is N(r)/N(r=1).
    """

    r: float
    d_model: float
    effective: float
    unique: float
    flops_per_token: float


@dataclass(frozen=True, kw_only=True)
class FitSummary:
    """A fit as a report holds it, in the units of `FitResult`, without arrays over runs."""

    law: str
    split: str
    parameters: dict[str, float]
    intervals: Intervals
    objective: float
    r_squared: float
    rmse: float
    runs: int
    starts: Starts
    seed: int
    status: str
    message: str
    gradient_norm: float
    condition: float | None
    """None if it is infinite."""
    at_bound: tuple[str, ...]
    correlations: dict[str, dict[str, float | None]]
    """None where a parameter has no effect."""
    second_solver: SolverCheck | None
    excluded: tuple[Exclusion, ...]
    effective_ratios: tuple[EffectiveRatio, ...] = optional()
    description: str = optional()
    """Of the split, where several are compared."""
    phi: float = optional()
    """The value at which it was held."""
    r: float = optional()
    """That of the runs, where they all have the same."""
    theta: tuple[float, ...] = optional()
    """The solver's coordinates."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A fit that the runs cannot carry, or a split that is not defined for them: `message` says why."""

    status: str
    message: str
    split: str = optional()
    description: str = optional()
    r: float = optional()


@dataclass(frozen=True, eq=False)
class FitResult:
    """A fitted law: reported `parameters`, the solver's coordinates `theta` (P,), residuals in nats."""

    law: Law
    parameters: dict[str, float]
    theta: np.ndarray
    objective: float
    r_squared: float
    rmse: float
    runs: int
    starts: int
    dropped: int
    agreeing: int
    gradient_norm: float
    condition: float
    correlations: np.ndarray
    at_bound: tuple[str, ...]
    problems: tuple[tuple[Status, str], ...]
    check: SolverCheck | None
    seed: int
    residuals: np.ndarray
    log_residuals: np.ndarray
    intervals: Intervals = field(default_factory=dict)
    excluded: tuple[Exclusion, ...] = ()
    delta: float = DELTA

    @property
    def status(self) -> Status:
        """The worst of what is wrong; `Status.OK` if nothing is."""
        order = list(Status)
        return max((status for status, _ in self.problems), key=order.index, default=Status.OK)

    @property
    def trusted(self) -> bool:
        """Whether nothing is wrong with the fit."""
        return not self.problems

    @property
    def message(self) -> str:
        """Every reason for doubt, or how the fit was confirmed."""
        if self.problems:
            return "; ".join(f"{status.value}: {text}" for status, text in self.problems)
        return f"{self.agreeing} starts reached the optimum, confirmed by a second solver"

    def __getitem__(self, name: str) -> float:
        return self.parameters[name]

    def recommended(self, name: str) -> Interval | None:
        """The interval to quote for a parameter; None if none was estimated."""
        return recommended(self.intervals.get(name, ()))

    def summary(self, **more: Any) -> FitSummary:
        """What a report holds of this fit; `more` holds the fields that only some fits have."""
        names = list(self.parameters)
        rows = [[c if np.isfinite(c) else None for c in row] for row in self.correlations.tolist()]
        correlations = zip(names, rows, strict=True)
        same = {f.name: getattr(self, f.name) for f in fields(FitSummary) if hasattr(self, f.name)}
        told = {
            "law": self.law.name,
            "split": self.law.split.name,
            "starts": Starts(self.starts, self.dropped, self.agreeing),
            "status": self.status.value,
            "condition": self.condition if np.isfinite(self.condition) else None,
            "correlations": {name: dict(zip(names, row, strict=True)) for name, row in correlations},
            "second_solver": self.check,
            "theta": None,
        }
        return FitSummary(**same | told | more)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return plain(self.summary())
