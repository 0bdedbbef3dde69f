"""What a fit returns: frozen, with its status beside every number, as text and as plain JSON types."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from fitting.data.runs import Exclusion
from fitting.laws.laws import Law
from fitting.report.tables import significant, table


class Status(Enum):
    """How far a fit is to be trusted, worst last."""

    OK = "ok"
    AT_BOUND = "at bound"
    ILL_CONDITIONED = "ill-conditioned"
    STARTS_DISAGREE = "starts disagree"
    SOLVERS_DISAGREE = "solvers disagree"
    NOT_CONVERGED = "not converged"
    WRONG_GRADIENT = "wrong gradient"


@dataclass(frozen=True)
class Interval:
    """A 95% interval of one parameter from `low` to `high`, with how it was made (`method`, `resamples`, `seed`) and
    what it `assumes`. `at_or_below_zero` and `at_or_above_one` count resamples; None where it was made without any.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dict(vars(self))


@dataclass(frozen=True)
class SolverCheck:
    """What a second, different solver found from points near the winner."""

    solver: str
    objective: float
    largest_difference: float
    """Largest difference of an exponent (alpha, beta, phi, ...; not of log A, log B, log E) to the winner."""


@dataclass(frozen=True, eq=False)
class FitResult:
    """A fitted law. `parameters` are reported values; `theta` (P,) the solver's coordinates; residuals in
    nats.
    """

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
    intervals: dict[str, tuple[Interval, ...]] = field(default_factory=dict)
    excluded: tuple[Exclusion, ...] = ()

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

    def with_intervals(self, name: str, intervals: tuple[Interval, ...]) -> FitResult:
        """The same result with intervals for one parameter."""
        return replace(self, intervals={**self.intervals, name: intervals})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "law": self.law.name,
            "split": self.law.split.name,
            "parameters": self.parameters,
            "intervals": {name: [i.to_dict() for i in found] for name, found in self.intervals.items()},
            "objective": self.objective,
            "r_squared": self.r_squared,
            "rmse": self.rmse,
            "runs": self.runs,
            "starts": {"total": self.starts, "dropped_early": self.dropped, "agreeing": self.agreeing},
            "seed": self.seed,
            "status": self.status.value,
            "message": self.message,
            "gradient_norm": self.gradient_norm,
            "condition": self.condition,
            "at_bound": list(self.at_bound),
            "correlations": {
                a: {b: float(self.correlations[i, j]) for j, b in enumerate(self.parameters)}
                for i, a in enumerate(self.parameters)
            },
            "second_solver": None if self.check is None else dict(vars(self.check)),
            "excluded": [dict(vars(gone)) for gone in self.excluded],
        }

    def recommended(self, name: str) -> Interval | None:
        """The interval of a parameter that is to be quoted; None if none was estimated."""
        return next((interval for interval in self.intervals.get(name, ()) if interval.recommended), None)

    def __str__(self) -> str:
        rows = []
        for name, value in self.parameters.items():
            best = self.recommended(name)
            shown = f"[{significant(best.low, 4)}, {significant(best.high, 4)}]" if best else "not estimated"
            rows.append([name, significant(value, 5), shown, "at bound" if name in self.at_bound else ""])
        head = f"{self.law.name}   split: {self.law.split.name}   runs: {self.runs}   {self.status.value}"
        quality = (
            f"R² {self.r_squared:.4f}, RMSE {self.rmse:.4f} nats, objective {self.objective:.4e}, "
            f"condition {self.condition:.1e}, gradient {self.gradient_norm:.0e}, "
            f"{self.agreeing} of {self.starts} starts agree ({self.dropped} dropped early), seed "
            f"{self.seed}"
        )
        return "\n".join([head, table(["", "value", "95% interval", ""], rows), quality, self.message])
