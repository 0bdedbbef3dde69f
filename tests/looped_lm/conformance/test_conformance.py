"""Every shipped component and those of test_extension pass the conformance suite; each of its checks can fail."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from looped_lm import (
    AdapterLayer,
    AdditiveInjection,
    DiagonalInjection,
    DoublyStochasticLanes,
    ExitDistribution,
    HyperConnectionLanes,
    HyperP,
    LogNormalPoisson,
    LoopedLM,
    LoopIndexInjection,
    LoopModulatedLayer,
    MixtureLayer,
    PassthroughInjection,
    PonderCost,
    PreviousStateLayer,
    RandomStateInjection,
    ScaledResidual,
    SharedKeysValuesLayer,
    Steps,
    SwiGLULayer,
    TruncatedBPTT,
    WeightedRecurrences,
)
from looped_lm.conformance import Candidate, ConformanceError, checks
from looped_lm.conformance.training import compiled_equals_eager, ddp_problems
from looped_lm.seams import SEAMS
from tests.support import mutants
from tests.support.own_components import (
    CarryingLayer,
    Counts,
    GatedInjection,
    GatedLosses,
    LastRecurrence,
    LayerScale,
    MeanLane,
    SignDescent,
)
from tests.support.shipped import SHIPPED_ARCHITECTURES, shipped
from tests.support.tiny import tiny_trainer

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
    "swiglu": dict(layer=SwiGLULayer),
    "adapters": dict(layer=partial(AdapterLayer, rank=3), layer_in_block_only=True),
    "modulated": dict(layer=LoopModulatedLayer, bptt=TruncatedBPTT()),
    "shared keys and values": dict(layer=SharedKeysValuesLayer, recurrent_layers=2),
    "mixture": dict(layer=partial(MixtureLayer, num_experts=3, balance=0.5), layer_in_block_only=True),
    "random state": dict(injection=RandomStateInjection, bptt=TruncatedBPTT()),
    "previous state": dict(layer=PreviousStateLayer, layer_in_block_only=True, bptt=TruncatedBPTT()),
    "own layer": dict(layer=CarryingLayer, layer_in_block_only=True),
    "exit distribution": dict(objective=ExitDistribution),
    "ponder cost": dict(objective=partial(PonderCost, beta=0.5, prior=0.4)),
    "weighted": dict(objective=WeightedRecurrences),
    "weighted truncated": dict(
        objective=partial(WeightedRecurrences, recurrences=[-1, 2], weights=[3.0, 1.0]), bptt=TruncatedBPTT()
    ),
    "sampled": dict(recurrences=LogNormalPoisson, bptt=TruncatedBPTT()),
    "own injection": dict(injection=partial(GatedInjection, gate=0.5)),
    "own lanes": dict(lanes=MeanLane),
    "own residual": dict(residual=LayerScale),
    "own objective": dict(objective=GatedLosses),
    "own bptt": dict(bptt=LastRecurrence()),
    "own recurrences": dict(recurrences=partial(Counts, counts=[1, 3, 5, 2])),
    "own optimizer": dict(optimizer=SignDescent),
}


def test_every_axis_is_on_trial() -> None:
    tried = {axis for own in COMPONENTS.values() for axis in own}
    assert {*SEAMS, "optimizer"} == tried - {"recurrent_layers", "layer_in_block_only"}


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


#: Check -> components that it must find fault with, and a word of the message.
MUTANTS: list[tuple[str, dict[str, Any], str]] = [
    ("gradients", dict(injection=mutants.UnusedParameter), "injection.spare gets no gradient"),
    ("gradients", dict(injection=mutants.CutGradient), "gradient of injection.gain is zero"),
    (
        "gradients",
        dict(lanes=mutants.IdleRecurrence),
        r"alpha does not train in recurrences \[1, 2, 3\] of 4",
    ),
    ("counts", dict(injection=mutants.ZeroMatrix), "starts with norm 0.0"),
    (
        "counts",
        dict(injection=mutants.SharedInjection, residual=mutants.SharedResidual),
        "shared between sections",
    ),
    ("flops", dict(injection=mutants.TooCheap), "TooCheap.flops_per_token"),
    ("flops", dict(injection=mutants.TooDear), "TooDear.flops_per_token"),
    ("flops", dict(residual=mutants.DearResidual), "DearResidual.flops_per_token"),
    ("flops", dict(lanes=mutants.HiddenProduct), "the accounting says"),
    ("flops", dict(objective=mutants.ReadsTwice), "the accounting says"),
    ("flops", dict(layer=mutants.CheapLayer), "the accounting says"),
    ("causality", dict(layer=mutants.LeakingLayer), "not causal"),
    ("gradients", dict(layer=mutants.IdleLayer), "idle gets no gradient"),
    ("inputs", dict(layer=mutants.GrowingMemory), "The memory of GrowingMemory changes its sizes"),
    ("inputs", dict(layer=mutants.MutatedMemory), "MutatedMemory.forward changes its input"),
    ("recompute", dict(layer=mutants.MutatedMemory), "Recomputation changes"),
    ("graphs", dict(layer=mutants.ListedAdapters), "ListedAdapters makes the compiler build"),
    ("one_recurrence", dict(injection=mutants.CallCounter), "At r = 1"),
    ("inputs", dict(lanes=mutants.InPlaceWrite), "InPlaceWrite.write changes its input"),
    ("inputs", dict(injection=mutants.InPlaceState), "InPlaceState.forward changes its input"),
    ("mixing", dict(lanes=mutants.OtherMixing), "shows another matrix than recurrence 0"),
    ("causality", dict(injection=mutants.LooksAhead), "not causal"),
    ("causality", dict(injection=mutants.LooksAside), "other rows"),
    ("more_recurrences", dict(injection=mutants.TableWithoutRule), "ends in IndexError"),
    ("autocast", dict(injection=mutants.OneDtype), "dtype"),
    ("compiled", dict(injection=mutants.OtherWhenCompiled), "Compilation changes the loss"),
    ("recompute", dict(injection=mutants.OtherWhenRecomputed), "Recomputation changes"),
    ("checkpoint", dict(injection=mutants.lost_argument), "gives another loss"),
    ("training", dict(optimizer=mutants.Ascent), "does not lower its loss"),
]


@pytest.mark.parametrize("name, components, message", MUTANTS)
def test_each_check_finds_its_fault(name: str, components: dict[str, Any], message: str) -> None:
    (check,) = [c for c in checks(**components) if str(c) == name]
    with pytest.raises((ConformanceError, RuntimeError), match=message):
        check()


def test_every_check_has_a_mutant() -> None:
    assert {str(c) for c in checks()} == {name for name, _, _ in MUTANTS} | {"ddp"}


def test_all_of_them_train_the_same_on_two_processes() -> None:
    """One pair of processes; two mutants among the candidates are found, and nothing else."""
    faulty = [
        Candidate(dict(injection=mutants.UnusedParameter)),
        Candidate(dict(injection=mutants.LooksAside)),
    ]
    # A process makes 256 choices, so some experts have no token there.
    idle = partial(MixtureLayer, num_experts=300, hidden=2)
    sound = [Candidate(own) for own in (*COMPONENTS.values(), dict(layer=idle, layer_in_block_only=True))]
    unused, aside, *rest = ddp_problems(*faulty, *sound)
    assert unused is not None and unused.startswith("DDP stops: ") and "unused" not in str(rest)
    assert aside is not None and aside.startswith("DDP changes the gradient of ")
    assert rest == [None] * len(sound)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPONENTS)
def test_inductor_equals_eager(name: str) -> None:
    compiled_equals_eager(Candidate(COMPONENTS[name]), backend="inductor")


@pytest.mark.slow
@pytest.mark.parametrize("config", SHIPPED_ARCHITECTURES)
def test_every_shipped_architecture_learns_the_embedded_corpus(config: str, tmp_path: Path) -> None:
    """Thirty steps of 512 tokens take at least 0.3 nats off the loss on held-out rows."""
    from datamodules import TokenDataModule

    data = TokenDataModule(seq_len=128, batch_size=4, val_rows=16, final_val_rows=16, progress=False)
    torch.manual_seed(1)
    lm = LoopedLM(
        data.vocab_size,
        128,
        Steps(30),
        batch_tokens=512,
        size=1,
        head_dim=32,
        # The rates of base.yaml, for batches as small as this.
        transfer=HyperP(embedding=0.9, head=0.1),
        **shipped(config),
    )
    trainer = tiny_trainer(tmp_path)
    losses = []
    silent = partial(trainer.validate, verbose=False)
    for run in (silent, trainer.fit, silent):
        run(lm, datamodule=data)
        assert lm.evaluated is not None
        losses.append(lm.evaluated[0])
    print(f"{config}: {losses[0]:.3f} -> {losses[-1]:.3f} nats/token")
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("config", SHIPPED_ARCHITECTURES)
def test_every_shipped_architecture_learns(config: str) -> None:
    """In its own layout: every parameter has a gradient and a few steps lower the loss."""
    components = shipped(config)
    for check in checks(**components):
        if str(check) in ("gradients", "training"):
            check()
