"""The reference implementation checks itself: published values, finite differences, optimizer invariants."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.reference import accounting, forward, muonh, recipe

SIZES = (6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 34)

# FLOPs per token of the published grid at V_pad = 32,064 and T = 2,048, one column per size.
PUBLISHED_FLOPS = {
    1: (475047936, 727769088, 1027676160, 1374769152, 1769048064, 2210512896)
    + (2699163648, 3235000320, 4448231424, 5850206208, 8307062784),
    2: (478586880, 734060544, 1037506560, 1388924928, 1788315648, 2235678720)
    + (2731014144, 3274321920, 4504854528, 5927276544, 8420702208),
    4: (482125824, 740352000, 1047336960, 1403080704, 1807583232, 2260844544)
    + (2762864640, 3313643520, 4561477632, 6004346880, 8534341632),
    8: (489203712, 752934912, 1066997760, 1431392256, 1846118400, 2311176192)
    + (2826565632, 3392286720, 4674723840, 6158487552, 8761620480),
}


# --- accounting


def paper_flops(size: int, r: int, **changes: Any) -> int:
    arguments: dict[str, Any] = {"injection": accounting.paper_injection(r), **changes}
    return accounting.flops_per_token(
        accounting.model_width(size), r, accounting.paper_layout(r), **arguments
    )


@pytest.mark.parametrize("r", PUBLISHED_FLOPS)
def test_flops_of_the_published_grid(r: int) -> None:
    assert tuple(paper_flops(size, r) for size in SIZES) == PUBLISHED_FLOPS[r]


@pytest.mark.parametrize(
    ("size", "r", "expected"),
    [(6, 1, 35_405_952), (6, 8, 10_917_504), (20, 1, 393_271_040), (20, 4, 160_587_520)],
)
def test_unique_parameters(size: int, r: int, expected: int) -> None:
    d = accounting.model_width(size)
    counts = accounting.parameters(d, r, accounting.paper_layout(r), accounting.paper_injection(r))
    assert counts.unique == expected
    assert sum(accounting.paper_split(d, r)) == expected


def test_vocabulary_and_width_are_rounded_up() -> None:
    assert accounting.padded_vocab(32_001) == accounting.PAPER_VOCAB_PADDED == 32_064
    assert accounting.padded_vocab(64) == 64
    assert accounting.model_width(7, head_dim=128) == 512
    assert accounting.model_width(7, head_dim=64) == 448


def test_tokens_of_the_injection_ablation() -> None:
    millions = {
        ("linear", 1): 955,
        ("additive", 1): 973,
        ("passthrough", 1): 973,
        ("passthrough", 2): 973,
    }
    for (injection, lanes), expected in millions.items():
        assert round(1e18 / paper_flops(10, 4, injection=injection, lanes=lanes) / 1e6) == expected


def test_truncation_buys_about_thirty_percent_more_tokens() -> None:
    per_budget = [range(6, 13, 2), range(6, 17, 2), range(8, 19, 2), range(10, 23, 2)]
    runs = [(size, r) for sizes in per_budget for size in sizes for r in (2, 4, 8)]
    ratios = [paper_flops(size, r) / paper_flops(size, r, window=-(-r // 2)) for size, r in runs]
    assert len(runs) == 69
    assert np.median(ratios) == pytest.approx(1.315, abs=1e-3)  # 1.3157: tokens gained, 24% fewer FLOPs


def test_causal_convention_halves_attention_only() -> None:
    longer = paper_flops(6, 4, sequence_length=4096) - paper_flops(6, 4)  # attention is linear in T
    assert paper_flops(6, 4) - paper_flops(6, 4, convention="causal") == longer // 2
    with pytest.raises(ValueError, match="convention"):
        paper_flops(6, 4, convention="other")


# --- recipe


@pytest.mark.parametrize(
    ("r", "expected"), [(1, 983_315_200), (2, 606_380_800), (4, 1_016_083_200), (8, 1_835_488_000)]
)
def test_reference_tokens(r: int, expected: int) -> None:
    assert recipe.reference_tokens(r) == expected
    counts = accounting.parameters(640, r, (0, 20, 0) if r == 1 else (2, 4, 2), accounting.paper_injection(r))
    assert 10 * counts.unrolled == expected


def test_learning_rates() -> None:
    base = recipe.learning_rates(640, 4, 2**18, recipe.reference_tokens(4))
    assert base == {"matrix": 0.014, "embedding": 0.3, "head": 0.004, "norm": 0.005, "lane": 0.01}
    other = recipe.learning_rates(2560, 4, 2**19, 2 * recipe.reference_tokens(4))
    batch = 2**0.558
    expected = {
        "matrix": 0.014 * batch * 2**-0.32,
        "embedding": 0.15 * batch,
        "head": 0.002 * batch,
        "norm": 0.0025,
        "lane": 0.005,
    }
    assert other == pytest.approx(expected, rel=1e-12)


def test_horizons() -> None:
    assert recipe.horizon_from_flops(1e18, paper_flops(10, 4), 2**18) == (3642, 1e18 / 1_047_336_960)
    assert recipe.horizon_from_ratio(10, 100, 50, 4, 1_000) == (3, 3_000)
    assert recipe.horizon_from_ratio(10, 99, 50, 4, 1_000) == (2, 2_990)
    assert recipe.horizon_from_steps(7, 512) == (7, 3_584.0)
    for empty in (
        lambda: recipe.horizon_from_flops(1e9, 1e9, 2**18),
        lambda: recipe.horizon_from_ratio(1, 1, 1, 1, 2**18),
        lambda: recipe.horizon_from_steps(0, 2**18),
    ):
        with pytest.raises(ValueError, match="0 optimizer steps"):
            empty()


def test_lr_multiplier() -> None:
    for t in range(50):
        assert recipe.lr_multiplier(t, 50) == pytest.approx(1 - 0.9 * t / 50)
    assert recipe.lr_multiplier(49, 50) == pytest.approx(0.1 + 0.9 / 50)
    trapezoid = [recipe.lr_multiplier(t, 10, 0.2, 0.4, 0.0) for t in range(10)]
    assert trapezoid == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


# --- forward


HEAD_DIM, D, V, V_PAD, R, K = 4, 8, 11, 16, 3, 2


def tiny_weights(injection: forward.Injection, lanes: int, n_kv_heads: int = 1) -> forward.Weights:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float, mean: float = 0.0) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (mean + std * values).requires_grad_()

    def layer() -> forward.Layer:
        return {
            "q": normal(D, D, std=0.4),
            "k": normal(n_kv_heads * HEAD_DIM, D, std=0.4),
            "v": normal(n_kv_heads * HEAD_DIM, D, std=0.4),
            "out": normal(D, D, std=0.4),
            "mlp_in": normal(4 * D, D, std=0.3),
            "mlp_out": normal(D, 4 * D, std=0.3),
            "norm_attn": normal(D, std=0.1, mean=1.0),
            "norm_mlp": normal(D, std=0.1, mean=1.0),
        }

    weights: forward.Weights = {
        "embedding": normal(V_PAD, D, std=1.0),
        "head": normal(V_PAD, D, std=1.0),
        "norm_emb": normal(D, std=0.1, mean=1.0),
        "norm_recur": normal(D, std=0.1, mean=1.0),
        "norm_final": normal(D, std=0.1, mean=1.0),
        "prelude": [layer()],
        "block": [layer(), layer()],
        "coda": [layer()],
        "inject": normal(D, 2 * D, std=0.3) if injection is forward.linear else None,
    }
    if lanes > 1:
        weights["lane_alpha"] = normal(R, lanes, std=0.5)
        weights["lane_mixing"] = normal(R, lanes, lanes, std=0.5)
        weights["lane_beta"] = normal(R, lanes, std=0.5)
    return weights


def named(weights: forward.Weights) -> dict[str, Tensor]:
    """The tensors themselves, flat."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if isinstance(value, list):
            for i, one_layer in enumerate(value):
                found.update({f"{name}.{i}.{part}": tensor for part, tensor in one_layer.items()})
        elif value is not None:
            found[name] = value
    return found


