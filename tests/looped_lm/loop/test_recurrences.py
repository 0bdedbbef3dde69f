"""Other counts of recurrences than the model's own: in evaluation, and drawn for every training step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

from looped_lm import (
    AdditiveInjection,
    FixedRecurrences,
    HyperConnectionLanes,
    Injection,
    LinearInjection,
    LogNormalPoisson,
    LoopedLM,
    PassthroughInjection,
    SingleLane,
    TruncatedBPTT,
)
from looped_lm.loop.recurrences import PLANNED_STEPS, drawn
from tests.support.own_components import Counts
from tests.support.reference import forward as reference
from tests.support.reference_form import INJECTIONS, reference_weights
from tests.support.tiny import VOCAB, perturb, tiny_lm, tiny_model, tokens

# ---- Evaluation -----------------------------------------------------------------------------------------------------

#: Trained recurrences whose lane scalars the recurrences 0..15 use; trained with r = 4.
LENT = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize(
    "injection, num_lanes",
    [(LinearInjection, 1), (AdditiveInjection, 1), (PassthroughInjection, 1)]
    + [(PassthroughInjection, 2), (LinearInjection, 2), (PassthroughInjection, 3)],
)
def test_other_counts_equal_a_plain_loop_of_that_many(injection: Any, num_lanes: int, count: int) -> None:
    """r/2, r, 2r and 4r of a model of r = 4, lanes by the rule of HyperConnectionLanes written out above."""
    lanes = SingleLane if num_lanes == 1 else partial(HyperConnectionLanes, num_lanes=num_lanes)
    model = tiny_model(torch.float64, num_recurrences=4, injection=injection, lanes=lanes)
    perturb(model)
    inputs, targets = tokens()
    weights = reference_weights(model)
    if num_lanes > 1:
        lent = LENT[:count]
        weights |= {name: weights[name][lent] for name in ("lane_alpha", "lane_mixing", "lane_beta")}
    expected, logits = reference.forward(
        weights,
        inputs,
        targets,
        head_dim=model.head_dim,
        num_recurrences=count,
        injection=INJECTIONS[injection],
        vocab_size=VOCAB,
    )
    with torch.no_grad():
        torch.testing.assert_close(model(inputs, num_recurrences=count), logits, rtol=1e-9, atol=1e-12)
        assert float(model(inputs, targets, num_recurrences=count)) == pytest.approx(
            float(expected.detach()), rel=1e-9
        )
        own = torch.equal(model(inputs, num_recurrences=count), model(inputs))
    assert own == (count == 4)


def test_twice_the_count_is_the_trained_loop_run_twice() -> None:
    lanes = HyperConnectionLanes(8, 3, 2)
    perturb(lanes)
    state, y = torch.randn(2, 1, 2, 8), torch.randn(1, 2, 8)
    for i in range(3):
        assert torch.equal(lanes.read(state, i), lanes.read(state, i + 3))
        assert torch.equal(lanes.write(state, y, i), lanes.write(state, y, i + 3))
    assert not torch.equal(lanes.read(state, 0), lanes.read(state, 1))


class OwnStep(Injection):
    """An injection with a learned vector for every recurrence and no rule beyond them."""

    step_specific = True

    def __init__(self, d_model: int, steps: int = 2) -> None:
        super().__init__(d_model)
        self.at = nn.Parameter(torch.zeros(steps, d_model))

    def initial_state(self, e: Tensor) -> Tensor:
        return e

    def forward(self, e: Tensor, s: Tensor, i: int) -> Tensor:
        return s + e + self.at[i]


def test_without_a_rule_more_recurrences_are_refused_before_anything_runs() -> None:
    model = tiny_model(injection=OwnStep)
    model(tokens()[0], num_recurrences=1)
    says = "OwnStep has separate parameters for each of 2 recurrences and no rule for recurrence 3"
    with pytest.raises(ValueError, match=says):
        model(tokens()[0], num_recurrences=4)
    with pytest.raises(ValueError, match=says):
        tiny_lm(injection=OwnStep, eval_recurrences=3)
    with pytest.raises(ValueError, match="num_recurrences is 0; it must be at least 1"):
        model(tokens()[0], num_recurrences=0)


# ---- Drawn counts ---------------------------------------------------------------------------------------------------


def mixture(counts: np.ndarray, mean: int, sigma: float) -> np.ndarray:
    """P(r) of r = 1 + Poisson(rate), the rate log-normal with mean `mean - 1`: quadrature over the rate's logarithm."""
    tau = stats.norm(math.log(mean - 1) - sigma**2 / 2, sigma)
    x = np.linspace(*tau.interval(1 - 1e-12), 2001)
    return integrate.simpson(stats.poisson.pmf(counts[:, None] - 1, np.exp(x)) * tau.pdf(x), x=x, axis=1)


