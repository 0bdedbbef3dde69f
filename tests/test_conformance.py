"""Every shipped component and those of test_extension pass the conformance suite; each of its checks can fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from looped_lm import (
    AdditiveInjection,
    DiagonalInjection,
    DoublyStochasticLanes,
    HyperConnectionLanes,
    LoopIndexInjection,
    PassthroughInjection,
    ScaledResidual,
    TruncatedBPTT,
)
from looped_lm.conformance import Candidate, checks, ddp_equals_single
from tests.test_extension import GatedInjection, LastRecurrence, MeanLane, SignDescent
from tests.test_residual import LayerScale

COMPONENTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "additive": dict(injection=AdditiveInjection),
    "passthrough": dict(injection=PassthroughInjection),
    "diagonal": dict(injection=DiagonalInjection),
    "loop index": dict(injection=LoopIndexInjection),
    "hyperconnections": dict(
        injection=PassthroughInjection, lanes=partial(HyperConnectionLanes, num_lanes=3)
    ),
    "doubly stochastic": dict(injection=PassthroughInjection, lanes=DoublyStochasticLanes),
    "lanes + linear": dict(lanes=HyperConnectionLanes),
    "scaled": dict(residual=partial(ScaledResidual, gain=0.5)),
    "truncated": dict(bptt=TruncatedBPTT()),
    "truncated diagonal": dict(bptt=TruncatedBPTT(1), injection=DiagonalInjection),
    "truncated loop index": dict(bptt=TruncatedBPTT(), injection=LoopIndexInjection),
    "own injection": dict(injection=partial(GatedInjection, gate=0.5)),
    "own lanes": dict(lanes=MeanLane),
    "own residual": dict(residual=LayerScale),
    "own bptt": dict(bptt=LastRecurrence()),
    "own optimizer": dict(optimizer=SignDescent),
}


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(c, id=f"{name}: {c}")
        for name, own in COMPONENTS.items()
        for c in checks(ddp=False, **own)
    ],
)
def test_it_conforms(check: Any) -> None:
    check()


def test_all_of_them_train_the_same_on_two_processes() -> None:
    ddp_equals_single(*(Candidate(own) for own in COMPONENTS.values()))