def batch() -> tuple[Tensor, Tensor]:
    rows = torch.randint(0, V, (2, 6), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1], rows[:, 1:]


def loss_of(weights: forward.Weights, injection: forward.Injection, **changes: Any) -> Tensor:
    tokens, targets = batch()
    arguments: dict[str, Any] = {"num_recurrences": R, "vocab_size": V, "head_dim": HEAD_DIM, **changes}
    return forward.forward(weights, tokens, targets, injection=injection, **arguments)[0]


def assert_gradients(loss: Any, tensors: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    """Gradients against central differences of loss() along random directions, one per layer or tensor."""
    generator = torch.Generator().manual_seed(2)
    step = 1e-5

    def move(directions: dict[str, Tensor], distance: float) -> None:
        for name, direction in directions.items():
            tensors[name].add_(direction, alpha=distance)

    together: dict[str, list[str]] = {}
    for name in tensors:
        together.setdefault(name.rpartition(".")[0] or name, []).append(name)
    for group, names in together.items():
        directions = {
            name: torch.randn(tensors[name].shape, generator=generator, dtype=torch.float64) for name in names
        }
        with torch.no_grad():
            move(directions, step)
            above = loss()
            move(directions, -2 * step)
            below = loss()
            move(directions, step)
        numeric = (above - below).item() / (2 * step)
        analytic = sum((gradients[name] * directions[name]).sum().item() for name in names)
        assert analytic == pytest.approx(numeric, rel=1e-5, abs=1e-8), group


@pytest.mark.parametrize(
    ("injection", "lanes"),
    [(forward.linear, 1), (forward.additive, 1), (forward.passthrough, K), (forward.linear, K)],
)
def test_gradients_by_finite_differences(injection: forward.Injection, lanes: int) -> None:
    weights = tiny_weights(injection, lanes)
    tensors = named(weights)
    loss_of(weights, injection).backward()
    gradients = {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    assert gradients.keys() == tensors.keys()
    assert_gradients(lambda: loss_of(weights, injection), tensors, gradients)


@pytest.mark.parametrize(("injection", "window"), [(forward.linear, 1), (forward.additive, 2)])
def test_truncation_treats_the_entering_state_as_a_constant(
    injection: forward.Injection, window: int
) -> None:
    weights = tiny_weights(injection, lanes=1)
    tensors = named(weights)
    full, truncated = loss_of(weights, injection), loss_of(weights, injection, window=window)
    assert full.item() == truncated.item()
    truncated.backward()
    gradients = {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    assert gradients.keys() == tensors.keys()

    def prelude_output() -> Tensor:
        x = forward.rms_norm(weights["embedding"][batch()[0]], weights["norm_emb"])
        return forward.layers(x, weights["prelude"], HEAD_DIM)

    def recur(e: Tensor, s: Tensor) -> Tensor:
        u = forward.layers(injection(e, s, weights["inject"]), weights["block"], HEAD_DIM)
        return forward.rms_norm(u, weights["norm_recur"])

    with torch.no_grad():
        entering = prelude_output()
        state = entering if injection is forward.linear else torch.zeros_like(entering)
        for _ in range(R - window):
            state = recur(entering, state)

    def loss_from_constant() -> Tensor:
        e, s = prelude_output(), state
        for _ in range(window):
            s = recur(e, s)
        x = forward.rms_norm(forward.layers(s, weights["coda"], HEAD_DIM), weights["norm_final"])
        logits = 15 * torch.tanh((x @ weights["head"].T)[..., :V] / 15)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch()[1].flatten())

    assert_gradients(loss_from_constant, tensors, gradients)


def test_passthrough_with_truncation_starves_the_prelude() -> None:
    weights = tiny_weights(forward.passthrough, lanes=1)
    loss_of(weights, forward.passthrough, window=1).backward()
    assert weights["embedding"].grad is None
    assert weights["block"][0]["q"].grad is not None


def test_attention_agrees_with_torch() -> None:
    layer = tiny_weights(forward.linear, 1, n_kv_heads=2)["block"][0]
    layer["q"], layer["out"] = (
        torch.cat([layer["q"]] * 2),
        torch.cat([layer["out"]] * 2, dim=1),
    )  # 4 heads on 2
    x = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def heads(matrix: Tensor) -> Tensor:
        return (x @ matrix.T).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def turn(z: Tensor) -> Tensor:  # multiplication by exp(-i·angle) on the pairs (x1, x2)
        frequency = torch.tensor([1.0, 0.01], dtype=torch.float64)
        angle = torch.arange(5, dtype=torch.float64)[:, None] * frequency
        turned = torch.complex(z[..., :2], z[..., 2:]) * torch.polar(torch.ones_like(angle), -angle)
        return torch.nn.functional.rms_norm(torch.cat([turned.real, turned.imag], -1), (HEAD_DIM,), eps=1e-6)

    mixed = torch.nn.functional.scaled_dot_product_attention(
        turn(heads(layer["q"])), turn(heads(layer["k"])), heads(layer["v"]), is_causal=True, enable_gqa=True
    )
    expected = mixed.transpose(1, 2).flatten(2) @ layer["out"].T
    torch.testing.assert_close(forward.attention(x, layer, HEAD_DIM), expected, rtol=1e-12, atol=1e-12)


def test_lanes_at_their_initial_values_carry_the_input_along() -> None:
    """alpha one-hot, M = I, beta = 1: with a single recurrence the lanes end as e + y each."""
    weights = tiny_weights(forward.passthrough, 1)
    e = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    y = forward.loop(e, weights, HEAD_DIM, 1, forward.passthrough)
    ones = torch.ones(1, K, dtype=torch.float64)
    weights |= {
        "lane_alpha": torch.tensor([[1.0, 0.0]], dtype=torch.float64),
        "lane_mixing": torch.eye(K, dtype=torch.float64)[None],
        "lane_beta": ones,
    }
    lanes = forward.loop(e, weights, HEAD_DIM, 1, forward.passthrough)
    torch.testing.assert_close(lanes, K * (e + y), rtol=1e-12, atol=1e-12)


def test_logits_are_cut_and_capped() -> None:
    weights = tiny_weights(forward.linear, 1)
    with torch.no_grad():
        weights["head"].mul_(100)
    tokens, targets = batch()
    _, logits = forward.forward(
        weights, tokens, targets, head_dim=HEAD_DIM, num_recurrences=R, injection=forward.linear, vocab_size=V
    )
    assert logits.shape == (2, 5, V)
    assert 14 < logits.abs().max().item() <= 15


# --- optimizers


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5)])
def test_muonh_keeps_the_norm(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=shape)
    norm = float(np.linalg.norm(weight))
    buffer = np.zeros(shape)
    for _ in range(10):
        moved, buffer = muonh.muonh_step(weight, rng.normal(size=shape), buffer, lr=0.1, initial_norm=norm)
        assert np.linalg.norm(moved) == pytest.approx(norm, rel=1e-12)
        assert np.linalg.norm(moved - weight) > 0.05 * norm
        weight = moved


