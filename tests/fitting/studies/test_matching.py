"""Matching against the specification's values, plain loops, exact curves and simulated noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq

from fitting.__main__ import main
from fitting.data.loading import load_runs
from fitting.data.plain import plain, read
from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.noise import Noise
from fitting.laws import JointLaw, OneTokenLaw
from fitting.published import load_grid
from fitting.report.report import text
from fitting.studies.analysis import Settings, analyse
from fitting.studies.iso_token import Cells, crossing, token_groups
from fitting.studies.matching import Matching, expected, match
from fitting.studies.readings import BELOW, OF_JOINT, OF_R1, OUTSIDE
from tests.fitting.simulations import matching as simulated

NANO = Path(__file__).parents[3] / "results" / "nano_iso_depth"
LAW = {"A": simulated.A, "alpha": simulated.ALPHA, "B": simulated.B, "beta": simulated.BETA}


def grid(case: str = "the law holds", noise: Noise | None = None, seed: int = 0) -> Runs:
    """A simulated grid of equal tokens."""
    runs = simulated.design()
    clean, _ = simulated.truth(runs, simulated.CASES[case])
    if noise is None:
        return runs.with_loss(clean)
    cells = Cells.of(runs, JointLaw())
    assert cells is not None
    return runs.with_loss(clean * np.exp(noise.draw(cells.runs, 1, np.random.default_rng(seed))[0]))


@pytest.mark.parametrize(
    ("where", "pairs", "medians", "by_budget"),
    [
        ("paper", 87, (0.432, 0.440), ((44, 45, 45, 44, 42, 40), (43, 42, 44, 45, 44, 45))),
        ("nano", 39, (0.640, 0.597), ((83, 66, 48), (80, 62, 42))),
    ],
)
def test_pairs_of_equal_budgets_have_the_medians_of_the_specification(
    where: str, pairs: int, medians: tuple[float, ...], by_budget: tuple[tuple[int, ...], ...]
) -> None:
    found = match(load_grid() if where == "paper" else load_runs(NANO), simulations=0, workers=1)
    assert [reading.method for reading in found.readings] == [OF_R1, OF_JOINT]
    for reading, median, each in zip(found.readings, medians, by_budget, strict=True):
        assert len(reading.pairs) == pairs
        assert reading.pooled.median == pytest.approx(median, abs=5e-4)
        budgets = [group.median for group in reading.groups["budget"]]
        assert budgets == pytest.approx([value / 100 for value in each], abs=0.01)
    assert found.agreement is None and found.readings[0].heterogeneity is None


def test_the_curve_is_crossed_where_a_root_finder_crosses_it() -> None:
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 5, 7))
    y = -np.sort(rng.uniform(0, 1, (3, 7)))
    targets = np.append(rng.uniform(-1.1, 0.1, (3, 9)), y[:, [0, 3, 6]], axis=1)
    found = crossing(x, y, targets)
    for row, curve in enumerate(y):
        for target, got in zip(targets[row], found[row], strict=True):
            if curve[-1] <= target <= curve[0]:
                moved = PchipInterpolator(x, curve - target)
                at = got if target in curve else brentq(moved, x[0], x[-1])
                assert got == pytest.approx(at, abs=1e-7) and moved(got) == pytest.approx(0, abs=1e-7)
            else:
                assert np.isnan(got)


def test_without_noise_the_true_phi_comes_back_whatever_law_the_loops_follow() -> None:
    for case in simulated.CASES:
        runs = grid(case)
        _, true = simulated.truth(runs, simulated.CASES[case])
        cells = Cells.of(runs, JointLaw())
        assert cells is not None
        goal = [true[np.flatnonzero(cells.runs == c)[0]] for c in cells.pairs]
        # What is left is the curve's interpolation, largest at the smallest widths.
        assert cells.phi(cells.means(runs.val_loss[None]))[0] == pytest.approx(goal, abs=0.012)


def test_errors_are_those_of_the_formula_and_of_drawn_noise() -> None:
    runs, noise = grid(), Noise(0.003, 0.0026)
    cells = Cells.of(runs, JointLaw())
    assert cells is not None
    loss = cells.means(runs.val_loss[None])[0]
    sizes = np.exp(cells.sizes(loss[None])[0])
    slope = simulated.A * simulated.ALPHA * sizes**-simulated.ALPHA  # |dL_1/dlnN|
    p = cells.pairs
    own = cells.slopes(loss)[np.arange(len(p)), p]
    by_formula = -sizes / (sizes - cells.n_once[p]) / np.log(cells.r[p]) / slope
    # The curve's slope is that of a cubic through the points.
    assert own == pytest.approx(by_formula, rel=0.12)
    rng = np.random.default_rng(1)
    drawn = cells.phi(cells.means(runs.val_loss * np.exp(noise.draw(cells.runs, 2000, rng))))
    values = {**LAW, "E": simulated.E, "phi": simulated.PHI}
    planned = expected(runs, JointLaw(), values, noise)
    assert [pair.error for pair in planned.pairs] == pytest.approx(np.nanstd(drawn, axis=0), rel=0.12)
    weights = np.array([pair.weight for pair in planned.pairs])
    assert planned.pooled.error == pytest.approx(np.nanstd(drawn @ weights), rel=0.08)


def test_repeats_and_smooth_curves_tell_the_noise() -> None:
    runs, noise = grid(), Noise(0.003, 0.0026)
    cells = Cells.of(runs, JointLaw())
    assert cells is not None and cells.degrees == (57 * 2, 3 * 4 + 9)
    log_loss = np.log(runs.val_loss) + noise.draw(cells.runs, 500, np.random.default_rng(2))
    means = cells.means(log_loss)
    within = ((log_loss - means[:, cells.runs]) ** 2).sum(axis=1)
    found = cells.noise(means, within)
    assert np.sqrt(found.run.mean()) == pytest.approx(0.003, rel=0.03)
    assert np.sqrt(found.cell.mean()) == pytest.approx(0.0026, rel=0.08)


def test_losses_outside_of_the_curve_have_no_phi_and_a_loop_of_no_worth_has_minus_infinity() -> None:
    runs = grid()
    loss = runs.val_loss.copy()
    tokens = runs.tokens == runs.tokens.min()
    loss[tokens & (runs.r == 2) & (runs.d_model == 48)] = runs.val_loss.min() - 1
    # As bad as a model a little smaller than N_once.
    chosen = tokens & (runs.r == 8) & (runs.d_model == 32)
    once = runs.n_once[chosen][0] * 0.9
    loss[chosen] = simulated.E + simulated.A * once**-simulated.ALPHA
    loss[chosen] += simulated.B * runs.tokens.min() ** -simulated.BETA
    found = match(runs.with_loss(loss), simulations=0, workers=1).readings[0]
    notes = {(p.r, p.d_model): (p.note, p.phi) for p in found.pairs if p.note}
    assert notes == {(2, 48): (OUTSIDE, None), (8, 32): (BELOW, None)}
    by_r = {group.value: group for group in found.groups["r"]}
    assert by_r[8].pairs == 11 and by_r[2].pairs == 11
    assert by_r[8].median is not None


def test_matching_reads_back_from_json_and_says_the_same() -> None:
    found = match(grid(noise=Noise(0.003, 0.0026)), simulations=30, workers=1)
    again = read(Matching, json.loads(json.dumps(plain(found), allow_nan=False)))
    assert text(again) == text(found) and again == found
    assert "no contradiction" in text(found) and "equal tokens" in text(found)


def test_a_seed_gives_the_same_numbers() -> None:
    runs = load_runs(NANO)
    first, second = (match(runs, simulations=30, seed=3, workers=workers) for workers in (1, 2))
    assert first == second


def test_a_law_that_does_not_hold_is_contradicted() -> None:
    found = match(grid("loops .05 nats worse", Noise(0.001, 0.0005)), simulations=200, workers=1)
    assert found.agreement is not None and found.agreement.disagrees
    assert found.readings[0].heterogeneity is not None and found.readings[0].heterogeneity < 0.05
    assert found.doubts == [found.agreement.message] and "does not describe" in found.doubts[0]
    runs = grid("loops .05 nats worse", Noise(0.001, 0.0005))
    quick = Settings(starts=60, resamples=200, rivals=False, sensitivity=False, limits=None, workers=1)
    analysis = analyse(runs, settings=quick)
    assert analysis.matching is not None and analysis.matching.doubts[0] in analysis.doubts
    assert "Matching: phi without the law" in text(analysis)


def test_one_token_count_is_matched_beside_the_law_without_beta() -> None:
    runs = grid(noise=Noise(0.003, 0.0026))
    runs = runs.take(runs.tokens == runs.tokens.max())
    found = match(runs, simulations=30, workers=1)
    assert found.agreement is not None and found.agreement.law == OneTokenLaw().name
    assert found.readings[0].trend is None and set(token_groups(runs.tokens)) == {0}


def test_runs_that_cannot_be_matched_are_refused_with_what_is_needed() -> None:
    runs = grid()
    narrow = runs.take((runs.r > 1) | (runs.d_model < 24))
    with pytest.raises(FitError, match="3 widths or more at its tokens"):
        match(narrow, workers=1)
    with pytest.raises(FitError, match="not possible with this design"):
        expected(narrow, JointLaw(), {**LAW, "E": 2.0, "phi": 0.6}, Noise(0.003))


def test_the_command_prints_tables_or_json_and_says_what_it_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["match", "published", "--json", "--quiet", "--grids", "20"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["kind"] == "matching" and len(numbers["readings"][0]["pairs"]) == 87
    assert main(["match", "published", "--quiet", "--like", "published"]) == 2
    assert "Add --planned" in capsys.readouterr().err
    assert main(["match", "published", "--quiet", "--where", "r>1"]) == 2
    assert "cannot be matched" not in capsys.readouterr().out
    runs, path = grid("loops .05 nats worse", Noise(0.001, 0.0005)), tmp_path / "design.csv"
    columns = ("r", "d_model", "flops_per_token", "tokens", "n_once", "n_rec", "seed", "val_loss")
    values = zip(*(getattr(runs, name).tolist() for name in columns), strict=True)
    rows = [",".join(columns), *(",".join(map(repr, row)) for row in values)]
    path.write_text("\n".join(["flops_budget," + rows[0], *("," + row for row in rows[1:])]))
    assert main(["match", str(path), "--planned", "--quiet"]) == 0
    assert "over all 36 pairs" in capsys.readouterr().out
    assert main(["match", str(path), "--quiet"]) == 1
    told = capsys.readouterr()
    assert "not to be trusted: matching (equal tokens)" in told.err and "phi is not one number" in told.out
