"""The batched solver: exact recovery, scale and worker independence, bounds, and laws that misbehave."""

import numpy as np
import pytest

from fitting.data.splits import PAPER
from fitting.estimation.solver import CHUNK, Problem, minimise, multi_start, uniform_starts
from fitting.laws import (
    ChinchillaLaw,
    DriftingPower,
    FixedPower,
    Inputs,
    JointLaw,
    Law,
    LogGrowth,
    LossShift,
    PerRecurrence,
    Power,
    Saturating,
    StudyPower,
    TokenDriftingPower,
)  # fmt: skip
from fitting.published import load_grid

GRID = load_grid()
X = Inputs.of(GRID, PAPER, np.where(GRID.r > 1, np.arange(len(GRID)) % 2, 0.0))
BASE = {"A": 28.13, "alpha": 0.1996, "B": 928.1, "beta": 0.3693, "E": 1.5697}
TRUTHS = [
    (ChinchillaLaw(), {}),
    (JointLaw(Power()), {"phi": 0.433}),
    (JointLaw(FixedPower(1)), {}),
    (JointLaw(PerRecurrence()), {"m_2": 1.3, "m_4": 1.9, "m_8": 2.5}),
    (JointLaw(Saturating()), {"c": 2.0, "k": 0.3}),
    (JointLaw(Saturating()), {"c": 1.2, "k": 1.0}),
    (JointLaw(LogGrowth()), {"c": 0.68}),
    (JointLaw(DriftingPower()), {"phi": 0.44, "slope": 0.03}),
    (JointLaw(TokenDriftingPower()), {"phi": 0.44, "slope": -0.05}),
    (JointLaw(StudyPower()), {"phi": 0.44, "delta_phi": -0.08}),
    (LossShift(JointLaw()), {"phi": 0.44, "shift": 0.02}),
]


def problem(law, log_loss, weight=1.0):
    low, high = np.asarray(law.bounds, dtype=float).T
    return Problem(law, X, log_loss, np.full(len(X), weight), low, high)


def noisy(seed, noise=0.003):
    law = JointLaw()
    truth = law.to_theta(BASE | {"phi": 0.433})
    clean = law.log_loss_and_gradient(truth[None], X)[0][0]
    return law, clean + noise * np.random.default_rng(seed).standard_normal(len(X))


@pytest.mark.parametrize(("law", "own"), TRUTHS, ids=lambda value: getattr(value, "name", None))
def test_noise_free_grids_are_recovered(law, own):
    law = law.bound_to(X)
    truth = law.to_theta(BASE | own)
    clean = law.log_loss_and_gradient(truth[None], X)[0][0]
    found = multi_start(problem(law, clean), uniform_starts(law, 300, np.random.default_rng(0)))
    assert law.to_reported(found.best.theta[0]) == pytest.approx(law.to_reported(truth), rel=1e-6)
    assert found.agreeing[0] >= 5


def test_scaling_the_objective_moves_nothing():
    law, log_loss = noisy(1)
    starts = uniform_starts(law, 200, np.random.default_rng(0))
    summed, mean = (multi_start(problem(law, log_loss, w), starts).best for w in (1.0, 1 / 116))
    assert mean.theta == pytest.approx(summed.theta, abs=1e-6)
    assert mean.objective * 116 == pytest.approx(summed.objective, rel=1e-10)


def test_workers_and_company_cannot_change_a_bit():
    law, log_loss = noisy(2)
    starts = uniform_starts(law, 3 * CHUNK + 7, np.random.default_rng(0))
    one, many = (minimise(problem(law, log_loss), starts, 30, workers=w) for w in (1, 4))
    assert (one.theta == many.theta).all() and (one.objective == many.objective).all()


def test_the_returned_gradient_is_that_of_the_objective_and_vanishes():
    law, log_loss = noisy(3)
    found = multi_start(problem(law, log_loss), uniform_starts(law, 200, np.random.default_rng(0))).best
    assert np.abs(found.gradient).max() < 1e-8
    early = minimise(problem(law, log_loss), found.theta + 0.02, max_iterations=0)

    def objective(theta):
        return minimise(problem(law, log_loss), theta, max_iterations=0).objective[0]

    for j in range(6):
        step = np.zeros((1, 6))
        step[0, j] = 1e-7
        difference = (objective(early.theta + step) - objective(early.theta - step)) / 2e-7
        assert early.gradient[0, j] == pytest.approx(difference, rel=1e-5, abs=1e-9)


def test_weights_are_repetitions():
    law, log_loss = noisy(4)
    counts = np.random.default_rng(5).integers(0, 3, len(X))
    starts = uniform_starts(law, 200, np.random.default_rng(0))
    low, high = np.asarray(law.bounds).T
    weighted = multi_start(Problem(law, X, log_loss, counts.astype(float), low, high), starts).best
    repeated = np.repeat(np.arange(len(X)), counts)
    copied = Problem(law, X.take(repeated), log_loss[repeated], np.ones(len(repeated)), low, high)
    assert multi_start(copied, starts).best.theta == pytest.approx(weighted.theta, abs=1e-6)


def test_solutions_stay_in_the_box_and_pinned_parameters_stay_put():
    law, log_loss = noisy(6)
    low, high = np.asarray(law.bounds, dtype=float).T
    low, high = low.copy(), high.copy()
    low[5], high[1] = 0.6, 0.15
    starts = uniform_starts(law, 100, np.random.default_rng(0))
    found = multi_start(Problem(law, X, log_loss, np.ones(len(X)), low, high), starts).best
    assert found.theta[0, 5] == 0.6 and (found.theta >= low).all() and (found.theta <= high).all()
    pinned_low, pinned_high = np.tile(low, (2, 1)), np.tile(high, (2, 1))
    pinned_low[:, 5] = pinned_high[:, 5] = [0.7, 0.9]
    pair = minimise(Problem(law, X, log_loss, np.ones(len(X)), pinned_low, pinned_high), starts[:2])
    assert pair.theta[:, 5].tolist() == [0.7, 0.9]


def test_a_law_that_is_not_finite_somewhere_does_not_spoil_the_batch():
    class Holes(Law):
        name = "holes"
        param_names = ("a", "b")
        bounds = np.array([[-2.0, 4.0], [-2.0, 2.0]])

        def predict(self, theta, x):
            with np.errstate(invalid="ignore"):
                return np.sqrt(theta[:, :1]) + theta[:, 1:] * 0.1 * np.log(x.r) + 1

        def gradient(self, theta, x):
            with np.errstate(invalid="ignore", divide="ignore"):
                first = np.broadcast_to(0.5 / np.sqrt(theta[:, :1]), (len(theta), len(x)))
            return np.stack([first, np.broadcast_to(0.1 * np.log(x.r), first.shape)], axis=1)

    law = Holes()
    clean = np.log(law.predict(np.array([[2.0, 0.5]]), X)[0])
    found = multi_start(problem(law, clean), uniform_starts(law, 60, np.random.default_rng(0)))
    assert found.best.theta[0] == pytest.approx([2.0, 0.5], rel=1e-6)


def test_hopeless_starts_are_dropped_and_counted():
    law, log_loss = noisy(7)
    starts = uniform_starts(law, 300, np.random.default_rng(0))
    found = multi_start(problem(law, log_loss), starts)
    assert len(starts) == 300 and 200 < found.dropped[0] < 300
    assert found.agreeing[0] <= 300 - found.dropped[0]
