"""Case studies: the right reading is named, channels add up, arms can be reversed."""

import dataclasses
import json
import math

import numpy as np
import pytest

from fitting.data.splits import PAPER, REGRESSED
from fitting.errors import FitError
from fitting.estimation.calibration import Claim, Fitted, simulated_gains
from fitting.estimation.fits import fit_inputs
from fitting.estimation.noise import Noise
from fitting.estimation.results import Status
from fitting.laws import Inputs, JointLaw, LossShift, Power, StudyPower
from fitting.published import load_grid
from fitting.report.report import text
from fitting.studies.arms import Arms
from fitting.studies.comparison import Reading, compare, judge

GRID = load_grid().where("budget<=4.64e18")
LAW = JointLaw()
TRUTH = {"A": 28.13, "alpha": 0.1996, "B": 928.1, "beta": 0.3693, "E": 1.5697}
PHI = 0.4332
SEARCH = {"starts": 100, "resamples": 100, "seed": 0}


def made(phi, shift=0.0, seed=0, runs=GRID, noise=0.002):
    theta = LAW.to_theta(TRUTH | {"phi": phi})
    clean = LAW.predict(theta[None], LAW.inputs(runs))[0] + shift * (runs.r > 1)
    return runs.with_loss(clean * np.exp(noise * np.random.default_rng(seed).standard_normal(len(runs))))


def study(phi, shift=0.0, seed=1, ratio=1.25, noise=0.002):
    """Truncated runs: cheaper per token, so more tokens for the same budget; without r=1."""
    runs = dataclasses.replace(
        GRID,
        tokens=np.where(GRID.r > 1, GRID.tokens * ratio, GRID.tokens),
        flops_per_token=np.where(GRID.r > 1, GRID.flops_per_token / ratio, GRID.flops_per_token),
        bptt=np.where(GRID.r > 1, "truncated", "full").astype(object),
    )
    return made(phi, shift, seed, runs, noise).where("r>1")


@pytest.fixture(scope="module")
def lower_phi():
    return compare(made(PHI), study(PHI - 0.12), **SEARCH)


@pytest.fixture(scope="module")
def shifted():
    return compare(made(PHI), study(PHI, shift=0.03), **SEARCH)


def test_a_true_change_of_phi_is_named(lower_phi):
    assert lower_phi.preferred == "delta phi" and lower_phi.trusted
    for estimate in lower_phi.estimates:
        assert estimate.delta_phi == pytest.approx(-0.12, abs=0.04)
        recommended = estimate.intervals[0]
        assert recommended.recommended and recommended.low < estimate.delta_phi < recommended.high
    assert [e.method for e in lower_phi.estimates] == ["separate", "paired", "transfer"]
    by = {reading.name: reading for reading in lower_phi.readings}
    assert by["both"].shift == pytest.approx(0, abs=0.008)


def test_a_true_shift_is_named(shifted):
    assert shifted.preferred == "shift"
    by = {reading.name: reading for reading in shifted.readings}
    assert by["shift"].shift == pytest.approx(0.03, abs=0.004)
    assert by["both"].delta_phi == pytest.approx(0, abs=0.06)


def test_delta_phi_is_never_printed_without_the_shift(lower_phi, shifted):
    for found in (lower_phi, shifted):
        assert "shift (nats)" in text(found) and "shift alone" in found.verdict


def test_channels_sum_to_the_difference_and_see_the_added_tokens(lower_phi):
    assert len(lower_phi.channels) == 60
    for c in lower_phi.channels:
        assert c.token + c.parameters + c.capacity + c.unexplained == pytest.approx(c.difference, abs=1e-12)
        assert c.token < 0 and c.parameters == 0 and c.capacity > 0
        assert abs(c.unexplained) < 0.03


def test_reversing_the_arms_reverses_the_sign(lower_phi):
    back = compare(study(PHI - 0.12), made(PHI), **SEARCH | {"resamples": 0})
    for there, again in zip(lower_phi.estimates[:2], back.estimates[:2], strict=True):
        assert again.delta_phi == pytest.approx(-there.delta_phi, abs=1e-6)
    assert back.estimates[2].delta_phi * lower_phi.estimates[2].delta_phi < 0
    assert back.estimates[0].intervals == ()
    assert {c.difference for c in back.channels} == {-c.difference for c in lower_phi.channels}


def test_two_equal_arms_need_no_change():
    found = compare(made(PHI, seed=5), made(PHI, seed=5), **SEARCH)
    assert found.preferred == "neither"
    assert all(
        abs(e.delta_phi) < 1e-6 and e.intervals[1].high - e.intervals[1].low < 1e-5
        for e in found.estimates[:2]
    )


