"""How many recurrences each training step runs.

A sampler is a pure function of the step and of its arguments: every rank, micro-batch and resumed run get the same
count without talking to each other, and a run's cost is known before it starts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter

import numpy as np

from looped_lm.common.errors import UserError
from looped_lm.loop.component import Component

#: Counts that vary are planned one step at a time; for more steps than this the program would seem to hang.
PLANNED_STEPS = 1_000_000


class RecurrenceSampler(Component, ABC):
    """Recurrences of every training step. A subclass takes `num_recurrences` first, the model's own count.

    Evaluation, learning rates and tokens per parameter follow from `num_recurrences`, FLOPs from the counts of the
    steps. A subclass may ignore `num_recurrences`, or let the counts grow over the steps.
    """

    #: Whether counts may differ between steps; step-specific components need counts that do not.
    varies: bool = True

    def __init__(self, num_recurrences: int) -> None:
        self.num_recurrences = num_recurrences

    @abstractmethod
    def sample(self, step: int) -> int:
        """Recurrences of optimizer step t = 0, 1, ...; every call for a step returns the same count."""


class FixedRecurrences(RecurrenceSampler):
    """Every step runs the model's `num_recurrences`."""

    varies = False

    def sample(self, step: int) -> int:
        return self.num_recurrences


class LogNormalPoisson(RecurrenceSampler):
    """r = Poisson(exp(tau)) + 1 with tau ~ N(log(r_mean - 1) - sigma²/2, sigma), so that r has the mean r_mean.

    r_mean is the model's `num_recurrences`. Most draws are below it, a few far above. Source: arXiv 2502.05171,
    training objective (a mean of 33 = 32 + 1, sigma 1/2, gradients through the last 8 recurrences).

    Args:
        num_recurrences: the mean of the counts.
        sigma: standard deviation of the logarithm of the rate; 0 leaves a plain Poisson distribution.
        max_recurrences: larger draws are cut to this many, which bounds memory and lowers the mean; None: no bound.
        seed: seed of the draws.

    Raises:
        UserError: a mean below 2, which leaves no rate to draw, or an argument out of range.
    """

    def __init__(
        self, num_recurrences: int, sigma: float = 0.5, max_recurrences: int | None = None, seed: int = 0
    ) -> None:
        super().__init__(num_recurrences)
        if num_recurrences < 2:
            raise UserError(
                f"num_recurrences is {num_recurrences}; LogNormalPoisson draws counts of 1 and more, so their mean "
                "must be at least 2. Use FixedRecurrences."
            )
        if not (math.isfinite(sigma) and sigma >= 0):
            raise UserError(f"sigma is {sigma}; it must be finite and not negative.")
        if max_recurrences is not None and max_recurrences < num_recurrences:
            raise UserError(
                f"max_recurrences is {max_recurrences}, below the mean of {num_recurrences}: raise it, or lower "
                "num_recurrences."
            )
        if not 0 <= seed < 2**64:
            raise UserError(f"seed is {seed}; it must be between 0 and 2^64 - 1.")
        self.sigma, self.max_recurrences, self.seed = float(sigma), max_recurrences, seed

    def sample(self, step: int) -> int:
        # A counter-based generator keyed on both numbers: streams of neighbouring steps are independent.
        key = np.array([self.seed, step], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        rate = generator.lognormal(math.log(self.num_recurrences - 1) - self.sigma**2 / 2, self.sigma)
        count = 1 + int(generator.poisson(rate))
        return count if self.max_recurrences is None else min(count, self.max_recurrences)


def drawn(sampler: RecurrenceSampler, steps: int) -> Counter[int]:
    """How many of `steps` steps run each count of recurrences; raises what `checked_count` raises."""
    if not sampler.varies:
        return Counter({checked_count(sampler, 0): steps})
    return Counter(checked_count(sampler, step) for step in range(steps))


def checked_count(sampler: RecurrenceSampler, step: int) -> int:
    """The sampler's count for a step; UserError if it is not an int >= 1, or step > PLANNED_STEPS."""
    name = type(sampler).__name__
    if step > PLANNED_STEPS and sampler.varies:
        raise UserError(
            f"The horizon plans more than {PLANNED_STEPS:,} steps, and the counts of {name} are drawn one by one: "
            "lower the horizon, raise batch_tokens, or use FixedRecurrences."
        )
    count = sampler.sample(step)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(
            f"{name} gives {count!r} recurrences for step {step}; it must be an int of at least 1."
        )
    return count
