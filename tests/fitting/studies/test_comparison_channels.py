"""Channels of one matched pair, by hand, and their exactness under an additive law."""

import numpy as np
import pytest

from fitting.errors import FitError
from fitting.laws import Inputs
from fitting.studies.arms import channels, matched_pairs

LAW = {"A": 30.0, "alpha": 0.2, "B": 900.0, "beta": 0.37}


def inputs(tokens, n_rec, study):
    two = np.ones(2)
    return Inputs(2e7 * two, np.array(n_rec), 4 * two, np.array(tokens), 1e18 * two, np.array(study))


def test_each_channel_by_hand():
    x = inputs([1e9, 1.3e9], [2e7, 2.2e7], [0.0, 1.0])
    width, budget = np.full(2, 640.0), np.full(2, 1e18)
    (c,) = channels([(0, 1)], x, np.array([2.80, 2.81]), width, budget, LAW, (0.45, 0.38))
    size = lambda rec, phi: 30 * (2e7 + 4**phi * rec) ** -0.2  # noqa: E731
    assert c.token == pytest.approx(900 * (1.3e9**-0.37 - 1e9**-0.37), abs=1e-14)
    assert c.parameters == pytest.approx(size(2.2e7, 0.45) - size(2e7, 0.45), abs=1e-14)
    assert c.capacity == pytest.approx(size(2.2e7, 0.38) - size(2.2e7, 0.45), abs=1e-14)
    assert c.token + c.parameters + c.capacity + c.unexplained == pytest.approx(c.difference, abs=1e-12)
    assert (c.token < 0, c.parameters < 0, c.capacity > 0) == (True, True, True)


def test_nothing_is_unexplained_when_both_losses_come_from_the_law():
    x = inputs([1e9, 1.3e9], [2e7, 2.2e7], [0.0, 1.0])
    effective = x.n_once + 4 ** np.array([0.45, 0.38]) * x.n_rec
    loss = 1.6 + 30 * effective**-0.2 + 900 * x.tokens**-0.37
    (c,) = channels([(0, 1)], x, loss, np.full(2, 640.0), np.full(2, 1e18), LAW, (0.45, 0.38))
    assert c.unexplained == pytest.approx(0, abs=1e-12)


def test_pairs_match_in_r_width_and_budget():
    arms = np.array([0, 0, 0, 1, 1, 1])
    r = np.array([1, 4, 8, 4, 8, 4])
    width = np.array([640, 640, 640, 640, 768, 640])
    budget = np.array([1e18, 1e18, 1e18, 1e18, 1e18, 2e18])
    assert matched_pairs(arms, r, width, budget) == [(1, 3)]
    with pytest.raises(FitError, match="No run of the study matches"):
        channels([], None, budget, width, budget, LAW, (0.4, 0.4))