def test_equal_runs_with_r1_count_once(lower_phi):
    own = dataclasses.replace(
        made(PHI - 0.1, seed=2), source=np.array([f"own{i}" for i in range(80)], object)
    )
    twice = compare(made(PHI), own, **SEARCH | {"resamples": 0})
    assert twice.runs == (20, 60, 60) and lower_phi.runs == (20, 60, 60)
    assert lower_phi.cells == 16
    # the study's own r=1 runs are listed, and that their losses differ is said
    assert len(twice.excluded) == 20 and all("r=1 run shared with" in gone.rule for gone in twice.excluded)
    assert "20 shared r=1 runs have other losses" in text(twice) and "own0" in text(twice)
    assert {point.arm for point in twice.points} == {"shared", "baseline", "study"}
    assert sum(point.arm == "shared" for point in twice.points) == 20 and len(twice.points) == 140
    assert lower_phi.excluded == () and lower_phi.warnings == ()


def test_runs_on_budgets_that_are_not_shared_are_listed():
    found = compare(made(PHI), study(PHI).where("budget<=2.15e18"), **SEARCH | {"resamples": 0})
    rules = {gone.rule for gone in found.excluded}
    assert rules == {"its budget 4.64e+18 is not shared by both arms"}
    assert len(found.excluded) == (GRID.budget == 4.64e18).sum()


@pytest.mark.parametrize(("rules", "resamples", "words"), [
    (("budget<=1e18", "r<=4"), 100, "6 blocks cannot carry"),
    (("budget<=4.64e18",), 1, "1 resamples give no percentiles"),
])  # fmt: skip
def test_intervals_that_mean_nothing_are_not_printed(rules, resamples, words):
    arms = made(PHI).where(*rules), study(PHI - 0.12).where(*rules)
    found = compare(*arms, starts=60, resamples=resamples)
    assert all(not e.intervals for e in found.estimates)
    assert f"not estimated: {words}" in text(found) and "nan" not in text(found)


def test_results_are_plain_json(lower_phi):
    assert json.loads(json.dumps(lower_phi.to_dict()))["preferred"] == "delta phi"


def test_without_grids_the_verdict_needs_a_lead_in_aicc():
    def reading(name, score, delta=None, shift=None):
        return Reading(name, delta, shift, 1.0, score, True, "")

    close = (
        reading("neither", 0.0), reading("delta phi", -20.0, delta=-0.1), reading("shift", -21.0, shift=0.01),
        reading("both", -30.0, delta=-0.1, shift=0.01),
    )  # fmt: skip
    preferred, sentence = judge(close, None)
    assert (
        preferred == "undecided"
        and "not to be told apart" in sentence
        and "both together gain another 9.0" in sentence
    )
    assert judge((*close[:2], reading("shift", -40.0, shift=0.02), close[3]), None)[0] == "shift"
    assert "not to be trusted" not in sentence
    few = judge((close[0], reading("delta phi", math.nan), *close[2:]), None)
    assert few[0] == "undecided" and "AICc of 'delta phi' does not exist" in few[1]
    doubtful = (*close[:3], dataclasses.replace(close[3], trusted=False, message="at bound: phi"))
    assert "not to be trusted, because of the status of 'both'" in judge(doubtful, None)[1]


READINGS = tuple(
    Reading(name, delta, shift, 1.0, -1.0, True, "")
    for name, delta, shift in (
        ("neither", None, None), ("delta phi", -0.1, None), ("shift", None, 0.02), ("both", -0.2, 0.01),
    )
)  # fmt: skip


@pytest.mark.parametrize(("shares", "preferred", "words"), [
    ((0.05,), "neither", "no change is needed to explain the study: of 200 simulated grids without one, 5.0% gain"),
    ((0.049, 0.05, 0.5), "undecided", "the study differs (a gain as large in 4.9% of 200 simulated grids without"),
    ((0.01, 0.02, 0.5), "shift", "a lead as large in 2.0% of those drawn from 'delta phi'"),
    ((0.01, 0.02, 0.01), "shift", "both together gain more (as much in 1.0% of grids drawn from 'shift'; delta"),
])  # fmt: skip
def test_a_verdict_needs_less_than_one_grid_in_twenty(shares, preferred, words):
    pairs = ("neither", "shift"), ("delta phi", "shift"), ("shift", "both")
    claims = tuple(
        Claim(*pair, 0.1, share, 200, Noise(0.003)) for pair, share in zip(pairs, shares, strict=False)
    )
    found, sentence = judge(READINGS, claims)
    assert found == preferred and words in sentence
    assert ("not to be told apart" in sentence) == (preferred == "undecided")


