"""Optimizer steps between logging steps take nothing from the device, and one predicate says where a step ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._python_dispatch import TorchDispatchMode

from callbacks import DivergenceGuard, FlopsMonitor, LoopStats
from looped_lm import HyperConnectionLanes, PassthroughInjection, Steps
from tests.support.recording_logger import RecordingLogger
from tests.support.shipped import default_callbacks
from tests.support.tiny import SEQ_LEN, TinyData, tiny_lm, tiny_trainer


class Fetches(TorchDispatchMode):
    """Counts values that leave tensors for Python; on an accelerator each waits for the device."""

    def __init__(self, on_the_host: set[int]) -> None:
        super().__init__()
        self.count = 0
        self.on_the_host = on_the_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].data_ptr() not in self.on_the_host:
            self.count += 1
        return func(*args, **(kwargs or {}))


def fetches_by_step(trainer: L.Trainer) -> dict[int, int]:
    """Fetches of every optimizer step of a fit to come, from its first batch to the loggers; validation is apart."""
    counts: dict[int, int] = {}
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def counted(*args: Any) -> None:
        step = trainer.global_step + 1
        states = trainer.optimizers[0].state.values()
        # AdamW counts its steps on the host whatever the device.
        with Fetches({s["step"].data_ptr() for s in states if "step" in s}) as fetches:
            advance(*args)
        counts[step] = counts.get(step, 0) + fetches.count

    loop.advance = counted  # type: ignore[method-assign]
    return counts


def test_nothing_is_fetched_between_logging_steps_with_all_default_callbacks(tmp_path: Path) -> None:
    lm = tiny_lm(
        horizon=Steps(8), val_every_steps=4, lanes=HyperConnectionLanes, injection=PassthroughInjection
    )
    trainer = tiny_trainer(
        tmp_path,
        default_callbacks(),
        logger=RecordingLogger(),
        log_every_n_steps=3,
        enable_progress_bar=True,
        enable_checkpointing=True,
    )
    counts = fetches_by_step(trainer)
    trainer.fit(lm, datamodule=TinyData(4))
    # Step 1 makes AdamW's counters, which are not known here before it.
    assert {step: n for step, n in counts.items() if step not in (1, 3, 6, 8)} == {2: 0, 4: 0, 5: 0, 7: 0}
    assert counts[3] > 0 and counts[6] > 0 and counts[8] > 0


def test_a_bar_of_lightnings_own_still_shows_the_loss(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, enable_progress_bar=True)
    trainer.fit(tiny_lm(), datamodule=TinyData())
    assert "train/loss" in trainer.progress_bar_metrics


@pytest.mark.parametrize("every", [3, 100])
def test_checkpoints_are_named_after_their_step_between_logging_steps_too(tmp_path: Path, every: int) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    trainer = tiny_trainer(
        tmp_path, [saving], logger=RecordingLogger(), log_every_n_steps=every, enable_checkpointing=True
    )
    trainer.fit(tiny_lm(horizon=Steps(8), val_every_steps=5), datamodule=TinyData(4))
    for step in (2, 4, 6, 8):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert saved["global_step"] == step


@pytest.mark.parametrize("fast", [False, True])
def test_a_step_ends_where_the_optimizer_stepped(tmp_path: Path, fast: bool) -> None:
    """Also where Lightning steps before the accumulation is complete."""

    class Watch(L.Callback):
        def __init__(self) -> None:
            self.said: list[tuple[bool, bool, bool]] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.before, self.begun = trainer.global_step, pl_module.ends_step(batch_idx)

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, out: Any, batch: Any, batch_idx: int
        ) -> None:
            stepped = trainer.global_step > self.before
            self.said.append((self.begun, pl_module.ends_step(batch_idx), stepped))

    watch, logger = Watch(), RecordingLogger()
    callbacks = [watch, FlopsMonitor(), LoopStats(), DivergenceGuard()]
    trainer = tiny_trainer(tmp_path, callbacks, logger=logger, fast_dev_run=fast)
    if fast:
        # It has no loggers of its own.
        trainer.loggers = [logger]
    trainer.fit(tiny_lm(horizon=Steps(2)), datamodule=TinyData(2))
    assert (
        watch.said == [(True,) * 3] if fast else [(False,) * 3, (False,) * 3, (False,) * 3, (True,) * 3] * 2
    )
    rows = {name for _, row in logger.rows for name in row}
    assert {"cost/tokens", "loop/state_norm_1"} <= rows
    assert trainer.callbacks[1].tokens == (1 if fast else 8) * 2 * SEQ_LEN
