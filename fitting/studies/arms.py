"""Baseline and study of a case study in one table, cut to what they share, and what makes their losses differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Exclusion, Runs, concatenate
from fitting.data.splits import Split
from fitting.errors import FitError
from fitting.estimation.fits import refuse_mixed
from fitting.estimation.resampling import no_bootstrap
from fitting.laws import Inputs

SAME_LOSS = 1e-6
"""If the two losses of a shared run differ by more than this (nats), a warning says so."""


@dataclass(frozen=True, eq=False)
class Arms:
    """Both arms in one table: r=1 once, then baseline, then study; `sides` are the masks of the separate fits."""

    runs: Runs
    x: Inputs
    sides: tuple[np.ndarray, np.ndarray]
    cell: np.ndarray
    cells: int
    sizes: tuple[int, int, int]
    dropped: tuple[Exclusion, ...]
    warnings: tuple[str, ...]

    @property
    def own_cells(self) -> np.ndarray:
        """(budget, r, arm) cells (n,), numbered from 0: the arms of a study have offsets of their own."""
        return np.unique(np.stack([self.cell, self.x.study]), axis=1, return_inverse=True)[1].ravel()

    def no_bootstrap(self, alone: int, together: int, resamples: int) -> str | None:
        """Why no interval can be made for laws with so many parameters, fitted to one arm or to both, if so."""
        fewest = min(len(np.unique(self.cell[side])) for side in self.sides)
        return no_bootstrap(fewest, alone, resamples) or no_bootstrap(self.cells, together, resamples)

    @classmethod
    def of(cls, baseline: Runs, study: Runs, split: Split) -> Arms:
        """Both arms, cut to their shared budgets. Raises `FitError` when they cannot be compared."""
        for name, arm in (("baseline", baseline), ("study", study)):
            refuse_mixed(arm)
            if not (arm.r > 1).any():
                raise FitError(f"The {name} has no run with r>1, so it has no phi. Add some")
        shared = np.intersect1d(baseline.budget, study.budget)
        if len(shared) < 2:
            raise FitError(
                f"Baseline and study share {len(shared)} budgets; at least 2 are needed. Baseline: "
                f"{_listed(baseline.budget)}; study: {_listed(study.budget)}"
            )
        both = concatenate(baseline, study)
        side = np.repeat([0.0, 1.0], [len(baseline), len(study)])
        inside = np.isin(both.budget, shared)
        keys = list(zip(both.r, both.d_model, both.tokens.round(), both.seed, strict=True))
        first = np.array([keys.index(key) == i for i, key in enumerate(keys)])
        single = (both.r == 1) & inside & first
        if not single.any():
            why = "they tie the two phi to one scale. Add some"
            raise FitError(f"Neither arm has runs with r=1 on the shared budgets: {why}")
        chosen = single | ((both.r > 1) & inside)
        dropped = []
        for source, budget in zip(both.source[~inside], both.budget[~inside], strict=True):
            dropped.append(Exclusion(str(source), f"its budget {budget:.3g} is not shared by both arms"))
        differing = []
        for i in np.flatnonzero((both.r == 1) & inside & ~first):
            twin = keys.index(keys[i])
            differ = abs(both.val_loss[i] - both.val_loss[twin])
            if differ > SAME_LOSS:
                differing.append(differ)
            if both.source[i] != both.source[twin]:
                which = f"d_model {both.d_model[i]:g}, budget {both.budget[i]:.3g}, seed {both.seed[i]:g}"
                dropped.append(Exclusion(str(both.source[i]), f"r=1 run shared with the baseline ({which})"))
        warnings = (
            [f"mixed runs, whose losses may not compare: {'; '.join(both.mixed)}"] if both.mixed else []
        )
        if differing:
            warnings.append(
                f"{len(differing)} shared r=1 runs have other losses in the study than in the baseline (up to "
                f"{max(differing):.4f} nats); the baseline's are used. Different seeds, data or settings "
                "confound the comparison: name one set of r=1 runs, or give repeats their own seeds"
            )
        runs, is_study = both.take(chosen), np.where(both.r > 1, side, 0.0)[chosen]
        pairs = list(zip(runs.budget.tolist(), runs.r.tolist(), strict=True))
        index = {key: i for i, key in enumerate(dict.fromkeys(pairs))}
        plain = runs.r == 1
        sides = (plain | (is_study == 0), plain | (is_study == 1))
        sizes = (int(plain.sum()), int((sides[0] & ~plain).sum()), int((sides[1] & ~plain).sum()))
        cell = np.array([index[key] for key in pairs], dtype=int)
        x = Inputs.of(runs, split, is_study)
        return cls(runs, x, sides, cell, len(index), sizes, tuple(dropped), tuple(warnings))


def _listed(values: np.ndarray) -> str:
    return ", ".join(f"{value:.3g}" for value in np.unique(values))


@dataclass(frozen=True)
class Channels:
    """Where the loss difference of one matched pair comes from, in nats; exact because the law is additive.

    Two runs of one (r, size, C): arm 0 is the baseline, arm 1 the study; A, alpha, B and beta are common to both.

        token       B·(D1^-beta - D0^-beta)                  more or fewer tokens for the same FLOPs
        parameters  A·(M1(phi0)^-alpha - M0(phi0)^-alpha)    more or fewer parameters, at the baseline's phi
        capacity    A·(M1(phi1)^-alpha - M1(phi0)^-alpha)    what a recurrence is worth: the change of phi
        unexplained (L1 - L0) - their sum                    everything else; always printed
    """

    r: float
    d_model: float
    flops: float
    difference: float
    token: float
    parameters: float
    capacity: float
    unexplained: float


def matched_pairs(
    arms: np.ndarray, r: np.ndarray, d_model: np.ndarray, budget: np.ndarray
) -> list[tuple[int, int]]:
    """Indices (baseline, study) of runs with equal r, width and budget; r = 1 has no study arm."""
    keys = list(zip(r.tolist(), d_model.tolist(), budget.tolist(), strict=True))
    base = {key: i for i, key in enumerate(keys) if arms[i] == 0}
    return [(base[key], i) for i, key in enumerate(keys) if arms[i] == 1 and key[0] > 1 and key in base]


def channels(
    pairs: list[tuple[int, int]],
    x: Inputs,
    loss: np.ndarray,
    d_model: np.ndarray,
    budget: np.ndarray,
    law: Mapping[str, float],
    phi: tuple[float, float],
) -> tuple[Channels, ...]:
    """The channels of every matched pair; `law` holds A, alpha, B, beta, `phi` is (phi0, phi1)."""
    if not pairs:
        raise FitError(
            "No run of the study matches a baseline run in r, d_model and budget: there are no channels"
        )
    first, second = (np.array(side) for side in zip(*pairs, strict=True))

    def size_term(i: np.ndarray, exponent: float) -> np.ndarray:
        effective = x.n_once[i] + x.r[i] ** exponent * x.n_rec[i]
        return np.asarray(law["A"] * effective ** -law["alpha"])

    token = law["B"] * (x.tokens[second] ** -law["beta"] - x.tokens[first] ** -law["beta"])
    parameters = size_term(second, phi[0]) - size_term(first, phi[0])
    capacity = size_term(second, phi[1]) - size_term(second, phi[0])
    difference = loss[second] - loss[first]
    unexplained = difference - (token + parameters + capacity)
    what = x.r[first], d_model[first], budget[first]
    columns = (*what, difference, token, parameters, capacity, unexplained)
    return tuple(Channels(*map(float, row)) for row in zip(*columns, strict=True))
