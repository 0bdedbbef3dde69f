"""Runs that a signal stops and that are resumed, and everything that must equal a run that was not stopped."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

import callbacks
from datamodules import ByteTokenizer, PrepareSettings, TextFiles, TokenDataModule
from datamodules.prepare import prepare
from looped_lm import (
    HyperConnectionLanes,
    LinearInjection,
    LogNormalPoisson,
    LoopedLM,
    PassthroughInjection,
    Steps,
    TruncatedBPTT,
)
from looped_lm.runs.preemption import Preempted
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import tiny_trainer

#: The loops under test, as the configs of these names define them.
VARIANTS: dict[str, dict[str, Any]] = {
    "r4": dict(num_recurrences=4, injection=LinearInjection),
    "r8_hc": dict(num_recurrences=8, injection=PassthroughInjection, lanes=HyperConnectionLanes),
    "r4_sampled": dict(num_recurrences=4, injection=LinearInjection, recurrences=LogNormalPoisson),
    "r4_truncated": dict(num_recurrences=4, injection=LinearInjection, bptt=TruncatedBPTT(2)),
}
BATCH_ROWS = 4
#: Steps of one pass over the rows of `write_data`.
EPOCH_STEPS = 8
STEPS = 2 * EPOCH_STEPS + 6
VAL_EVERY = 5

#: Where a run is stopped: arguments of Trace, and the step at which the run must have stopped.
STOPS: dict[str, tuple[dict[str, Any], int]] = {
    "before the first step": (dict(at=(0, 0)), 1),
    "in mid-epoch": (dict(at=(2, 0)), 3),
    "in mid-accumulation": (dict(at=(2, 1)), 3),
    "before a validation": (dict(at=(3, 1)), 4),
    "at a validation": (dict(at=(4, 1)), 5),
    "after a validation": (dict(at=(5, 0)), 6),
    "in a validation": (dict(at=(10, 0), during="validation"), 10),
    "at the data's end": (dict(at=(EPOCH_STEPS - 1, 0)), EPOCH_STEPS),
    "in a later epoch": (dict(at=(EPOCH_STEPS + 3, 1)), EPOCH_STEPS + 4),
    "at the second epoch's end": (dict(at=(2 * EPOCH_STEPS - 1, 1)), 2 * EPOCH_STEPS),
    "at the last step": (dict(at=(STEPS - 1, 0)), STEPS),
    "in the final validation": (dict(at=(STEPS, 0), during="validation"), STEPS),
}


def write_data(folder: Path) -> Path:
    """Prepared data of EPOCH_STEPS·BATCH_ROWS training rows of 17 bytes, each of one document."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for i in range(39):
        (texts / f"{i}.txt").write_text(f"{i:03d} loops once".ljust(16, "."))
    settings = PrepareSettings(seq_len=16, val_fraction=0.2)
    prepare(TextFiles([str(texts)]), ByteTokenizer(), settings, folder / "rows", progress=False)
    return folder / "rows"


class Trace(L.Callback):
    """Records what a run does, draws random numbers as a model with dropout would, and sends the run a signal.

    Args:
        send: the signal.
        at: when to send it: (optimizer steps done, micro-batches of the next step done); None: never.
        during: `training`, or `validation` at the step of `at`.
    """

    def __init__(
        self, send: int = signal.SIGTERM, at: tuple[int, int] | None = None, during: str = "training"
    ) -> None:
        self.losses: list[tuple[int, float]] = []
        self.validations: list[tuple[int, float, int]] = []
        self.draws: list[tuple[int, float, float, float]] = []
        self.samples: dict[int, list[str]] = {}
        self.send, self.at, self.during = send, at, during
        self.micro_batches_after_the_signal = -1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append((batch_idx, float(outputs["loss"])))
        step = batch_idx // trainer.accumulate_grad_batches
        self.samples.setdefault(step, []).extend(str(row) for row in batch[0].tolist())
        if pl_module.ends_step(batch_idx):
            draw = (random.random(), float(np.random.rand()), float(torch.rand(())))
            self.draws.append((trainer.global_step, *draw))
        if self.micro_batches_after_the_signal >= 0:
            self.micro_batches_after_the_signal += 1

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: LoopedLM, batch: Any, batch_idx: int
    ) -> None:
        within = batch_idx % trainer.accumulate_grad_batches
        if self.during == "training" and (trainer.global_step, within) == self.at:
            self._signal()

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.during == "validation" and self.at and trainer.global_step == self.at[0]:
            self._signal()

    def _signal(self) -> None:
        self.micro_batches_after_the_signal = 0
        os.kill(os.getpid(), self.send)

    def on_validation_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        assert pl_module.evaluated is not None
        self.validations.append((trainer.global_step, *pl_module.evaluated))


