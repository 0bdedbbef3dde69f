"""Horizons, learning-rate transfer and the learning-rate multiplier, in plain arithmetic.

A horizon is (S, D): optimizer steps and target tokens. D was asked for; S·batch_tokens will be trained.
"""

import math

REFERENCE_WIDTH = 640
REFERENCE_BATCH_TOKENS = 2**18


def reference_tokens(r: int) -> int:
    """D_ref: ten tokens per unrolled parameter of the d = 640 model, unrolled by the run's own r."""
    d = 640
    attention = d * d + d * d + d * d + d * d  # q, k, v, out
    mlp = d * (4 * d) + (4 * d) * d
    layer = attention + mlp + 2 * d  # two norm scales
    model_norms = 3 * d
    if r == 1:  # 0-20-0, passthrough
        once = model_norms
        recurrent = 20 * layer
    else:  # 2-4-2, linear injection
        once = 2 * layer + 2 * layer + model_norms
        recurrent = 4 * layer + d * (2 * d)
    return 10 * (once + r * recurrent)


def horizon_from_flops(flops_budget: float, flops_per_token: float, batch_tokens: int) -> tuple[int, float]:
    """Steps rounded to the nearest, D = C/F."""
    steps = round(flops_budget / (flops_per_token * batch_tokens))
    return _at_least_one_step(steps), flops_budget / flops_per_token


def horizon_from_ratio(
    tokens_per_parameter: float, n_once: int, n_rec: int, r: int, batch_tokens: int
) -> tuple[int, float]:
    """Steps rounded down, D = ratio·(N_once + r·N_rec)."""
    tokens = tokens_per_parameter * (n_once + r * n_rec)
    return _at_least_one_step(math.floor(tokens / batch_tokens)), tokens


def horizon_from_steps(steps: int, batch_tokens: int) -> tuple[int, float]:
    return _at_least_one_step(steps), float(steps * batch_tokens)


def _at_least_one_step(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"the horizon has {steps} optimizer steps")
    return steps


def learning_rates(d: int, r: int, batch_tokens: int, target_tokens: float) -> dict[str, float]:
    """Peak learning rate of every role, every factor of the transfer table written out."""
    width = math.sqrt(640 / d)
    batch = (batch_tokens / 262_144) ** 0.558
    data = (target_tokens / reference_tokens(r)) ** -0.32
    return {
        "matrix": 0.014 * batch * data,
        "embedding": 0.3 * width * batch,
        "head": 0.004 * width * batch,
        "norm": 0.005 * width,
        "lane": 0.01 * width,
    }


def lr_multiplier(
    step: int,
    steps: int,
    warmup_fraction: float = 0.0,
    warmdown_fraction: float = 1.0,
    final_fraction: float = 0.1,
) -> float:
    """Factor on the peak learning rate at step t = 0..S-1; where both ramps overlap, warm-up decides."""
    w = round(warmup_fraction * steps)
    wd = round(warmdown_fraction * steps)
    if step < w:
        return (step + 1) / w
    if step <= steps - wd:
        return 1.0
    p = (steps - step) / wd
    return p + final_fraction * (1 - p)
