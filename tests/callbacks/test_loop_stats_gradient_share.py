"""The share of every recurrence in the gradient, against a loop of separate blocks under plain autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from callbacks import GradientShare
from looped_lm import HyperConnectionLanes, LoopContext, LoopedLM, PassthroughInjection, Steps, TruncatedBPTT
from tests.support.own_components import FewerAndFewer
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import TinyData, perturb, tiny_lm, tiny_trainer


def plain_shares(lm: LoopedLM, batches: list[Any], forward_only: int = 0) -> list[float]:
    """Norms of the loss's gradient with respect to the block's outputs, over all batches, by torch.autograd.grad."""
    model, squares = lm.model, [0.0] * lm.model.num_recurrences
    for inputs, targets in batches:
        context = LoopContext(*model.rotary(inputs.shape[1]))
        e = model.norm_emb(model.embedding(inputs))
        for layer in model.prelude:
            e = layer(e, context)
        state, outputs = model.lanes.expand(model.injection.initial_state(e)), list[Tensor]()
        for i in range(model.num_recurrences):
            u = model.injection(e, model.lanes.read(state, i), i)
            for layer in model.block:
                u = layer(u, context)
            outputs.append(model.norm_recur(u))
            if i < forward_only:
                outputs[i] = outputs[i].detach()
            state = model.lanes.write(state, outputs[i], i)
            if i < forward_only:
                state = state.detach()
        x = model.lanes.reduce(state)
        for layer in model.coda:
            x = layer(x, context)
        logits = model.logits(model.norm_final(x))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(batches)
        for i, gradient in enumerate(torch.autograd.grad(loss, outputs[forward_only:])):
            squares[forward_only + i] += float(gradient.double().square().sum())
    norms = [s**0.5 for s in squares]
    return [n / sum(norms) for n in norms]


CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "full": ({}, 8, 0),
    "micro-batches": ({}, 2, 0),
    "truncated": ({"bptt": TruncatedBPTT(2)}, 4, 1),
    "recompute": ({"recompute": True}, 8, 0),
    "recompute, truncated": ({"recompute": True, "bptt": TruncatedBPTT(1)}, 8, 2),
    "lanes": ({"lanes": HyperConnectionLanes, "injection": PassthroughInjection}, 4, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_shares_are_those_of_plain_autograd(tmp_path: Path, case: str) -> None:
    overrides, rows, forward_only = CASES[case]
    lm, logger = tiny_lm(num_recurrences=3, horizon=Steps(1), **overrides), RecordingLogger()
    perturb(lm.model)
    data = TinyData(rows)
    loader = iter(data.train_dataloader())
    expected = plain_shares(lm, [next(loader) for _ in range(8 // rows)], forward_only)
    tiny_trainer(tmp_path, [GradientShare()], logger=logger).fit(lm, datamodule=data)
    assert min(expected[forward_only:]) > 0.005, "a test that cannot tell them apart"
    for i, share in enumerate(expected):
        assert logger.series(f"loop/grad_share_{i}") == [(1, pytest.approx(share, rel=1e-4))]
    assert [v for _, v in logger.series("loop/grad_share_0")] == [0.0] or not forward_only
    assert not logger.series("loop/grad_share_3")
    assert not lm.model.norm_recur._forward_hooks


def test_only_logging_steps_and_recurrences_that_run(tmp_path: Path) -> None:
    """The number of recurrences may change from step to step."""
    lm = tiny_lm(num_recurrences=3, horizon=Steps(2), recurrences=FewerAndFewer)
    logger = RecordingLogger()
    tiny_trainer(tmp_path, [GradientShare()], logger=logger).fit(lm, datamodule=TinyData(4))
    assert [s for s, _ in logger.series("loop/grad_share_1")] == [1, 2]
    assert [s for s, _ in logger.series("loop/grad_share_2")] == [1]

    lm, logger = tiny_lm(), RecordingLogger()
    hooked: list[bool] = []
    loop = lm.model._loop
    lm.model._loop = lambda *a: (hooked.append(bool(lm.model.norm_recur._forward_hooks)), loop(*a))[1]  # type: ignore[method-assign]
    tiny_trainer(tmp_path, [GradientShare()], logger=logger, log_every_n_steps=3).fit(
        lm, datamodule=TinyData(4)
    )
    assert [s for s, _ in logger.series("loop/grad_share_1")] == [3, 4]
    # Two micro-batches a step, and the final validation's batch.
    assert hooked == [False] * 4 + [True] * 4 + [False] * (len(hooked) - 8)


def test_nothing_is_hooked_for_nobody(tmp_path: Path) -> None:
    share = GradientShare()
    share._watch = lambda *_: pytest.fail("hooked for nobody")  # type: ignore[method-assign]
    tiny_trainer(tmp_path, [share]).fit(tiny_lm(), datamodule=TinyData())


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_shares_at_any_precision_sum_to_one(tmp_path: Path, precision: str) -> None:
    lm, logger = tiny_lm(horizon=Steps(1)), RecordingLogger()
    perturb(lm.model)
    tiny_trainer(tmp_path, [GradientShare()], logger=logger, precision=precision).fit(
        lm, datamodule=TinyData()
    )
    (row,) = [row for _, row in logger.rows if "loop/grad_share_0" in row]
    assert sum(row.values()) == pytest.approx(1) and len(row) == 2
