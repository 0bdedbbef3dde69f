"""How well a planned grid would determine phi or delta phi, and which added run helps most per FLOP.

The noise model has two parts, both standard deviations of log-loss: `run` (independent runs) and `cell` (an offset that
the runs of one (budget, architecture) cell share; between the arms of a study it is taken as independent).
Gauss-Newton gives the covariance of the Huber estimate in closed form, A⁻¹ B A⁻¹ with A = E[psi']·JᵀJ and
B = Jᵀ Cov(psi) J; simulation refits simulated grids instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fitting.data.plain import plain
from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.fits import WORST_CONDITION, conditioning
from fitting.estimation.noise import Noise
from fitting.estimation.objective import normal_psi_moments, psi
from fitting.estimation.resampling import refit, widening
from fitting.laws import Inputs, JointLaw, Law, StudyPower
from fitting.studies.widths import Widths

TOO_WIDE = 0.3
"""Above this half-width the linear approximation cannot be trusted, and the grid is simulated."""
_Z = 1.959964


@dataclass(frozen=True)
class Candidate:
    """One added run and what it would do to the half-width."""

    r: float
    d_model: float
    budget: float
    tokens_per_parameter: float
    half_width: float
    gain_per_flop: float


@dataclass(frozen=True, eq=False)
class Plan:
    """What a planned grid would give. Half-widths are of 95% intervals."""

    parameter: str
    split: str
    runs: int
    cells: int
    noise: Noise
    fisher_half_width: float
    simulated_half_width: float | None
    simulations: int
    quoted_half_width: float
    """Of the interval that a bootstrap over the design's cells would quote, which is `widening` times as wide."""
    condition: float
    candidates: tuple[Candidate, ...]
    seed: int

    @property
    def half_width(self) -> float:
        """The simulated half-width where there is one, else the Gauss-Newton one."""
        return self.fisher_half_width if self.simulated_half_width is None else self.simulated_half_width

    @property
    def trusted(self) -> bool:
        """Whether the design identifies the law at all."""
        return self.condition < WORST_CONDITION

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**plain(self), "half_width": self.half_width, "trusted": self.trusted}


