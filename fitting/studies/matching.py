"""phi without the law, or nearly so: looped runs matched with r = 1 runs, against misfit of the joint law's shape.

Matching gives phi pair by pair, so it also says whether phi is one number. Whether it contradicts the joint fit is
judged by the difference of the two on simulated grids of the joint law, where both see the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fitting.data.plain import optional, plain
from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.fits import fit, refuse_mixed
from fitting.estimation.noise import Noise
from fitting.estimation.resampling import refit
from fitting.estimation.results import FitResult
from fitting.estimation.solver import LARGE
from fitting.laws import JointLaw, Law
from fitting.studies.design import law_for
from fitting.studies.iso_flops import IsoFlops
from fitting.studies.iso_token import FEWEST_WIDTHS, CellNoise, Cells
from fitting.studies.readings import Made, Reading, equal_budgets, equal_tokens, of_cells, share_of_grids

LEVEL = 0.01
"""Matching and the joint fit disagree where chance does as much in fewer than this share of grids."""


@dataclass(frozen=True)
class Agreement:
    """Matching (the first reading) beside the joint fit: pooled phi minus its phi, and that on grids of its law."""

    method: str
    law: str
    phi: float
    """Of the joint fit."""
    difference: float
    expected: float
    """Median difference on simulated grids: what bias the two have where the law holds."""
    spread: float
    """Standard deviation there."""
    p: float
    grids: int
    disagrees: bool

    @property
    def message(self) -> str:
        """The finding in a sentence."""
        matched = f"matching ({self.method}) gives phi {self.phi + self.difference:.3f}"
        chance = f"where that law holds, {self.p:.3f} of {self.grids} simulated grids differ as much"
        found = f"{matched}, the law ({self.law}) {self.phi:.3f}; {chance}"
        if not self.disagrees:
            return f"{found}: no contradiction"
        return f"{found}: it does not describe these runs. Trust phi by r, width and D instead"


@dataclass(frozen=True)
class Matching:
    """What `match` prints and a section of a report holds. The first reading is the primary one."""

    split: str
    simulations: int
    seed: int
    readings: tuple[Reading, ...]
    agreement: Agreement | None = optional()
    not_compared: str | None = optional()
    """Why matching and the joint fit could not be compared, if so."""

    @property
    def doubts(self) -> list[str]:
        """That matching contradicts the joint fit, if it does."""
        return [self.agreement.message] if self.agreement and self.agreement.disagrees else []

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"schema_version": 1, "kind": "matching", **plain(self)}


def match(
    runs: Runs,
    law: Law | None = None,
    *,
    joint: FitResult | None = None,
    simulations: int = 200,
    starts: int = 200,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Matching:
    """Match the runs of equal tokens, and the pairs of equal budgets.

    `law` (by default the joint law, or that of one token count) gives the split, and the `joint` fit, which is made
    unless it is given. With 0 `simulations` only numbers that need none are given. Raises `FitError` if no looped run
    has anything to match it with.
    """
    law = law_for(runs, JointLaw()) if law is None else law
    refuse_mixed(runs)
    if len(runs) > LARGE:
        raise FitError(f"{len(runs)} runs are too many to match, more than {LARGE}. Choose some with --where")
    cells, equal = Cells.of(runs, law), IsoFlops.of(runs, law)
    if cells is None and equal is None:
        raise FitError(
            f"None of {int((runs.r > 1).sum())} runs with r>1 can be matched: {_NEEDS}. Add such runs"
        )
    search: dict[str, Any] = {"starts": starts, "seed": seed, "workers": workers}
    refused = None
    if joint is None:
        progress("fitting the law beside which matching stands")
        try:
            joint = fit(runs, law, **search)
        except FitError as error:
            refused = str(error)
    made: list[Made] = []
    if cells is not None:
        progress(f"matching at equal tokens, {len(cells.pairs)} pairs")
        made.append(equal_tokens(runs, cells, simulations, seed))
    if equal is not None:
        progress(f"matching at equal budgets, {len(equal.pairs)} pairs")
        made += equal_budgets(runs, equal, law, joint, simulations, search)
    if not made:
        raise FitError(f"Pairs of equal budgets need the constants of a law, and there are none: {refused}")
    agreement = None
    if simulations and joint is not None:
        if made[0].draw is None or made[0].reading.pooled.phi is None:
            refused = "the runs do not tell their noise, or no pair has a phi"
        else:
            progress(f"matching and fitting {simulations} grids of the law")
            agreement = _agreement(runs, joint, made[0], simulations, seed, workers)
    return Matching(law.split.name, simulations, seed, tuple(m.reading for m in made), agreement, refused)


_NEEDS = (
    f"that needs r=1 runs of {FEWEST_WIDTHS} widths or more at its tokens, or one of its width and budget"
)


def _agreement(
    runs: Runs, joint: FitResult, first: Made, simulations: int, seed: int, workers: int | None
) -> Agreement:
    law, pooled = joint.law, first.reading.pooled.phi
    assert first.draw is not None and pooled is not None
    clean = np.log(runs.val_loss) - joint.log_residuals
    observed = clean + first.draw(simulations, np.random.default_rng([seed, 2]))
    even = np.ones(observed.shape)
    theta = refit(law, law.inputs(runs), observed, joint.theta, even, seed, workers, joint.delta)
    apart = first.of(np.exp(observed)) - theta[:, law.param_names.index("phi")]
    # A grid on which nothing can be matched tells nothing.
    apart = apart[np.isfinite(apart)]
    if not len(apart):
        apart = np.array([np.inf])
    expected, found = float(np.median(apart)), pooled - joint["phi"]
    p = share_of_grids(abs(found - expected), np.abs(apart - expected))
    spread = float(apart.std())
    method = first.reading.method
    return Agreement(method, law.name, joint["phi"], found, expected, spread, p, len(apart), p < LEVEL)


def expected(design: Runs, law: Law, values: Mapping[str, float], noise: Noise) -> Reading:
    """What matching at equal tokens will be able to tell from a design, if `values` of the law and `noise` are true.

    `cell` noise is what seeds of one run share. Raises `FitError` for a design without runs to match.
    """
    cells = Cells.of(design, law)
    if cells is None:
        raise FitError(f"Matching at equal tokens is not possible with this design: {_NEEDS}")
    log_loss = law.log_loss_and_gradient(law.to_theta(values)[None], law.inputs(design))[0]
    assumed = CellNoise(*(np.array([part**2]) for part in (noise.run, noise.cell)))
    return of_cells(cells, cells.means(np.exp(log_loss))[0], assumed, 10**6)[0]
