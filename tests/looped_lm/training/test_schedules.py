"""Horizons, transfer and schedule against hand-computed values."""

from __future__ import annotations

import pytest

from looped_lm import FlopsBudget, HyperP, LinearSchedule, Steps, TokenBudget, TokensPerParameter
from looped_lm.model.accounting import flops_per_token, reference_tokens
from looped_lm.training.schedules import RunSize, accumulation
from tests.support.reference import accounting as closed
from tests.support.reference import recipe
from tests.support.shipped import SEQ_LEN, paper_model

SIZE = RunSize(flops_per_token=2e6, batch_tokens=1000, n_once=300, n_rec=50, num_recurrences=4)


def test_learning_rates_of_one_run_by_hand() -> None:
    """s=20, r=4, C=1e19, batch 2^18: d = 1280, F = 3.31364352e9, D = 3.0178e9, D_ref = 1.0160832e9."""
    rates = HyperP().learning_rates(1280, 2**18, 1e19 / 3.31364352e9, 1_016_083_200)
    # 2^-1/2 = .70710678; (3.0178269e9 / 1.0160832e9)^-.32 = 2.97005892^-.32 = exp(-.32 · 1.08858175) = .70587196
    assert rates["embedding"] == pytest.approx(0.3 * 0.70710678, rel=1e-7)
    assert rates["head"] == pytest.approx(0.004 * 0.70710678, rel=1e-7)
    assert rates["norm"] == pytest.approx(0.005 * 0.70710678, rel=1e-7)
    assert rates["lanes"] == pytest.approx(0.01 * 0.70710678, rel=1e-7)
    assert rates["matrix"] == pytest.approx(0.014 * 0.70587, rel=1e-4)


@pytest.mark.parametrize("r", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [10, 20, 34])
@pytest.mark.parametrize("budget", [1e18, 1e19])
@pytest.mark.parametrize("batch", [2**18, 2**19])
def test_learning_rates_and_steps_equal_the_plain_arithmetic(
    size: int, r: int, budget: float, batch: int
) -> None:
    flops = closed.flops_per_token(64 * size, r, closed.paper_layout(r), closed.paper_injection(r))
    assert flops_per_token(paper_model(size, r), SEQ_LEN) == flops
    steps, tokens = recipe.horizon_from_flops(budget, flops, batch)
    plan = FlopsBudget(budget).plan(RunSize(flops, batch, 1, 1, r))
    assert (plan.steps, plan.tokens, plan.flops_budget) == (steps, pytest.approx(tokens, rel=1e-12), budget)
    expected = recipe.learning_rates(64 * size, r, batch, tokens)
    expected["lanes"] = expected.pop("lane")
    rates = HyperP().learning_rates(64 * size, batch, plan.tokens, reference_tokens(r))
    assert rates == pytest.approx(expected, rel=1e-12)


def test_an_exponent_of_zero_switches_a_factor_off() -> None:
    flat = HyperP(matrix=0.5, width_exponent=0, batch_exponent=0, data_exponent=0)
    assert flat.learning_rates(128, 64, 1e5, 1e9) == {
        "matrix": 0.5, "embedding": 0.3, "head": 0.004, "norm": 0.005, "lanes": 0.01,
    }  # fmt: skip


@pytest.mark.parametrize(
    "horizon, steps, tokens, budget",
    [
        (FlopsBudget(1.5e10), 8, 7500.0, 1.5e10),  # 7500 tokens are 7.5 batches, and round(7.5) = 8
        (FlopsBudget(1.48e10), 7, 7400.0, 1.48e10),
        (TokenBudget(7999), 7, 7999.0, None),
        (TokensPerParameter(20), 10, 10_000.0, None),  # 20·(300 + 4·50)
        (Steps(3), 3, 3000.0, None),
    ],
)
def test_steps_and_tokens_of_each_horizon(horizon, steps: int, tokens: float, budget: float | None) -> None:  # type: ignore[no-untyped-def]
    plan = horizon.plan(SIZE)
    assert (plan.steps, plan.tokens, plan.flops_budget) == (steps, tokens, budget)


@pytest.mark.parametrize("horizon", [FlopsBudget(9e8), TokenBudget(999), TokensPerParameter(1)])
def test_less_than_one_step_is_refused(horizon) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="less than one optimizer step of 1,000 tokens"):
        horizon.plan(SIZE)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: FlopsBudget(float("nan")), "flops is nan"),
        (lambda: TokenBudget(-1), "tokens is -1"),
        (lambda: TokensPerParameter(0), "ratio is 0"),
        (lambda: Steps(0), "steps is 0"),
        (lambda: HyperP(head=-1.0), "head=-1.0"),
        (lambda: LinearSchedule(warmup=0.5, warmdown=0.6), "overlap"),
        (lambda: LinearSchedule(final=1.5), "final is 1.5"),
    ],
)
def test_bad_values_are_refused(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=says):
        make()


def test_the_default_multiplier_is_one_minus_nine_tenths_of_progress() -> None:
    schedule = LinearSchedule()
    assert schedule.multiplier(0, 200) == 1.0
    assert schedule.multiplier(100, 200) == pytest.approx(0.55)
    assert schedule.multiplier(199, 200) == pytest.approx(0.1 + 0.9 / 200)
    assert schedule.multiplier(200, 200) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "warmup, warmdown, final", [(0, 1, 0.1), (0.1, 0.5, 0.0), (0.25, 0.25, 0.3), (0, 0, 0.1)]
)
def test_the_multiplier_equals_the_plain_formula(warmup: float, warmdown: float, final: float) -> None:
    schedule = LinearSchedule(warmup, warmdown, final)
    for steps in (1, 7, 40):
        for step in range(steps):
            expected = recipe.lr_multiplier(step, steps, warmup, warmdown, final)
            assert schedule.multiplier(step, steps) == pytest.approx(expected, rel=1e-12)


def test_accumulation_is_exact_or_names_the_numbers() -> None:
    assert accumulation(4096, 8, 256, 1) == 2
    assert accumulation(4096, 8, 256, 2) == 1
    with pytest.raises(
        ValueError, match=r"batch_tokens 5,000 .* 8 rows x 256 tokens x 1 .* = 2,048 .*4,096 or 6,144"
    ):
        accumulation(5000, 8, 256, 1)
    with pytest.raises(ValueError, match="batch_tokens 1,024 is not a multiple"):
        accumulation(1024, 8, 256, 1)
