"""The Huber function and its moments against numerical integration."""

import numpy as np
import pytest
from scipy.integrate import quad

from fitting.estimation.objective import DELTA, huber, normal_psi_moments, psi, robust_scale


def test_huber_is_the_integral_of_its_derivative():
    for x in (-0.02, -DELTA, -3e-4, 0.0, 5e-4, 0.01):
        area, _ = quad(
            lambda t: float(psi(np.array(t))), 0, x, points=[-DELTA, DELTA] if abs(x) > DELTA else None
        )
        assert float(huber(np.array(x))) == pytest.approx(area, abs=1e-15)


@pytest.mark.parametrize("sigma", [2e-4, 1e-3, 5e-3])
def test_moments_under_normal_residuals(sigma):
    def expect(f):
        density = lambda t: np.exp(-0.5 * (t / sigma) ** 2) / (sigma * np.sqrt(2 * np.pi))  # noqa: E731
        return quad(lambda t: f(t) * density(t), -12 * sigma, 12 * sigma, points=[-DELTA, DELTA], limit=200)[
            0
        ]

    slope, square = normal_psi_moments(sigma)
    assert slope == pytest.approx(expect(lambda t: abs(t) <= DELTA), rel=1e-5)
    assert square == pytest.approx(expect(lambda t: np.clip(t, -DELTA, DELTA) ** 2), rel=1e-6)


def test_the_robust_scale_ignores_outliers():
    draws = np.random.default_rng(0).standard_normal(20000)
    draws[:500] = 1e3
    assert robust_scale(draws) == pytest.approx(1.0, abs=0.05)