@pytest.mark.parametrize("mean, sigma", [(4, 0.5), (8, 0.5), (33, 0.5), (8, 0.25)])
def test_the_counts_have_the_distribution_of_the_paper(mean: int, sigma: float) -> None:
    n = 20_000
    counts = drawn(LogNormalPoisson(mean, sigma), n)
    average = sum(r * k for r, k in counts.items()) / n
    # Var r = E rate + Var rate.
    spread = math.sqrt(mean - 1 + (mean - 1) ** 2 * math.expm1(sigma**2))
    assert average == pytest.approx(mean, abs=4 * spread / math.sqrt(n))
    r = np.arange(1, 20 * mean)
    expected = n * mixture(r, mean, sigma)
    assert expected.sum() == pytest.approx(n, rel=1e-6)
    often = expected >= 10
    observed = np.array([counts[k] for k in r])
    bins = [np.append(x[often], n - x[often].sum()) for x in (observed, expected)]
    assert stats.chisquare(*bins).pvalue > 1e-3


def test_a_count_is_a_function_of_seed_and_step_alone() -> None:
    a, b = LogNormalPoisson(8, seed=3), LogNormalPoisson(8, seed=3)
    forwards = [a.sample(t) for t in range(50)]
    np.random.seed(7)
    torch.manual_seed(7)
    assert [b.sample(t) for t in reversed(range(50))] == forwards[::-1]
    assert [LogNormalPoisson(8, seed=4).sample(t) for t in range(50)] != forwards
    assert len(set(forwards)) > 5


def test_a_maximum_bounds_the_counts_and_changes_no_other() -> None:
    free, bound = LogNormalPoisson(8), LogNormalPoisson(8, max_recurrences=10)
    pairs = [(free.sample(t), bound.sample(t)) for t in range(200)]
    assert all(b == min(f, 10) for f, b in pairs) and max(f for f, _ in pairs) > 10


@pytest.mark.parametrize(
    "arguments, says",
    [
        (dict(num_recurrences=1), "their mean must be at least 2"),
        (dict(num_recurrences=4, sigma=-0.1), "sigma is -0.1"),
        (dict(num_recurrences=4, sigma=math.inf), "sigma is inf"),
        (dict(num_recurrences=4, max_recurrences=3), "max_recurrences is 3, below the mean of 4"),
        (dict(num_recurrences=4, seed=-1), "seed is -1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LogNormalPoisson(**arguments)


@pytest.mark.parametrize("wrong", [0, 2.0, True, None])
def test_what_is_no_count_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"Counts gives {wrong!r} recurrences for step 2"):
        tiny_lm(recurrences=partial(Counts, counts=[2, 1, wrong]))


def test_more_steps_than_can_be_asked_one_by_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from looped_lm import FlopsBudget, Steps
    from looped_lm.loop import recurrences

    assert drawn(FixedRecurrences(4), 10**12) == {4: 10**12} and PLANNED_STEPS == 1_000_000
    monkeypatch.setattr(recurrences, "PLANNED_STEPS", 100)
    for horizon in (Steps(102), FlopsBudget(1e18)):
        with pytest.raises(ValueError, match="plans more than 100 steps.*drawn one by one"):
            tiny_lm(recurrences=LogNormalPoisson, horizon=horizon)


@pytest.mark.parametrize(
    "overrides, says",
    [
        (
            dict(lanes=HyperConnectionLanes),
            "HyperConnectionLanes has separate parameters.*gradient in some steps",
        ),
        (
            dict(injection=partial(OwnStep, steps=9)),
            "OwnStep has separate parameters.*gradient in some steps",
        ),
        (
            dict(injection=PassthroughInjection, bptt=TruncatedBPTT(2)),
            "prelude and embedding would get no gradient",
        ),
    ],
)
def test_counts_with_which_some_step_cannot_train_are_refused(overrides: dict[str, Any], says: str) -> None:
    """With r = 2 alone each of these trains; the count of 3 is what cuts the third one's state."""
    LoopedLM.component_specs(tiny_lm(**overrides))
    with pytest.raises(ValueError, match=says):
        tiny_lm(recurrences=partial(Counts, counts=[2, 1, 3]), **overrides)


def test_every_parameter_gets_a_gradient_at_every_count() -> None:
    """DDP runs without find_unused_parameters."""
    for overrides in (
        {},
        dict(injection=AdditiveInjection),
        dict(injection=PassthroughInjection),
        dict(bptt=TruncatedBPTT(2)),
    ):
        lm = tiny_lm(recurrences=partial(Counts, counts=[1, 2, 3, 5]), **overrides)
        for step in range(4):
            lm.zero_grad()
            lm.loss(tokens(), lm.step_recurrences(step)).backward()
            assert not [n for n, p in lm.named_parameters() if p.grad is None], (overrides, step)
