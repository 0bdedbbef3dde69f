"""The horizon of a run, and its learning rates: transfer and schedule. Pure functions of numbers, without torch.

D target training tokens, S optimizer steps, C training FLOPs, F training FLOPs per token.
Sources: arXiv 2604.21106, section 4 and the appendix on hyperparameters; HyperP: arXiv 2603.28743.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from looped_lm.common.errors import UserError
from looped_lm.loop.component import Component


@dataclass(frozen=True)
class RunSize:
    """What a horizon may depend on.

    `flops_per_token` is F with r recurrences, and `step_flops(t)` the FLOPs of optimizer step t (None: all steps run
    r), in the convention `paper`. `n_once` parameters are used once per token, `n_rec` in every recurrence.
    """

    flops_per_token: float
    batch_tokens: int
    n_once: int
    n_rec: int
    num_recurrences: int
    step_flops: Callable[[int], float] | None = None


@dataclass(frozen=True)
class Plan:
    """Length of a run: steps S, target tokens D (not rounded to steps), and the FLOPs budget C if there is one."""

    steps: int
    tokens: float
    flops_budget: float | None = None


class Horizon(Component, ABC):
    """How long to train.

    Raises:
        UserError: a length that is not positive and finite, or (from `plan`) shorter than one optimizer step.
    """

    @abstractmethod
    def plan(self, size: RunSize) -> Plan:
        """Steps and target tokens of a run of this size."""


def _plan(what: str, steps: int, tokens: float, size: RunSize, flops_budget: float | None = None) -> Plan:
    if steps < 1:
        raise UserError(
            f"{what} is {tokens:,.0f} tokens, less than one optimizer step of {size.batch_tokens:,} tokens: "
            "raise the horizon or lower batch_tokens."
        )
    return Plan(steps, tokens, flops_budget)


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} is {value}; it must be positive and finite.")
    return float(value)


class FlopsBudget(Horizon):
    """Train for a FLOPs budget C: D = C/F and S = round(D / batch_tokens).

    If steps differ in their recurrences, S is exactly the number of steps whose total comes nearest to C, and F is the
    mean over these steps.

    Args:
        flops: training FLOPs C in the convention `paper`.
    """

    def __init__(self, flops: float) -> None:
        self.flops = _positive("flops", flops)

    def plan(self, size: RunSize) -> Plan:
        tokens = self.flops / size.flops_per_token
        steps = round(tokens / size.batch_tokens)
        if size.step_flops is not None:
            spent, steps = 0.0, 0
            # Take a step if the total is nearer to the budget after it than before it.
            while spent + (cost := size.step_flops(steps)) / 2 <= self.flops:
                spent, steps = spent + cost, steps + 1
            if steps:
                tokens = self.flops * steps * size.batch_tokens / spent
        return _plan(f"A budget of {self.flops:g} FLOPs", steps, tokens, size, self.flops)


class TokenBudget(Horizon):
    """Train on D tokens: S = floor(D / batch_tokens).

    Args:
        tokens: D, over all devices.
    """

    def __init__(self, tokens: float) -> None:
        self.tokens = _positive("tokens", tokens)

    def plan(self, size: RunSize) -> Plan:
        return _plan("The token budget", int(self.tokens // size.batch_tokens), self.tokens, size)


class TokensPerParameter(Horizon):
    """Train on D = ratio·(N_once + r·N_rec) tokens: S = floor(D / batch_tokens).

    The r(K²+2K) scalars of K lanes are in N_rec, so the formula counts them r times.

    Args:
        ratio: tokens per parameter, without embedding and head; parameters of the loop count r times.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = _positive("ratio", ratio)

    def plan(self, size: RunSize) -> Plan:
        tokens = self.ratio * (size.n_once + size.num_recurrences * size.n_rec)
        what = f"A ratio of {self.ratio:g} tokens per parameter"
        return _plan(what, int(tokens // size.batch_tokens), tokens, size)


class Steps(Horizon):
    """Train for S optimizer steps: D = S·batch_tokens.

    Args:
        steps: S.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise UserError(f"steps is {steps}; it must be at least 1.")
        self.steps = steps

    def plan(self, size: RunSize) -> Plan:
        return Plan(self.steps, float(self.steps * size.batch_tokens))


class HyperP(Component):
    """Learning rates per role, transferred from a reference of size 10 (d = 640), batches of 2^18 tokens and D_ref.

    The width factor (d/640)^width_exponent applies to all roles but `matrix`, the batch factor
    (batch/2^18)^batch_exponent to matrix, embedding and head, and the data factor (D/D_ref)^data_exponent to matrix
    alone. An exponent of 0 switches its factor off.

    Args:
        matrix: base rate of the matrices.
        embedding: base rate of the embedding.
        head: base rate of the head.
        norm: base rate of the norm scales.
        lanes: base rate of the lane parameters.
        width_exponent: exponent of the width factor.
        batch_exponent: exponent of the batch factor.
        data_exponent: exponent of the data factor.

    Raises:
        UserError: a base rate is negative or not finite.
    """

    REFERENCE_WIDTH = 640
    REFERENCE_BATCH_TOKENS = 2**18

    def __init__(
        self,
        matrix: float = 0.014,
        embedding: float = 0.3,
        head: float = 0.004,
        norm: float = 0.005,
        lanes: float = 0.01,
        width_exponent: float = -0.5,
        batch_exponent: float = 0.558,
        data_exponent: float = -0.32,
    ) -> None:
        self.base = {"matrix": matrix, "embedding": embedding, "head": head, "norm": norm, "lanes": lanes}
        for role, rate in self.base.items():
            if not (math.isfinite(rate) and rate >= 0):
                raise UserError(f"Learning rate {role}={rate}; it must be finite and not negative.")
        self.width_exponent, self.batch_exponent = width_exponent, batch_exponent
        self.data_exponent = data_exponent

    def learning_rates(
        self, d_model: int, batch_tokens: int, tokens: float, reference_tokens: float
    ) -> dict[str, float]:
        """Learning rate of every role, for `tokens` D; UserError if the exponents make one zero or infinite."""
        try:
            width = (d_model / self.REFERENCE_WIDTH) ** self.width_exponent
            batch = (batch_tokens / self.REFERENCE_BATCH_TOKENS) ** self.batch_exponent
            data = (tokens / reference_tokens) ** self.data_exponent
        except OverflowError as error:
            raise UserError(
                "An exponent of the learning-rate transfer is too large: a factor overflows at width "
                f"{d_model}, batch_tokens {batch_tokens:,} and {tokens:g} training tokens. Lower it."
            ) from error
        factors = {"matrix": batch * data, "embedding": width * batch, "head": width * batch}
        rates = {role: rate * factors.get(role, width) for role, rate in self.base.items()}
        for role, rate in rates.items():
            if not math.isfinite(rate) or (rate == 0) != (self.base[role] == 0):
                raise UserError(
                    f"The transferred learning rate of {role} is {rate}: lower the exponents of model.transfer."
                )
        return rates


class LinearSchedule(Component):
    """Learning-rate multiplier: a linear warm-up, a constant phase, a linear warm-down.

    It is (t+1)/w for t < w, 1 up to t = S-wd, then p + f(1-p) with p = (S-t)/wd; w and wd are round(fraction·S).

    Args:
        warmup: fraction of the steps that warm up.
        warmdown: fraction of the steps that warm down.
        final: multiplier f that the warm-down approaches.

    Raises:
        UserError: a value is outside [0, 1], or warm-up and warm-down overlap.
    """

    def __init__(self, warmup: float = 0.0, warmdown: float = 1.0, final: float = 0.1) -> None:
        for name, value in (("warmup", warmup), ("warmdown", warmdown), ("final", final)):
            if not 0.0 <= value <= 1.0:
                raise UserError(f"{name} is {value}; it must be between 0 and 1.")
        if warmup + warmdown > 1.0:
            raise UserError(f"warmup {warmup} and warmdown {warmdown} overlap: their sum must not exceed 1.")
        self.warmup, self.warmdown, self.final = warmup, warmdown, final

    def multiplier(self, step: int, steps: int) -> float:
        """Multiplier at step t = 0..S-1 of S; at t = S it is f."""
        warmup, warmdown = round(self.warmup * steps), round(self.warmdown * steps)
        if step < warmup:
            return (step + 1) / warmup
        if step <= steps - warmdown:
            return 1.0
        p = max(0.0, (steps - step) / warmdown)
        return p + self.final * (1.0 - p)


def accumulation(batch_tokens: int, rows: int, seq_len: int, world_size: int) -> int:
    """Micro-batches per optimizer step of exactly `batch_tokens` tokens; UserError if that is not a whole number."""
    micro = rows * seq_len * world_size
    if batch_tokens < micro or batch_tokens % micro:
        lower = max(batch_tokens // micro, 1) * micro
        raise UserError(
            f"batch_tokens {batch_tokens:,} is not a multiple of one micro-batch: {rows} rows x {seq_len} tokens x "
            f"{world_size} process(es) = {micro:,} tokens. Use {lower:,} or {lower + micro:,}, or change "
            "data.batch_size."
        )
    return batch_tokens // micro
