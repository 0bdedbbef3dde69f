"""Error rates of the verdicts of `compare` and of the table of rival laws, on simulated grids.

    python tests/fitting/simulations/comparison.py [grids, default 200]

prints the tables of fitting/README.md (a quarter of an hour on one core). Cells of the baseline and of the study have
offsets of their own, and the r=1 runs, which both share, are drawn once.
"""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np

from fitting.data.loading import load_runs
from fitting.data.runs import Runs
from fitting.data.splits import PAPER
from fitting.estimation.calibration import Fitted, objectives
from fitting.estimation.diagnostics import aicc, judge_rivals, rival_laws
from fitting.estimation.fits import fit_inputs
from fitting.estimation.noise import Noise
from fitting.estimation.resampling import refit
from fitting.laws import Inputs, JointLaw, Law, LossShift, Power, StudyPower
from fitting.published import load_grid
from fitting.report.document import table
from fitting.studies.arms import Arms
from fitting.studies.comparison import Reading, judge, judge_readings
from tests.fitting.simulations.grids import NANO, NANO_NOISE, PAPER_NOISE

INNER = 100
"""Grids drawn for every claim: half of the default of `fitting compare`, at the same 5% (5 of 101)."""
PAPER_VALUES = {"A": 28.13, "alpha": 0.1996, "B": 928.1, "beta": 0.3693, "E": 1.5697, "phi": 0.4332}
NANO_VALUES = {"A": 19.72, "alpha": 0.2837, "B": 149.6, "beta": 0.3852, "E": 2.2221, "phi": 0.7732}
TRUTHS = {"no change": (0.0, 0.0), "delta phi .1": (0.1, 0.0), "shift .03": (0.0, 0.03)}
RIGHT = {"no change": "neither", "delta phi .1": "delta phi", "shift .03": "shift"}

_POWER = JointLaw(Power(), PAPER)
_PAIRED = JointLaw(StudyPower(), PAPER)
READINGS: dict[str, Law] = {
    "neither": _POWER, "delta phi": _PAIRED, "shift": LossShift(_POWER), "both": LossShift(_PAIRED),
}  # fmt: skip


def paper_arms() -> tuple[Runs, Runs]:
    """The paper's four lower budgets, and as a study the same looped runs with a quarter more tokens per FLOP."""
    grid = load_grid().where("budget<=4.64e18")
    looped = grid.r > 1
    study = dataclasses.replace(
        grid,
        tokens=np.where(looped, grid.tokens * 1.25, grid.tokens),
        flops_per_token=np.where(looped, grid.flops_per_token / 1.25, grid.flops_per_token),
        bptt=np.where(looped, "truncated", "full").astype(object),
    )
    return grid, study.where("r>1")


def nano_arms() -> tuple[Runs, Runs]:
    """The committed nano grid, and the same with hyperconnection lanes."""
    return load_runs(NANO), load_runs(NANO.parent / "nano_hyperconnections")


def fitted(
    laws: dict[str, Law], x: Inputs, runs: Runs, clean: np.ndarray, observed: np.ndarray
) -> dict[str, np.ndarray]:
    """Name -> coordinates (G, P) of every law on G grids, searched from where it is best without noise."""
    exact = runs.with_loss(np.exp(clean))
    found = {}
    for name, law in laws.items():
        start = fit_inputs(law, x, exact, starts=200, seed=0, workers=1).theta
        found[name] = refit(law, x, observed, start, np.ones(observed.shape), 0, 1)
    return found


