"""The chunked loss against the plain head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from looped_lm.model import loss as module
from looped_lm.model.loss import softcapped_cross_entropy
from tests.support.tiny import VOCAB, perturb, tiny_model, tokens


@pytest.mark.parametrize("elements", [1, 5 * VOCAB, 16 * VOCAB, 10**9])
def test_loss_and_gradients_equal_the_plain_head(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunk: one token, chunks that leave a remainder, exact chunks, all at once."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    torch.manual_seed(0)
    hidden = torch.randn(48, 64, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB, (48,))
    logits = 15 * torch.tanh((hidden @ weight[:VOCAB].T) / 15)
    expected = F.cross_entropy(logits, targets)
    (3 * expected).backward()
    plain = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    loss = softcapped_cross_entropy(hidden, weight, targets, VOCAB, 15.0)
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for got, want in zip((hidden.grad, weight.grad), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert not weight.grad[VOCAB:].any()


@pytest.mark.parametrize("elements", [1, 5 * VOCAB, 10**9])
def test_token_weights_are_weighed_and_get_gradients(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    torch.manual_seed(0)
    leaves = [torch.randn(*size, dtype=torch.float64) for size in ((48, 64), (64, 64), (48,))]
    targets = torch.randint(VOCAB, (48,))

    def gradients(plain: bool) -> list[torch.Tensor]:
        hidden, weight, gate = (leaf.clone().requires_grad_() for leaf in leaves)
        if plain:
            logits = 15 * torch.tanh((hidden @ weight[:VOCAB].T) / 15)
            loss = (gate.sigmoid() * F.cross_entropy(logits, targets, reduction="none")).mean()
        else:
            loss = softcapped_cross_entropy(hidden, weight, targets, VOCAB, 15.0, gate.sigmoid())
        return [loss.detach(), *torch.autograd.grad(3 * loss, (hidden, weight, gate))]

    for got, want in zip(gradients(plain=False), gradients(plain=True), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-13)


def test_the_model_gives_the_same_loss_and_gradients_through_it() -> None:
    inputs, targets = tokens()
    grads = []
    for chunked in (False, True):
        model = tiny_model(torch.float64)
        perturb(model)
        if chunked:
            loss = model(inputs, targets)
        else:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


def test_without_gradients_it_only_counts_the_loss() -> None:
    model = tiny_model()
    inputs, targets = tokens()
    with torch.no_grad():
        loss = model(inputs, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).detach())


def test_under_autocast_the_loss_stays_fp32_and_close() -> None:
    model = tiny_model()
    perturb(model)
    inputs, targets = tokens()
    exact = model(inputs, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(inputs, targets)
    loss.backward()
    assert loss.dtype is torch.float32 and model.head.weight.grad.dtype is torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


def test_all_logits_are_never_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for backward is as large as the inputs, not as the logits."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 4 * VOCAB)
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(64, 8, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        softcapped_cross_entropy(hidden, weight, torch.zeros(512, dtype=torch.int64), VOCAB, 15.0)
    assert sum(kept) <= hidden.numel() + weight.numel() < 512 * VOCAB
