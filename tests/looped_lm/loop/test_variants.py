"""Loop variants from other papers, against their formulas in plain numpy or loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looped_lm import (
    DiagonalInjection,
    DoublyStochasticLanes,
    LinearInjection,
    LoopIndexInjection,
    PassthroughInjection,
    RandomStateInjection,
    TruncatedBPTT,
)
from looped_lm.loop.variants.doubly_stochastic_lanes import doubly_stochastic
from looped_lm.model.accounting import count_parameters, parameter_roles
from tests.support.tiny import tiny_model, tokens

# ---- Diagonal injection


def test_diagonal_injection_is_the_discretised_system() -> None:
    injection = DiagonalInjection(8)
    rng = np.random.default_rng(0)
    log_a, log_delta, b = rng.normal(size=8), rng.normal(size=8), rng.normal(size=(8, 8))
    e, s = rng.normal(size=(2, 3, 8)), rng.normal(size=(2, 3, 8))
    injection = injection.double()
    with torch.no_grad():
        injection.log_a.copy_(torch.from_numpy(log_a))
        injection.log_delta.copy_(torch.from_numpy(log_delta))
        injection.proj.weight.copy_(torch.from_numpy(b))
    step = np.log1p(np.exp(log_delta))
    expected = np.exp(-np.exp(log_a) * step) * s + step * (e @ b.T)
    actual = injection(torch.from_numpy(e), torch.from_numpy(s), 3)
    # The decay rate's floor of 1e-6 is the difference.
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_diagonal_injection_starts_as_parcae() -> None:
    injection = DiagonalInjection(8)
    torch.testing.assert_close(injection.decay(), torch.full((8,), math.sqrt(0.2)), rtol=1e-5, atol=0)
    assert torch.equal(injection.proj.weight, torch.eye(8))
    e = torch.randn(1, 2, 8)
    assert injection.initial_state(e) is e and injection.reinjects_input
    assert injection.flops_per_token() == 2 * 64 + 3 * 8
    torch.testing.assert_close(DiagonalInjection(8, decay=0.9).decay(), torch.full((8,), 0.9))
    for decay in (0.0, 1.0, -2.0):
        with pytest.raises(ValueError, match="must lie in"):
            DiagonalInjection(8, decay=decay)
    roles = parameter_roles(tiny_model(injection=DiagonalInjection))
    assert roles["injection.proj.weight"] == "matrix"
    assert roles["injection.log_a"] == roles["injection.log_delta"] == "norm"


@given(st.floats(-40, 40), st.floats(-40, 40))
@settings(max_examples=200, deadline=None)
def test_the_spectral_radius_is_below_one_for_every_parameter(log_a: float, log_delta: float) -> None:
    injection = DiagonalInjection(4)
    with torch.no_grad():
        injection.log_a.fill_(log_a)
        injection.log_delta.fill_(log_delta)
    decay = injection.decay()
    assert bool((decay < 1.0).all()) and bool((decay >= 0.0).all())


# ---- Loop-index embedding


def test_loop_index_is_the_sinusoid_of_the_recurrence_times_a_gain() -> None:
    injection = LoopIndexInjection(8)
    e, s = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert torch.equal(injection(e, s, 2), e), "starts as the linear injection"
    gain = np.random.default_rng(0).normal(size=8)
    with torch.no_grad():
        injection.gain.copy_(torch.from_numpy(gain))
    for i in (0, 1, 7):
        wave = [f((i + 1) / 10_000 ** (2 * j / 8)) for f in (math.sin, math.cos) for j in range(4)]
        expected = e.numpy() + gain * np.array(wave)
        np.testing.assert_allclose(injection(e, s, i).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    assert injection.flops_per_token() == LinearInjection(8).flops_per_token() + 8
    assert not injection.step_specific, "one gain for all recurrences"
    with pytest.raises(ValueError, match="d_model is 7; sine and cosine come in pairs"):
        LoopIndexInjection(7)


class LearnedIndex(LinearInjection):
    """A vector of its own for every recurrence, as a user may write it."""

    step_specific = True


def test_parameters_of_one_recurrence_each_are_refused_where_they_would_not_train() -> None:
    with pytest.raises(
        ValueError, match="LearnedIndex has separate parameters for every recurrence.*FullBPTT"
    ):
        tiny_model(num_recurrences=4, injection=LearnedIndex, bptt=TruncatedBPTT())
    tiny_model(num_recurrences=4, injection=LoopIndexInjection, bptt=TruncatedBPTT())


# ---- Doubly stochastic lanes


@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_any_logits_give_doubly_stochastic_matrices(spread: float) -> None:
    torch.manual_seed(0)
    m = doubly_stochastic(spread * torch.randn(500, 4, 4), iterations=20).double()
    assert bool((m >= 0).all())
    for dim in (-1, -2):
        torch.testing.assert_close(m.sum(dim), torch.ones(500, 4).double(), rtol=0, atol=5e-6)
    assert float(torch.linalg.matrix_norm(m, 2).max()) <= 1 + 1e-6


def test_sinkhorn_equals_alternating_division_where_it_converges() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 3))
    m = np.exp(logits)
    for _ in range(500):
        m /= m.sum(axis=1, keepdims=True)
        m /= m.sum(axis=0, keepdims=True)
    actual = doubly_stochastic(torch.from_numpy(logits), iterations=100)
    np.testing.assert_allclose(actual.numpy(), m, atol=2e-6)


def test_doubly_stochastic_lanes_equal_a_loop_over_lanes() -> None:
    torch.manual_seed(0)
    lanes = DoublyStochasticLanes(8, 3, num_lanes=3).double()
    with torch.no_grad():
        for p in lanes.parameters():
            p.normal_()
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    raw = {name: p.detach().numpy() for name, p in lanes.named_parameters()}
    e, y = torch.randn(2, 4, 8).double(), torch.randn(2, 4, 8).double()
    state = lanes.expand(e)
    for k in range(3):
        np.testing.assert_allclose(state[k].detach(), 2 * sigmoid(raw["entry"][k]) * e)
    states = [torch.randn(2, 4, 8).double() for _ in range(3)]
    stacked = torch.stack(states)
    read = sum(sigmoid(raw["alpha"][1][k]) * states[k] for k in range(3))
    torch.testing.assert_close(lanes.read(stacked, 1), read)
    m = np.exp(raw["mixing"][1])
    for _ in range(2000):
        m /= m.sum(axis=1, keepdims=True)
        m /= m.sum(axis=0, keepdims=True)
    written = lanes.write(stacked, y, 1)
    for j in range(3):
        expected = sum(m[j, k] * states[k] for k in range(3)) + 2 * sigmoid(raw["beta"][1][j]) * y
        torch.testing.assert_close(written[j], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        lanes.reduce(stacked), sum(sigmoid(raw["exit"][k]) * states[k] for k in range(3))
    )


@pytest.mark.parametrize("r", [1, 2, 4])
def test_doubly_stochastic_lanes_start_near_the_identity_and_all_learn(r: int) -> None:
    model = tiny_model(num_recurrences=r, injection=PassthroughInjection, lanes=DoublyStochasticLanes)
    lanes = model.lanes
    assert isinstance(lanes, DoublyStochasticLanes)
    for i in range(r):
        torch.testing.assert_close(lanes.mixing_matrix(i), torch.eye(2) * 0.8 + 0.1, rtol=0, atol=1e-5)
        assert int(lanes.read_weights(i).argmax()) == i % 2
        torch.testing.assert_close(lanes.write_weights(i), torch.ones(2))
    assert count_parameters(model).lanes == r * (4 + 4) + 4
    assert lanes.flops_per_token() == 2 * (4 + 4) * 64
    model(*tokens()).backward()
    assert lanes.mixing.grad is not None
    for grad in (lanes.mixing.grad, lanes.alpha.grad, lanes.beta.grad):
        assert grad is not None and all(float(step.norm()) > 0 for step in grad), "of every recurrence"
    assert set(parameter_roles(model)[f"lanes.{name}"] for name, _ in lanes.named_parameters()) == {"lanes"}
    with pytest.raises(ValueError, match="iterations is 0"):
        DoublyStochasticLanes(8, 2, iterations=0)


# ---- Random initial state


def test_a_training_rows_state_follows_from_its_number_alone() -> None:
    injection, e = RandomStateInjection(64, seed=3), torch.zeros(4, 40, 64)
    whole = injection.start(e, None, range(8, 12))
    torch.manual_seed(99)
    halves = [injection.start(e[:2], None, rows) for rows in (range(8, 10), [10, 11])]
    assert torch.equal(whole, torch.cat(halves))
    assert torch.equal(whole, RandomStateInjection(64, seed=3).start(e, None, range(8, 12)))
    streams = [
        *whole,
        *injection.start(e, None, range(12, 14)),
        RandomStateInjection(64, seed=4).start(e, None, [8])[0],
    ]
    flat = torch.stack(streams).flatten(1)
    assert (torch.corrcoef(flat) - torch.eye(len(flat))).abs().max() < 5 / math.sqrt(flat.shape[1])
    # Mean and variance of 18,000 draws, within five standard errors.
    n = flat.numel()
    assert abs(float(flat.mean())) < 5 * math.sqrt(0.4 / n)
    assert abs(float(flat.square().mean()) - 0.4) < 5 * 0.4 * math.sqrt(2 / n)


def test_outside_of_training_a_state_follows_from_the_position_alone() -> None:
    e = torch.zeros(2, 150, 64)
    state = RandomStateInjection(64).start(e, None, None)
    assert torch.equal(state[0], state[1]) and len(state[0].unique(dim=0)) == 150
    injection = RandomStateInjection(64)
    assert torch.equal(injection.start(e[:, :70], None, None), state[:, :70])
    positions = torch.tensor([[3], [149]])
    assert torch.equal(injection.start(e[:, :1], positions, None), state[[0, 1], [3, 149]][:, None])
    assert not torch.equal(injection.start(e, None, [0, 1])[0], state[0]), "training draws others"
    assert injection(e, state, 0).shape == e.shape
    for wrong in ({"std": 0.0}, {"std": math.inf}, {"seed": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
            RandomStateInjection(8, **wrong)
