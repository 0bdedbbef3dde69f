"""The loop against a plain straight-line re-implementation, and what the transformer refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from looped_lm import (
    AdditiveInjection,
    BPTTStrategy,
    FullBPTT,
    HyperConnectionLanes,
    LinearInjection,
    PassthroughInjection,
    TruncatedBPTT,
)
from looped_lm.model.transformer import size_of
from tests.support.reference import forward as reference
from tests.support.reference_form import INJECTIONS, reference_weights
from tests.support.tiny import VOCAB, perturb, tiny_model, tokens


def flat_gradients(weights: Any) -> list[torch.Tensor | None]:
    if isinstance(weights, torch.Tensor):
        return [weights.grad]
    if isinstance(weights, dict):
        return [g for key in sorted(weights) for g in flat_gradients(weights[key])]
    if isinstance(weights, list):
        return [g for item in weights for g in flat_gradients(item)]
    return []


@pytest.mark.parametrize(
    "name, overrides, injection, window",
    [
        (
            "r=1",
            dict(prelude_layers=0, recurrent_layers=3, coda_layers=0, num_recurrences=1),
            PassthroughInjection,
            None,
        ),
        ("linear", {}, LinearInjection, None),
        ("additive", {}, AdditiveInjection, None),
        ("passthrough", {}, PassthroughInjection, None),
        ("fully looped", dict(prelude_layers=0, coda_layers=0, num_recurrences=3), LinearInjection, None),
        ("gqa", dict(n_kv_heads=2), LinearInjection, None),
        ("lanes K=2", dict(lanes=HyperConnectionLanes, num_recurrences=3), PassthroughInjection, None),
        ("lanes K=3", dict(lanes=partial(HyperConnectionLanes, num_lanes=3)), PassthroughInjection, None),
        ("lanes + linear", dict(lanes=HyperConnectionLanes, num_recurrences=3), LinearInjection, None),
        ("truncated k=1", dict(num_recurrences=4), LinearInjection, 1),
        ("truncated k=2", dict(num_recurrences=4), LinearInjection, 2),
        ("truncated k=3", dict(num_recurrences=4), LinearInjection, 3),
        ("truncated additive", dict(num_recurrences=4), AdditiveInjection, 2),
    ],
)
def test_loss_and_every_gradient_equal_the_plain_reimplementation(
    name: str, overrides: dict[str, Any], injection: Any, window: int | None
) -> None:
    bptt = FullBPTT() if window is None else TruncatedBPTT(window)
    model = tiny_model(torch.float64, injection=injection, bptt=bptt, **overrides)
    perturb(model)
    inputs, targets = tokens()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()

    weights = reference_weights(model)
    expected, _ = reference.forward(
        weights,
        inputs,
        targets,
        head_dim=model.head_dim,
        num_recurrences=model.num_recurrences,
        injection=INJECTIONS[injection],
        vocab_size=VOCAB,
        window=window,
    )
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-8)

    # Put the model's gradients into the reference's form by building it from tensors that hold gradients.
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.copy_(p.grad)
    ours = reference_weights(model)
    for got, want in zip(_flat(ours), flat_gradients(weights), strict=True):
        assert want is not None
        assert float((got - want).norm()) <= 1e-8 * float(want.norm()), name


def _flat(weights: Any) -> list[torch.Tensor]:
    if isinstance(weights, torch.Tensor):
        return [weights.detach()]
    if isinstance(weights, dict):
        return [t for key in sorted(weights) for t in _flat(weights[key])]
    if isinstance(weights, list):
        return [t for item in weights for t in _flat(item)]
    return []


def test_truncated_and_full_gradients_differ_once_the_state_is_read() -> None:
    """At [I|0] they are equal, so a test on initial weights would prove nothing."""

    def gradient(bptt: BPTTStrategy, scale: float) -> torch.Tensor:
        model = tiny_model(torch.float64, num_recurrences=4, bptt=bptt)
        perturb(model, scale)
        inputs, targets = tokens()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        return model.block[0].attn.q.weight.grad  # type: ignore[union-attr,return-value]

    assert torch.allclose(gradient(FullBPTT(), 0.0), gradient(TruncatedBPTT(1), 0.0), rtol=1e-10, atol=0)
    assert not torch.allclose(gradient(FullBPTT(), 0.3), gradient(TruncatedBPTT(1), 0.3), rtol=1e-2, atol=0)


def test_forward_only_recurrences_build_no_graph() -> None:
    seen: list[bool] = []
    model = tiny_model(num_recurrences=4, bptt=TruncatedBPTT(1))
    model.observer = lambda i, state: seen.append(state.requires_grad)
    model(tokens()[0])
    assert seen == [False, False, False, True]


def test_logits_are_fp32_cut_to_the_vocabulary_and_capped() -> None:
    model = tiny_model(logit_softcap=0.5).to(torch.bfloat16)
    with torch.no_grad():
        model.head.weight.mul_(1e4)
    logits = model(tokens()[0])
    assert model.head.out_features == 64 and logits.shape[-1] == VOCAB
    assert logits.dtype is torch.float32 and float(logits.abs().max()) <= 0.5


def test_initialisation_follows_the_specification() -> None:
    model = tiny_model(size=4, head_dim=64)
    d = model.d_model
    assert d == 256
    assert float(model.embedding.weight.std()) == pytest.approx(1.0, rel=0.05)
    assert float(model.head.weight.std()) == pytest.approx(0.001, rel=0.05)
    for layer in (*model.prelude, *model.block, *model.coda):
        for linear in (layer.attn.q, layer.attn.k, layer.attn.v, layer.attn.out, layer.mlp.fc_in):
            bound = (3 / d) ** 0.5
            assert 0.98 * bound < float(linear.weight.abs().max()) <= bound
        bound = (3 / (4 * d)) ** 0.5
        assert 0.98 * bound < float(layer.mlp.fc_out.weight.abs().max()) <= bound
        assert bool((layer.norm_attn.weight == 1).all())
    assert bool((model.injection.proj.weight == torch.cat((torch.eye(d), torch.zeros(d, d)), 1)).all())


def test_width_is_rounded_up_to_whole_heads() -> None:
    assert tiny_model(size=1, head_dim=48).d_model == 96


def test_longer_sequences_than_in_training_extend_the_rotary_tables() -> None:
    model = tiny_model()
    inputs, _ = tokens(seq_len=40)
    longer = model(inputs)
    assert longer.shape[1] == 40
    torch.testing.assert_close(longer, tiny_model(seq_len=64)(inputs))


def test_bf16_rotary_tables_are_a_rounding_of_the_full_ones() -> None:
    full, rounded = tiny_model(), tiny_model(rope_bf16=True)
    assert torch.equal(rounded.rotary.cos, full.rotary.cos.to(torch.bfloat16).float())
    assert not torch.equal(rounded(tokens()[0]), full(tokens()[0]))


class KeepFirst(BPTTStrategy):
    def keeps_grad(self, i: int, num_recurrences: int) -> bool:
        return i == 0


@pytest.mark.parametrize(
    "overrides, says",
    [
        (
            dict(lanes=HyperConnectionLanes, bptt=TruncatedBPTT(1)),
            "separate parameters for every recurrence",
        ),
        (
            dict(injection=PassthroughInjection, bptt=TruncatedBPTT(1)),
            "prelude and embedding would get no gradient",
        ),
        (dict(bptt=KeepFirst()), "must be the last ones"),
        (dict(n_kv_heads=3), "must divide the 4 query heads"),
        (dict(num_recurrences=0), "num_recurrences is 0"),
        (dict(prelude_layers=-1), "prelude_layers is -1"),
        (dict(recurrent_layers=0), "recurrent_layers is 0"),
        (dict(head_dim=15), "must be even"),
        (dict(logit_softcap=0.0), "must be positive"),
        (dict(lanes=partial(HyperConnectionLanes, num_lanes=1)), "need at least 2"),
    ],
)
def test_what_cannot_train_is_refused_with_the_reason(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tiny_model(**overrides)


def test_truncation_that_cuts_nothing_goes_with_any_pair() -> None:
    model = tiny_model(injection=PassthroughInjection, lanes=HyperConnectionLanes, bptt=TruncatedBPTT(2))
    model(tokens()[0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("size", "width"), [(1, 64), (0.5, 32), (0.75, 48), (1.5, 96), (0.1, 16), (2.0, 128)]
)
def test_a_fraction_of_a_size_makes_a_width_of_whole_heads(size: float, width: int) -> None:
    model = tiny_model(size=size, head_dim=16)
    assert model.d_model == width and tiny_model(size=size_of(width), head_dim=16).d_model == width


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_a_size_that_is_none_is_refused(size: float) -> None:
    with pytest.raises(ValueError, match="it must be positive"):
        tiny_model(size=size)
