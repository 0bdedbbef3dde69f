"""Laws and multipliers: gradients against finite differences, and a law that brings only predict and
gradient.
"""

import numpy as np
import pytest

from fitting.data.splits import PAPER, REGRESSED
from fitting.errors import FitError
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

FORMS = (
    Power(),
    FixedPower(0.4),
    PerRecurrence(),
    Saturating(),
    LogGrowth(),
    DriftingPower(),
    TokenDriftingPower(),
)
GRID = load_grid()
X = Inputs.of(GRID, PAPER, np.where(GRID.r > 1, np.arange(len(GRID)) % 2, 0.0))
LAWS = [
    ChinchillaLaw(), *[JointLaw(form) for form in FORMS], JointLaw(StudyPower()),
    LossShift(JointLaw()), LossShift(JointLaw(StudyPower())),
]  # fmt: skip


class OnlyPredicts(Law):
    """A law of a user: two methods, nothing else."""

    name = "power of tokens"
    param_names = ("c", "p")
    bounds = np.array([[0.1, 10.0], [0.0, 1.0]])

    def predict(self, theta, x):
        return 1 + theta[:, :1] * (x.tokens / 1e9) ** -theta[:, 1:]

    def gradient(self, theta, x):
        power = (x.tokens / 1e9) ** -theta[:, 1:]
        return np.stack([power, -theta[:, :1] * power * np.log(x.tokens / 1e9)], axis=1)


def typical(law, count, seed):
    """Parameter vectors in the region where fits live, so that differences are well above rounding."""
    rng = np.random.default_rng(seed)
    low, high = np.asarray(law.bounds).T
    theta = rng.uniform(low, high, (count, len(low)))
    names = list(law.param_names)
    for name, span in {
        "A": (2, 5),
        "alpha": (0.15, 0.4),
        "B": (5, 8),
        "beta": (0.25, 0.5),
        "E": (0.2, 0.6),
    }.items():
        if name in names:
            theta[:, names.index(name)] = rng.uniform(*span, count)
    for name, span in {"phi": (-1, 1.5), "slope": (-0.1, 0.1), "c": (0.1, 2), "shift": (-0.1, 0.1)}.items():
        if name in names:
            theta[:, names.index(name)] = rng.uniform(*span, count)
    return theta


@pytest.mark.parametrize("law", [*LAWS, OnlyPredicts()], ids=lambda law: law.name)
def test_gradients_equal_finite_differences(law):
    law = law.bound_to(X)
    theta = typical(law, 8, seed=1)
    log_loss, gradient = law.log_loss_and_gradient(theta, X)
    assert log_loss.shape == (8, 116) and gradient.shape == (8, len(law.param_names), 116)
    assert np.exp(log_loss) == pytest.approx(law.predict(theta, X), rel=1e-12)
    for j in range(theta.shape[1]):
        step = np.zeros(theta.shape[1])
        step[j] = 1e-5
        up, down = (
            law.log_loss_and_gradient(theta + step, X)[0],
            law.log_loss_and_gradient(theta - step, X)[0],
        )
        assert gradient[:, j] == pytest.approx((up - down) / 2e-5, rel=1e-6, abs=1e-9)
    assert law.gradient(theta, X) == pytest.approx(gradient * np.exp(log_loss)[:, None], rel=1e-9)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.formula)
def test_one_recurrence_is_worth_one(form):
    law = JointLaw(form).bound_to(X)
    m, _ = law.multiplier(typical(law, 5, seed=2)[:, 5:], X)
    ones = np.broadcast_to(m, (m.shape[0], 116))[:, GRID.r == 1]
    assert ones == pytest.approx(1.0, rel=1e-12)


def test_reference_points_are_geometric_means_and_stated():
    law = JointLaw(DriftingPower()).bound_to(X)
    expected = np.exp(np.log(GRID.training_flops).mean())
    assert law.multiplier.reference == pytest.approx(expected)
    assert f"{expected:.4g}" in law.name
    assert JointLaw(DriftingPower(1e18)).bound_to(X).multiplier.reference == 1e18


def test_reported_values_and_coordinates_are_inverse():
    law = JointLaw(split=REGRESSED)
    values = {"A": 28.0, "alpha": 0.2, "B": 900.0, "beta": 0.37, "E": 1.57, "phi": 0.45}
    assert law.to_reported(law.to_theta(values)) == pytest.approx(list(values.values()), rel=1e-12)
    with pytest.raises(FitError, match="phi"):
        law.to_theta({k: v for k, v in values.items() if k != "phi"})
    with pytest.raises(FitError, match="positive"):
        law.to_theta(values | {"A": -1.0})


def test_improved_starts_have_the_least_squares_amplitudes():
    law = JointLaw()
    truth = law.to_theta([28.0, 0.2, 900.0, 0.37, 1.57, 0.45])
    log_loss = law.log_loss_and_gradient(truth[None], X)[0][0]
    start = truth.copy()
    start[[0, 2, 4]] = [10.0, -3.0, 1.0]
    assert law.improve_starts(start[None], X, log_loss)[0] == pytest.approx(truth, abs=1e-3)
    low, high = law.bounds.T
    wild = np.random.default_rng(0).uniform(low, high, (200, 6))
    better = law.improve_starts(wild, X, log_loss)
    assert ((better >= low) & (better <= high)).all() and np.isfinite(better).all()
    assert (better[:, [1, 3, 5]] == wild[:, [1, 3, 5]]).all()


def test_the_shift_touches_the_studys_looped_runs_only():
    law = LossShift(JointLaw())
    theta = np.append(JointLaw().to_theta([28, 0.2, 900, 0.37, 1.57, 0.45]), 0.05)[None]
    plain = theta.copy()
    plain[0, -1] = 0
    difference = law.predict(theta, X)[0] - law.predict(plain, X)[0]
    assert difference == pytest.approx(0.05 * ((GRID.r > 1) & (X.study == 1)), abs=1e-12)
