"""Learning rates, gradient norm and state norms, each against a value computed apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from callbacks import GradientNorm, LearningRates, LoopStats
from looped_lm import HyperConnectionLanes, PassthroughInjection, SingleLane
from tests.recording_logger import RecordingLogger
from tests.tiny import TinyData, tiny_lm, tiny_trainer


def test_learning_rates_are_logged_by_role(tmp_path: Path) -> None:
    lm, logger = tiny_lm(), RecordingLogger()
    tiny_trainer(tmp_path, [LearningRates()], logger=logger).fit(lm, datamodule=TinyData(4))
    base = lm.learning_rates()
    for role in ("matrix", "embedding", "head", "norm"):
        assert logger.series(f"lr/{role}") == [
            (t + 1, pytest.approx(base[role] * (1 - 0.9 * t / 4), rel=1e-6)) for t in range(4)
        ]


class OwnNorm(L.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        self.norms.append(sum(float((p.grad.double() ** 2).sum()) for p in pl_module.parameters()) ** 0.5)  # type: ignore[union-attr]


def test_the_gradient_norm_is_that_of_the_accumulated_gradient(tmp_path: Path) -> None:
    logger, own = RecordingLogger(), OwnNorm()
    tiny_trainer(tmp_path, [GradientNorm(), own], logger=logger).fit(tiny_lm(), datamodule=TinyData(2))
    assert [v for _, v in logger.series("grad/norm")] == pytest.approx(own.norms, rel=1e-5)
    assert [s for s, _ in logger.series("grad/norm")] == [1, 2, 3, 4]


def test_telemetry_is_taken_at_logging_steps_only(tmp_path: Path) -> None:
    logger = RecordingLogger()
    callbacks = [GradientNorm(), LoopStats(), LearningRates()]
    tiny_trainer(tmp_path, callbacks, logger=logger, log_every_n_steps=2).fit(
        tiny_lm(), datamodule=TinyData(2)
    )
    for name in ("grad/norm", "loop/state_norm_0", "lr/matrix", "train/loss"):
        assert [s for s, _ in logger.series(name)] == [2, 4], name


class PairLanes(SingleLane):
    """A state that is a pair of tensors."""

    def expand(self, s: torch.Tensor) -> Any:
        return (s, s)

    def read(self, state: Any, i: int) -> torch.Tensor:
        return state[0]

    def write(self, state: Any, y: torch.Tensor, i: int) -> Any:
        return (y, state[0])

    def reduce(self, state: Any) -> torch.Tensor:
        return state[0] + state[1]


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_telemetry_takes_any_state_at_any_precision(tmp_path: Path, precision: str) -> None:
    logger = RecordingLogger()
    trainer = tiny_trainer(tmp_path, [LoopStats(), GradientNorm()], logger=logger, precision=precision)
    trainer.fit(tiny_lm(lanes=PairLanes), datamodule=TinyData())
    assert [s for s, _ in logger.series("loop/state_norm_1")] == [1, 2, 3, 4]


def test_state_norms_are_those_of_the_state_after_each_recurrence(tmp_path: Path) -> None:
    lm = tiny_lm(num_recurrences=3, lanes=HyperConnectionLanes, injection=PassthroughInjection)
    logger = RecordingLogger()
    trainer = tiny_trainer(tmp_path, [LoopStats()], logger=logger, max_steps=1)
    states: list[torch.Tensor] = []
    original = lm.model._loop

    def spy(*args: Any) -> Any:
        watched = lm.model.observer
        if watched is not None:
            lm.model.observer = lambda i, s: (states.append(s.detach().clone()), watched(i, s))  # type: ignore[func-returns-value,assignment]
        return original(*args)

    lm.model._loop = spy  # type: ignore[method-assign]
    trainer.fit(lm, datamodule=TinyData())
    assert len(states) == 3 and states[0].shape[0] == 2
    for i, state in enumerate(states):
        assert logger.series(f"loop/state_norm_{i}") == [
            (1, pytest.approx(float(state.square().mean().sqrt()), rel=1e-5))
        ]
    assert lm.model.observer is None