def test_claims_are_those_of_a_plain_loop(shifted):
    arms = Arms.of(made(PHI), study(PHI, shift=0.03), PAPER)
    # cells of (budget, r, arm): 4 budgets of r=1 once and of three other r in each arm
    assert len(np.unique(arms.own_cells)) == 28 and arms.cells == 16
    assert shifted.claims[2].noise.run == pytest.approx(0.002, rel=0.2)
    change, apart, both = shifted.claims
    assert (change.simpler, change.richer) == ("neither", "shift") and change.holds and apart.holds
    assert (apart.simpler, both.simpler, both.richer) == ("delta phi", "shift", "both") and not both.holds
    assert shifted.extra_runs is None
    by = {reading.name: reading for reading in shifted.readings}
    assert change.gain == pytest.approx(np.log(by["neither"].objective / by["shift"].objective))
    assert both.gain == pytest.approx(np.log(by["shift"].objective / by["both"].objective))
    law = LossShift(JointLaw(Power(), PAPER))
    theta = law.to_theta(by["shift"].parameters)
    clean = law.log_loss_and_gradient(theta[None], arms.x)[0][0]
    drawn = both.noise.draw(arms.own_cells, 200, np.random.default_rng(0))
    simpler, richer = law, LossShift(JointLaw(StudyPower(), PAPER))
    for k in (0, 1):
        grid = arms.runs.with_loss(np.exp(clean + drawn[k]))
        search = {"starts": 100, "seed": 0, "workers": 1}
        low = [fit_inputs(one, arms.x, grid, **search).objective for one in (simpler, richer)]
        at = [Fitted(simpler, theta), Fitted(richer, richer.to_theta(by["both"].parameters))]
        found = simulated_gains(at[0], at[1:], arms.x, arms.own_cells, both.noise, 200, seed=0, workers=1)
        assert found[0, k] == pytest.approx(np.log(low[0] / low[1]), abs=1e-6)


def test_where_the_runs_cannot_tell_the_runs_that_would_are_named():
    arms = made(PHI, noise=0.012), study(PHI - 0.1, noise=0.012)
    options = {"more_budgets": (1e20,), "more_widths": (2560.0,)}
    found = compare(*arms, **SEARCH | {"resamples": 0}, **options)
    assert found.preferred in ("neither", "undecided") and len(found.extra_runs) == 5
    untold = next(claim for claim in found.claims if not claim.holds)
    best, noise = found.extra_runs[0], untold.noise
    assert best.separation == max(run.separation for run in found.extra_runs)
    assert "Runs that would tell more" in text(found) and untold.simpler in text(found)
    # by hand: the difference of the two predictions, over noise and the first one's own error
    one = Arms.of(*arms, PAPER)
    laws = {"neither": JointLaw(Power(), PAPER), "delta phi": JointLaw(StudyPower(), PAPER)}
    laws["shift"] = LossShift(laws["neither"])
    by = {reading.name: reading.parameters for reading in found.readings}
    source = next(p for p in found.points if (p.r, p.d_model, p.arm) == (best.r, best.d_model, best.arm))
    n_once, n_rec = Inputs.of(one.runs, PAPER).n_once, one.runs.n_rec
    i = next(i for i, p in enumerate(found.points) if p == source)
    x = Inputs(
        *(np.array([v]) for v in (n_once[i], n_rec[i], best.r, best.tokens, best.budget, best.arm == "study"))
    )
    loss, slope, slopes = [], None, None
    for name in (untold.simpler, untold.richer):
        theta = laws[name].to_theta(by[name])[None]
        loss.append(laws[name].predict(theta, x)[0, 0])
        if slope is None:
            slope = laws[name].log_loss_and_gradient(theta, x)[1][0, :, 0]
            slopes = laws[name].log_loss_and_gradient(theta, one.x)[1][0]
    assert best.difference == pytest.approx(loss[1] - loss[0], rel=1e-6)
    spread = noise.run**2 + noise.cell**2
    variance = spread * (1 + slope @ np.linalg.inv(slopes @ slopes.T) @ slope)
    assert best.separation == pytest.approx(abs(np.log(loss[1] / loss[0])) / np.sqrt(variance), rel=1e-4)
    with pytest.raises(FitError, match="A further budget must be positive, not -1"):
        compare(*arms, **SEARCH | {"resamples": 0}, more_budgets=(-1.0,))


def test_every_reading_counts_for_the_trust(monkeypatch):
    import fitting.studies.comparison as module

    fitted = module.fit_inputs

    def doubtful(law, *args, **kwargs):
        result = fitted(law, *args, **kwargs)
        wrong = law.name.endswith("plus shift")
        return dataclasses.replace(result, problems=((Status.AT_BOUND, "made"),)) if wrong else result

    monkeypatch.setattr(module, "fit_inputs", doubtful)
    found = compare(made(PHI), study(PHI), starts=60, resamples=0)
    assert not found.trusted and len(found.problems) == 2
    assert "reading 'shift': at bound: made" in found.problems[0] and "'both'" in found.verdict


def test_what_cannot_be_compared_is_refused():
    base = made(PHI)
    with pytest.raises(FitError, match="share 0 budgets"):
        compare(base.where("budget<1e18"), study(PHI).where("budget>1e18"), **SEARCH)
    with pytest.raises(FitError, match="study has no run with r>1"):
        compare(base, base.where("r=1"), **SEARCH)
    with pytest.raises(FitError, match="r=1"):
        compare(base.where("r>1"), study(PHI), **SEARCH)
    lanes = dataclasses.replace(study(PHI), n_injection=np.full(60, 16.0))
    with pytest.raises(FitError, match="regressed"):
        compare(base, lanes, split=REGRESSED, **SEARCH)
