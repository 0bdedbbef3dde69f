"""Whether the injection is counted in N_once (used once per token) or N_rec (at every recurrence).

The paper's text puts it in N_rec, but its published constants come from another split, and phi differs by 0.025
between the two. So every phi is reported with the name of its split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fitting.data.runs import COUNT_TOLERANCE, Runs
from fitting.errors import FitError

Counts = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Split:
    """A rule that gives (N_once, N_rec), each (n,), for n runs. Call it with the runs."""

    name: str
    description: str
    counts: Callable[[Runs], Counts]
    count: str = ""
    """What N counts, where the name says so: `total` or `active` parameters."""

    def __call__(self, runs: Runs) -> Counts:
        return self.counts(runs)

    def saying(self, count: str) -> Split:
        """The same split, with what N counts (empty: nothing) in its name."""
        return replace(self, name=f"{self.name}, {count} parameters", count=count) if count else self


def _paper(runs: Runs) -> Counts:
    return runs.n_once, runs.n_rec


def _injection_once(runs: Runs) -> Counts:
    unknown = runs.source[np.isnan(runs.n_injection)]
    if len(unknown):
        raise FitError(
            f"The split injection_once needs to know how much of n_rec is the injection. {unknown[0]} does not say: "
            "give the column injection or n_injection"
        )
    return runs.n_once + runs.n_injection, runs.n_rec - runs.n_injection


def _regressed_as_linear(runs: Runs) -> Counts:
    """N(r) regressed on 16/r at each width, which divides the injection between slope and intercept.

    The least-squares line through (16/r, 2d²·[r>1]) for 16/r = 16, 8, 4, 2 has slope -17/115 d² and
    intercept 300/115 d².
    """
    _require_layouts(runs, np.ones(len(runs), dtype=bool), "regressed_as_linear")
    layer = 12 * runs.d_model**2 + 2 * runs.d_model
    _require_counts(runs, layer)
    square = runs.d_model**2
    once = 4 * layer + 3 * runs.d_model + 300 / 115 * square
    return once, 16 / runs.r * (layer - 17 / 115 * square)


def _regressed(runs: Runs) -> Counts:
    linear = (runs.r == 1) | np.isclose(runs.n_injection, 2 * runs.d_model**2)
    _require_layouts(runs, linear, "regressed")
    return _regressed_as_linear(runs)


def _require_layouts(runs: Runs, accepted: np.ndarray, name: str) -> None:
    once = runs.prelude_layers + runs.coda_layers
    as_published = np.isclose(runs.recurrent_layers * runs.r, 16) & (once == 4)
    whole = (runs.r == 1) & (once + runs.recurrent_layers == 20)
    wrong = ~(accepted & (as_published | whole))
    if wrong.any():
        linear, hint = " with linear injection" if name == "regressed" else "", ""
        if linear and (as_published | whole)[wrong].all():
            hint = "; regressed_as_linear applies the linear formula to them"
            hint += ", as the published hyperconnections value did"
        raise FitError(
            f"The split '{name}' is defined for the 2-(16/r)-2 layouts{linear} only; {int(wrong.sum())} of "
            f"{len(runs)} runs differ, first {runs.source[wrong][0]} ({runs.architecture[wrong][0]}). "
            f"Use paper or injection_once{hint}"
        )


def _require_counts(runs: Runs, layer: np.ndarray) -> None:
    """The formula knows only the width, and would silently replace other counts."""
    expected = (4 + 16 / runs.r) * layer + 3 * runs.d_model + runs.n_injection
    wrong = np.abs(runs.n_total / expected - 1) > COUNT_TOLERANCE
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise FitError(
            f"{runs.source[i]}: n_once + n_rec is {runs.n_total[i]:.6g}, but the published layout of d_model "
            f"{runs.d_model[i]:g} and r={runs.r[i]:g} has {expected[i]:.6g} ({int(wrong.sum())} of {len(runs)} "
            "runs differ): the regressed splits would replace the counts of the file by the layout's. "
            "Use --split paper or injection_once"
        )


PAPER = Split("paper", "injection counted in N_rec, as the paper's text says", _paper)
INJECTION_ONCE = Split("injection_once", "injection counted in N_once", _injection_once)
REGRESSED = Split("regressed", "N(r) regressed on 16/r per width: behind the published constants", _regressed)
REGRESSED_AS_LINEAR = Split(
    "regressed_as_linear",
    "linear formula of regressed on other injections, as for the published hyperconnections value",
    _regressed_as_linear,
)
SPLITS = {split.name: split for split in (PAPER, INJECTION_ONCE, REGRESSED, REGRESSED_AS_LINEAR)}


def split_named(name: str) -> Split:
    """The split of this name. Raises `FitError` listing those that exist."""
    if name not in SPLITS:
        listed = "; ".join(f"{split.name}: {split.description}" for split in SPLITS.values())
        raise FitError(f"There is no split named {name!r}. Splits: {listed}")
    return SPLITS[name]
