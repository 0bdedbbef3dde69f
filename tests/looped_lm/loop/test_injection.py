"""Injections against their formulas."""

from __future__ import annotations

import torch

from looped_lm import AdditiveInjection, LinearInjection, PassthroughInjection


def test_initial_states_and_inputs() -> None:
    torch.manual_seed(0)
    e, s = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    linear = LinearInjection(8)
    assert torch.equal(linear.initial_state(e), e) and torch.equal(linear(e, s, 0), e)
    with torch.no_grad():
        linear.proj.weight.normal_()
    w = linear.proj.weight
    torch.testing.assert_close(linear(e, s, 1), e @ w[:, :8].T + s @ w[:, 8:].T)
    assert linear.flops_per_token() == 2 * 2 * 8 * 8

    assert torch.equal(AdditiveInjection(8).initial_state(e), torch.zeros_like(e))
    assert torch.equal(AdditiveInjection(8)(e, s, 0), s + e)
    assert torch.equal(PassthroughInjection(8).initial_state(e), e)
    assert torch.equal(PassthroughInjection(8)(e, s, 0), s)
    assert not PassthroughInjection.reinjects_input