@dataclass
class Outcome:
    """Everything that a run did, in order."""

    losses: list[Any] = field(default_factory=list)
    validations: list[Any] = field(default_factory=list)
    draws: list[Any] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: Any = None
    counters: dict[str, Any] = field(default_factory=dict)
    stopped: Preempted | None = None
    trace: Trace | None = None

    def then(self, later: Outcome) -> Outcome:
        """This run followed by the one that resumed it."""
        return Outcome(
            self.losses + later.losses,
            self.validations + later.validations,
            self.draws + later.draws,
            self.rows + later.rows,
            later.weights,
            later.optimizer,
            later.counters,
        )


def plain(value: Any) -> Any:
    """Nested state with its tensors as lists, which compare exactly."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def fit(
    folder: Path,
    data_dir: Path,
    variant: str = "r4",
    workers: int = 0,
    accumulate: int = 2,
    ckpt_path: str | None = None,
    trace: Trace | None = None,
    steps: int = STEPS,
    keep: int = 2,
    val_every_steps: int | None = VAL_EVERY,
    final_val_rows: int = 7,
    trainer_options: dict[str, Any] | None = None,
    **model: Any,
) -> Outcome:
    """The part of a run that one process does. Everything is built anew, as on the command line."""
    L.seed_everything(3, verbose=False)
    options = trainer_options or {}
    devices = options.get("devices", 1)
    data = TokenDataModule(
        data_dir=data_dir,
        seq_len=16,
        progress=False,
        batch_size=BATCH_ROWS // accumulate // devices,
        val_batch_size=2,
        val_rows=5,
        final_val_rows=final_val_rows,
        num_workers=workers,
    )
    lm = LoopedLM(
        vocab_size=data.vocab_size,
        seq_len=16,
        horizon=Steps(steps),
        batch_tokens=BATCH_ROWS * 16,
        size=1,
        head_dim=16,
        prelude_layers=1,
        recurrent_layers=1,
        coda_layers=1,
        val_every_steps=val_every_steps,
        **{**VARIANTS[variant], **model},
    )
    trace = trace or Trace()
    logger = RecordingLogger()
    trainer = tiny_trainer(
        folder,
        [
            trace,
            callbacks.FlopsMonitor(),
            callbacks.LearningRates(),
            callbacks.GradientNorm(),
            callbacks.RandomState(),
            callbacks.FinalValidation(),
            callbacks.DivergenceGuard(),
            callbacks.RunRecordWriter(),
            callbacks.Preemption(),
            callbacks.Checkpoints(keep, dirpath=str(folder)),
        ],
        logger=logger,
        enable_checkpointing=True,
        log_every_n_steps=3,
        **options,
    )
    stopped = None
    try:
        trainer.fit(lm, datamodule=data, ckpt_path=ckpt_path)
    except Preempted as stop:
        # Its traceback would keep the run's readers alive.
        stopped = stop.with_traceback(None)
    monitor = next(c for c in trainer.callbacks if isinstance(c, callbacks.FlopsMonitor))
    return Outcome(
        trace.losses,
        trace.validations,
        trace.draws,
        [(step, {k: v for k, v in row.items() if not k.startswith("speed/")}) for step, row in logger.rows],
        {k: v.clone() for k, v in lm.state_dict().items()},
        plain(trainer.optimizers[0].state_dict()) if trainer.optimizers else None,
        {
            "tokens": monitor.tokens,
            "flops": monitor.flops,
            "step": trainer.global_step,
            "rows": data.rows_consumed,
        },
        stopped,
        trace,
    )


def assert_equal(resumed: Outcome, whole: Outcome) -> None:
    """Equal bit for bit: losses, validation passes, random numbers, logged rows, weights, optimizer, counters."""
    assert resumed.losses == whole.losses
    assert resumed.validations == whole.validations
    assert resumed.draws == whole.draws
    assert resumed.rows == whole.rows
    assert resumed.counters == whole.counters
    assert resumed.optimizer == whole.optimizer
    assert resumed.weights.keys() == whole.weights.keys()
    assert all(torch.equal(resumed.weights[k], whole.weights[k]) for k in whole.weights)
