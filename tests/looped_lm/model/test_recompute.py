"""Recomputed recurrences: the same gradients from less memory; truncation frees what it cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from looped_lm import AdditiveInjection, HyperConnectionLanes, PassthroughInjection, TruncatedBPTT
from tests.support.saved_tensors import held_bytes
from tests.support.tiny import perturb, tiny_model, tokens

LANES = {"injection": PassthroughInjection, "lanes": HyperConnectionLanes}
R8 = {"prelude_layers": 2, "recurrent_layers": 2, "coda_layers": 2, "num_recurrences": 8}


@pytest.mark.parametrize(
    "components",
    [{}, {"injection": AdditiveInjection}, {"bptt": TruncatedBPTT()}, LANES],
    ids=["linear", "additive", "truncated", "lanes"],
)
def test_gradients_and_observations_are_the_same(components: dict[str, Any]) -> None:
    results = []
    for recompute in (False, True):
        model = tiny_model(torch.float64, num_recurrences=4, recompute=recompute, **components)
        perturb(model)
        seen: list[int] = []
        model.observer = lambda i, state, seen=seen: seen.append(i)  # type: ignore[misc]
        loss = model(*tokens())
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert seen == [0, 1, 2, 3], "once per recurrence, not again in the backward pass"
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=0.0)


def test_it_runs_every_recurrence_once_more() -> None:
    calls = {False: 0, True: 0}
    for recompute in calls:
        model = tiny_model(num_recurrences=4, recompute=recompute)

        def count(*args: Any, recompute: bool = recompute) -> None:
            calls[recompute] += 1

        model.block[0].register_forward_hook(count)
        model(*tokens()).backward()
    assert calls == {False: 4, True: 8}


def test_memory() -> None:
    inputs = torch.zeros(2, 64, dtype=torch.int64)

    def held(**overrides: Any) -> int:
        return held_bytes(tiny_model(**R8, size=2, head_dim=64, seq_len=64, **overrides), inputs)

    full = held()
    assert held(bptt=TruncatedBPTT()) <= 0.65 * full
    assert held(recompute=True) <= 0.40 * full