def verdicts(
    arms: Arms, values: dict[str, float], noise: Noise, truth: str, grids: int, seed: int
) -> list[tuple[str, str]]:
    """(preferred reading, or 'undecided'; the same by the rule of AICc) on every grid."""
    delta, shift = TRUTHS[truth]
    x, law = arms.x, READINGS["both"]
    true = law.to_theta({**values, "delta_phi": delta, "shift": shift})
    clean = law.log_loss_and_gradient(true[None], x)[0][0]
    observed = clean + noise.draw(arms.own_cells, grids, np.random.default_rng(seed))
    theta = fitted(READINGS, x, arms.runs, clean, observed)
    lowest = {name: objectives(law, theta[name], x, observed) for name, law in READINGS.items()}
    found = []
    for i in range(grids):
        readings = []
        for name, law in READINGS.items():
            named = law.named(theta[name][i])
            score = aicc(SimpleNamespace(runs=len(x), parameters=named, objective=lowest[name][i]))
            changes = named.get("delta_phi"), named.get("shift")
            readings.append(Reading(name, *changes, lowest[name][i], score, True, ""))
        at = {name: Fitted(law, theta[name][i]) for name, law in READINGS.items()}
        claims = judge_readings(at, x, observed[i], arms.own_cells, grids=INNER, seed=i, workers=1)
        found.append((judge(tuple(readings), claims)[0], judge(tuple(readings), None)[0]))
    return found


def spurious_rivals(
    runs: Runs, values: dict[str, float], noise: Noise, grids: int, seed: int
) -> tuple[int, int]:
    """On how many grids drawn from r^phi a rival form is called better: by simulation, by an AICc lead above 4."""
    x = Inputs.of(runs, PAPER)
    laws = {law.name: law.bound_to(x) for law in rival_laws(PAPER)}
    laws = {name: law for name, law in laws.items() if len(law.param_names) > 5}
    clean = _POWER.log_loss_and_gradient(_POWER.to_theta(values)[None], x)[0][0]
    observed = clean + noise.draw(runs.cell, grids, np.random.default_rng(seed))
    theta = fitted(laws, x, runs, clean, observed)
    first, *others = laws
    called = by_aicc = 0
    for i in range(grids):
        at = {name: Fitted(law, theta[name][i]) for name, law in laws.items()}
        rivals = {k: at[name] for k, name in enumerate(others)}
        judged = judge_rivals(at[first], rivals, x, observed[i], runs.cell, grids=INNER, seed=i, workers=1)
        called += any(row["share_of_any"] < 0.05 for row in judged.values())
        scores = []
        for law, point, _ in at.values():
            lowest = objectives(law, point[None], x, observed[i])[0]
            scores.append(aicc(SimpleNamespace(runs=len(x), parameters=law.named(point), objective=lowest)))
        by_aicc += scores[0] - min(scores) > 4
    return called, by_aicc


DESIGNS = {
    "paper, .003/.0026": (paper_arms, PAPER_VALUES, PAPER_NOISE),
    "nano, .012/.012": (nano_arms, NANO_VALUES, NANO_NOISE),
}


def comparison_rates(grids: int) -> list[list[str]]:
    """A row for every design and truth: on how many grids a change was found, and told from the other kind."""
    rows = []
    for design, (pair, values, noise) in DESIGNS.items():
        arms = Arms.of(*pair(), PAPER)
        for truth, right in RIGHT.items():
            found = verdicts(arms, values, noise, truth, grids, seed=1)
            new, old = ([one[k] for one in found] for k in (0, 1))
            definite, by_aicc = (
                sum(name in ("delta phi", "shift") for name in names) for names in (new, old)
            )
            told = new.count(right) if right != "neither" else 0
            counts = sum(name != "neither" for name in new), definite, told, definite - told, by_aicc
            rows.append([design, truth, *map(str, counts)])
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def rival_rates(grids: int) -> list[list[str]]:
    """A row for every design: on how many grids drawn from r^phi another form was called better."""
    rows = []
    for design, (pair, values, noise) in DESIGNS.items():
        runs = load_grid() if pair is paper_arms else pair()[0]
        rows.append([design, *map(str, spurious_rivals(runs, values, noise, grids, seed=2))])
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def tables(grids: int) -> str:
    """Both tables, of `grids` grids for each row."""
    header = [
        "design, noise",
        "truth",
        "change found",
        "told apart",
        "rightly",
        "wrongly",
        "told apart by AICc",
    ]
    rivals = ["design, noise", "a rival called better", "by AICc"]
    return table(header, comparison_rates(grids)) + "\n\n" + table(rivals, rival_rates(grids))


if __name__ == "__main__":
    print(tables(int(sys.argv[1]) if sys.argv[1:] else 200))