def test_muonh_without_gradient_stands_still() -> None:
    weight = np.random.default_rng(0).normal(size=(4, 7))
    zero = np.zeros_like(weight)
    moved, buffer = muonh.muonh_step(weight, zero, zero, lr=0.1, initial_norm=float(np.linalg.norm(weight)))
    np.testing.assert_allclose(moved, weight, rtol=1e-14)
    assert not buffer.any()
    with pytest.raises(ValueError, match="norm 0"):
        muonh.muonh_step(zero, weight, zero, lr=0.1, initial_norm=0.0)


def test_orthogonalise() -> None:
    g = np.random.default_rng(0).normal(size=(12, 30))
    u, _, vt = np.linalg.svd(g, full_matrices=False)
    result = muonh.orthogonalise(g)
    in_the_basis_of_g = u.T @ result @ vt.T
    singular_values = np.diag(in_the_basis_of_g)
    np.testing.assert_allclose(in_the_basis_of_g, np.diag(singular_values), atol=1e-12)
    np.testing.assert_allclose(u @ in_the_basis_of_g @ vt, result, atol=1e-12)
    assert 0.85 < singular_values.min() and singular_values.max() < 1.15  # where five iterations leave them
    np.testing.assert_allclose(muonh.orthogonalise(g.T), result.T, atol=1e-12)


def test_adamw_agrees_with_torch() -> None:
    rng = np.random.default_rng(0)
    param, m, v = rng.normal(size=5), np.zeros(5), np.zeros(5)
    theirs = torch.tensor(param, requires_grad=True)
    optimizer = torch.optim.AdamW([theirs], lr=0.03, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    for step in range(1, 6):
        grad = rng.normal(size=5)
        param, m, v = muonh.adamw_step(param, grad, m, v, step, lr=0.03)
        theirs.grad = torch.tensor(grad)
        optimizer.step()
    np.testing.assert_allclose(param, theirs.detach().numpy(), rtol=1e-12)
