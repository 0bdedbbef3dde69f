"""How far matching at equal tokens and the joint fit are to be trusted, on grids of nano_iso_token.yaml's design whose
loops follow the joint law or do not: the table in fitting/README.md.

The true phi of a pair comes from N_eq on the exact r = 1 curve, so it holds whatever law the loops follow.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Runs
from fitting.estimation.fits import fit
from fitting.estimation.noise import Noise
from fitting.estimation.resampling import bootstrap
from fitting.laws import JointLaw
from fitting.report.document import table
from fitting.studies.iso_token import Cells
from fitting.studies.matching import match
from tests.fitting.simulations.grids import NANO_NOISE, PAPER_NOISE

GRIDS, SIMULATIONS, RESAMPLES = 200, 200, 100
WIDTHS = {1: (8, 16, 24, 32, 40, 48, 64), 2: (16, 24, 32, 48), 4: (16, 24, 32, 48), 8: (16, 24, 32, 48)}
TOKENS, SEEDS, VOCABULARY, ROW = (262_144.0, 786_432.0, 2_359_296.0), 3, 1024, 128
#: About the fit of the nano grid's r = 1 runs.
A, ALPHA, B, BETA, E, PHI = 20.0, 0.274, 257.0, 0.424, 2.07, 0.6


@dataclass(frozen=True)
class Case:
    """How loops depart from the joint law: a factor on alpha, a shift in nats, the rise of phi over all tokens."""

    alpha: float = 1.0
    shift: float = 0.0
    drift: float = 0.0


CASES = {
    "the law holds": Case(),
    "alpha 10% less for loops": Case(alpha=0.9),
    "loops .05 nats worse": Case(shift=0.05),
    "phi rises by .3": Case(drift=0.3),
}
NOISES = {"quiet": PAPER_NOISE, "nano": NANO_NOISE}


def design() -> Runs:
    """Every r, width, token count and seed, 10 layers deep; losses do not count."""
    rows = [
        (r, d, tokens, seed)
        for tokens in TOKENS
        for r, widths in WIDTHS.items()
        for d in widths
        for seed in range(SEEDS)
    ]
    r, d, tokens, seed = np.array(rows, dtype=float).T
    layer, outer, inner = 12 * d**2 + 2 * d, np.where(r == 1, 0, 2), np.where(r == 1, 10, 8 / r)
    injection = np.where(r == 1, 0.0, 2 * d**2)
    once, rec = outer * layer + 3 * d, inner * layer + injection
    flops = 6 * (once + VOCABULARY * d + r * rec) + 12 * (outer + r * inner) * d * ROW
    kind = np.where(r == 1, "passthrough", "linear").astype(object)
    names = np.array([f"run {i}" for i in range(len(r))], dtype=object)
    same = np.full(len(r), "full", dtype=object)
    unknown = np.full(len(r), np.nan)
    half = outer / 2
    return Runs(
        names, r, d, half, inner, half, once, rec, injection, once, rec, 2 * VOCABULARY * d, flops, tokens,
        np.ones(len(r)), unknown, kind, same, seed, "paper",
    )  # fmt: skip


def truth(runs: Runs, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Losses (n,) without noise, and the true phi (n,) by N_eq; NaN at r = 1."""
    place = np.log(runs.tokens / TOKENS[1]) / np.log(TOKENS[2] / TOKENS[0])
    phi = PHI + case.drift * place
    loop = runs.r > 1
    size = runs.n_once + runs.r**phi * runs.n_rec
    # Around a size in the middle, so that another alpha tilts the loops' curve.
    middle, alpha = 5e4, np.where(loop, case.alpha * ALPHA, ALPHA)
    term = A * middle**-ALPHA * (size / middle) ** -alpha + np.where(loop, case.shift, 0.0)
    equivalent = (term / A) ** (-1 / ALPHA)
    with np.errstate(invalid="ignore", divide="ignore"):
        true = np.log((equivalent - runs.n_once) / runs.n_rec) / np.log(runs.r)
    return E + term + B * runs.tokens**-BETA, true


@dataclass
class Score:
    """Counts over grids, and the mean half-width of the pooled interval."""

    grids: int
    pairs: int = 0
    covered: int = 0
    pooled: int = 0
    uneven: int = 0
    joint: int = 0
    doubted: int = 0
    half: float = 0.0


def holds(low: float | None, value: float, high: float | None) -> bool:
    """Whether an interval, with open ends where they are None, holds a value."""
    return (low is None or low <= value) and (high is None or value <= high)


def scored(case: Case, noise: Noise, grids: int = GRIDS) -> Score:
    """How often intervals hold the truth, phi is found uneven, and the joint fit is contradicted."""
    runs = design()
    clean, true = truth(runs, case)
    cells = Cells.of(runs, JointLaw())
    assert cells is not None
    goal = np.array([true[np.flatnonzero(cells.runs == c)[0]] for c in cells.pairs])
    score = Score(grids)
    # A cell is what differs in the seed alone.
    for i, offsets in enumerate(noise.draw(cells.runs, grids, np.random.default_rng(11))):
        drawn = runs.with_loss(clean * np.exp(offsets))
        joint = fit(drawn, JointLaw(), starts=40, workers=1)
        joint = bootstrap(drawn, joint, resamples=RESAMPLES, names=["phi"], workers=1)
        found = match(drawn, joint=joint, simulations=SIMULATIONS, seed=i, workers=1)
        reading, quoted = found.readings[0], joint.recommended("phi")
        assert quoted is not None and reading.heterogeneity is not None
        told = [(p, g) for p, g in zip(reading.pairs, goal, strict=True) if p.phi is not None]
        score.pairs += len(told)
        score.covered += sum(holds(p.low, g, p.high) for p, g in told)
        mean = float(np.array([p.weight for p in reading.pairs]) @ goal)
        pooled = reading.pooled
        assert pooled.low is not None and pooled.high is not None
        score.pooled += pooled.low <= mean <= pooled.high
        score.half += (pooled.high - pooled.low) / 2 / grids
        score.uneven += reading.heterogeneity < 0.05
        score.joint += quoted.low <= mean <= quoted.high
        score.doubted += bool(found.doubts)
    return score


def main() -> None:
    """Print the table, one line as each is done."""
    rows = []
    for level, noise in NOISES.items():
        for name, case in CASES.items():
            s = scored(case, noise)
            shares = (s.covered / s.pairs, *(n / s.grids for n in (s.pooled, s.joint, s.uneven, s.doubted)))
            numbers = [f"{s.half:.3f}", *(f"{share:.3f}" for share in shares)]
            rows.append([f"{level}, {noise.run:g}/{noise.cell:g}", name, *numbers])
            print(*rows[-1], file=sys.stderr, flush=True)
    header = [
        "noise",
        "loops",
        "pooled half-width",
        "pairs hold",
        "pooled holds",
        "joint holds",
        "uneven",
        "contradicted",
    ]
    print(table(header, rows))


if __name__ == "__main__":
    main()