def plan(
    design: Runs,
    law: JointLaw,
    values: dict[str, float],
    noise: Noise,
    *,
    study: bool = False,
    simulate: int = 0,
    candidates: int = 5,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The half-width of phi that `design` would give if `values` (A, alpha, B, beta, E, phi) were true.

    With `study`, the design's r>1 runs are trained twice (baseline and study) and the half-width is of delta phi.
    `simulate` grids are simulated if asked for, or 400 where the Gauss-Newton half-width exceeds 0.3. Raises `FitError`
    for a design that cannot identify the law.
    """
    setup = _Setup.of(design, law, values, study)
    jacobian = setup.jacobian(setup.x)
    condition, _ = conditioning(jacobian)
    if not np.isfinite(condition) or len(setup.x) <= len(setup.theta):
        raise FitError(
            f"{len(setup.x)} runs of this design do not identify the {len(setup.theta)} parameters. Add sizes, "
            "budgets or recurrences"
        )
    fisher = half_width(jacobian, setup.cell, noise)
    count = simulate or (400 if not fisher <= TOO_WIDE else 0)
    simulated = None
    if count:
        progress(f"simulating {count} grids")
        drawn = noise.draw(setup.cell, count, np.random.default_rng(seed))
        observed = setup.law.log_loss_and_gradient(setup.theta[None], setup.x)[0] + drawn
        weights = np.ones((count, len(setup.x)))
        theta = refit(setup.law, setup.x, observed, setup.theta, weights, seed, workers)
        low, high = np.percentile(theta[:, -1], (2.5, 97.5))
        simulated = float(high - low) / 2
    progress("trying added runs")
    found = _candidates(design, setup, noise, fisher)[:candidates]
    cells, parameters = int(setup.cell.max()) + 1, len(setup.theta)
    quoted = (fisher if simulated is None else simulated) * (
        widening(cells, parameters) if cells > parameters else 1
    )
    return Plan(
        setup.law.param_names[-1], law.split.name, len(setup.x), cells, noise, fisher, simulated, count, quoted,
        condition, tuple(found), seed,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Setup:
    """The law, its true coordinates and the inputs of a design; the parameter of interest is the last one."""

    law: Law
    theta: np.ndarray
    x: Inputs
    cell: np.ndarray
    study: bool

    @classmethod
    def of(cls, design: Runs, law: JointLaw, values: dict[str, float], study: bool) -> _Setup:
        x = law.inputs(design)
        if not study:
            return cls(law, law.to_theta(values), x, design.cell, False)
        twice = np.concatenate([np.arange(len(design)), np.flatnonzero(design.r > 1)])
        arm = (np.arange(len(twice)) >= len(design)).astype(float)
        paired = JointLaw(StudyPower(), law.split)
        theta = paired.to_theta({**values, "delta_phi": 0.0})
        cell = design.cell[twice] + (arm * design.cell_count).astype(int)
        _, cell = np.unique(cell, return_inverse=True)
        return cls(paired, theta, dataclasses.replace(x.take(twice), study=arm), cell, True)

    def jacobian(self, x: Inputs) -> np.ndarray:
        """Derivative of log L at the true coordinates, (P, n)."""
        return np.asarray(self.law.log_loss_and_gradient(self.theta[None], x)[1][0])


def half_width(jacobian: np.ndarray, cell: np.ndarray, noise: Noise) -> float:
    """1.96 standard deviations of the last parameter's Huber estimate, from derivatives (P, n) and cells (n,)."""
    slope, square, shared = psi_moments(noise)
    middle = square * jacobian @ jacobian.T
    if shared:
        sums = np.zeros((len(jacobian), int(cell.max()) + 1))
        np.add.at(sums.T, cell, jacobian.T)
        middle += shared * (sums @ sums.T - jacobian @ jacobian.T)
    scale = 1 / np.sqrt((jacobian**2).sum(axis=1))
    scaled = jacobian * scale[:, None]
    inverse = np.linalg.pinv(scaled @ scaled.T, rcond=1e-14, hermitian=True)
    covariance = inverse @ (middle * scale[:, None] * scale) @ inverse / slope**2
    return float(_Z * scale[-1] * np.sqrt(max(covariance[-1, -1], 0.0)))


@lru_cache(maxsize=16)
def psi_moments(noise: Noise) -> tuple[float, float, float]:
    """(E[psi'], E[psi²], Cov of psi for two runs of one cell) under normal noise; the last by quadrature."""
    total = float(np.hypot(noise.run, noise.cell))
    slope, square = normal_psi_moments(total)
    if noise.cell == 0:
        return slope, square, 0.0
    # Given the cell's offset, runs are independent: the covariance is the variance over offsets of the mean psi.
    nodes, weights = np.polynomial.hermite_e.hermegauss(61)
    weights = weights / weights.sum()
    grid, grid_weights = np.polynomial.hermite_e.hermegauss(201)
    grid_weights = grid_weights / grid_weights.sum()
    means = (grid_weights * psi(noise.cell * nodes[:, None] + noise.run * grid)).sum(axis=1)
    return slope, square, float((weights * means**2).sum())


def _candidates(design: Runs, setup: _Setup, noise: Noise, now: float) -> list[Candidate]:
    ratio = design.tokens / design.n_total
    known = setup.jacobian(setup.x)
    arms = (0.0, 1.0) if setup.study else (0.0,)
    found = []
    for r in design.recurrences:
        if setup.study and r == 1:
            continue
        try:
            widths = Widths.of(design, setup.law, float(r))
        except FitError:
            continue
        for budget in np.unique(design.budget):
            for width in np.unique(design.d_model):
                one = widths.inputs(np.array([width]), float(budget))
                share = float(one.tokens[0] / one.n_total[0])
                if not ratio.min() <= share <= ratio.max():
                    continue
                old = np.flatnonzero((design.r == r) & (design.budget == budget))
                added = [setup.jacobian(dataclasses.replace(one, study=np.array([arm]))) for arm in arms]
                cells = np.append(setup.cell, _cells_of(setup, old, design, len(arms)))
                half = half_width(np.hstack([known, *added]), cells, noise)
                cost = float(budget) * len(arms)
                where = float(r), float(width), float(budget)
                found.append(Candidate(*where, share, half, (now - half) / cost))
    return sorted(found, key=lambda candidate: -candidate.gain_per_flop)


def _cells_of(setup: _Setup, old: np.ndarray, design: Runs, arms: int) -> np.ndarray:
    """Cells of an added run (one per arm): those of the design's runs `old`, else new ones."""
    new = int(setup.cell.max()) + 1 + np.arange(arms)
    if not len(old):
        return new
    baseline = setup.cell[old[0]]
    if arms == 1:
        return np.array([baseline])
    later = np.flatnonzero(design.r > 1).tolist()
    return np.array([baseline, setup.cell[len(design) + later.index(int(old[0]))]])
