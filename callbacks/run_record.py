"""Writes the run record, which is what `fitting` reads of a run."""

from __future__ import annotations

import math
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L

import looped_lm
from callbacks.final_validation import in_training
from callbacks.flops import FlopsMonitor
from callbacks.guard import DivergenceGuard
from callbacks.preemption import Preemption
from callbacks.telemetry import needed
from fitting.records import RECORD_SUFFIX, RunRecord
from looped_lm import LoopedLM
from looped_lm.common.errors import UserError
from looped_lm.runs.checkpoint import RECORD_KEY, Stored
from looped_lm.runs.checkpoint_io import RecordingCheckpointIO, mend_record
from looped_lm.runs.preemption import Preempted
from looped_lm.training.description import run_record as describe
from looped_lm.training.devices import hardware


class RunRecordWriter(L.Callback):
    """Stores a `fitting.records.RunRecord` inside every checkpoint and as JSON beside it.

    A run that raises is recorded, too, as `diverged` or `stopped`, beside its checkpoints.

    Raises:
        UserError: training starts without `FlopsMonitor`, or without validation.
    """

    def __init__(self) -> None:
        self._validation: dict[str, Any] = {"val_loss": None, "val_tokens": None, "val_step": None}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy.checkpoint_io, RecordingCheckpointIO):
            needed(trainer, FlopsMonitor, by=self)
            if trainer.limit_val_batches == 0:
                told = "trainer.limit_val_batches is 0: without validation a run has no loss to record."
                raise UserError(told)
            trainer.strategy.checkpoint_io = RecordingCheckpointIO(trainer.strategy.checkpoint_io)

    def on_run_complete(self, last: Stored) -> None:
        """The command line calls this instead of training if nothing is left to do of a run."""
        mend_record(last)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._validation)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validation = dict(state_dict)

    def on_validation_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if not in_training(trainer):
            return
        assert pl_module.evaluated is not None
        loss, tokens = pl_module.evaluated
        if math.isfinite(loss):
            self._validation = {"val_loss": loss, "val_tokens": tokens, "val_step": trainer.global_step}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: LoopedLM, checkpoint: dict[str, Any]) -> None:
        checkpoint[RECORD_KEY] = self.record(trainer, pl_module).to_dict()

    def on_exception(self, trainer: L.Trainer, pl_module: LoopedLM, exception: BaseException) -> None:
        if isinstance(exception, Preempted):
            # The checkpoint already has a record that says so.
            return
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        if folder is None or not (trainer.is_global_zero and in_training(trainer) and trainer.global_step):
            return
        status = "diverged" if isinstance(exception, FloatingPointError) else "stopped"
        record = self.record(trainer, pl_module, status, f"{type(exception).__name__}: {exception}")
        # A full disk must not hide the exception.
        with suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            record.save(Path(folder) / f"{record.status}-step={record.steps:06d}{RECORD_SUFFIX}")

    def record(
        self, trainer: L.Trainer, pl_module: LoopedLM, status: str | None = None, reason: str | None = None
    ) -> RunRecord:
        """The record of the run up to now."""
        data, others = trainer.datamodule, trainer.callbacks  # type: ignore[attr-defined]
        steps, planned = trainer.global_step, pl_module.plan.steps
        finished = steps >= planned and self._validation["val_step"] == steps
        if status is None:
            status = "completed" if finished else "stopped"
            reason = None if finished else f"at step {steps} of {planned}"
            if steps >= planned and not finished:
                reason = f"after all {planned} steps, before the final validation"
            if why := next((c.reason for c in others if isinstance(c, Preemption)), None):
                reason = f"{why} {reason}" if reason else None
        rollbacks = [step for c in others if isinstance(c, DivergenceGuard) for step in c.rollbacks]
        monitor = needed(trainer, FlopsMonitor, by=self)
        flops_per_token = pl_module.flops_per_token
        if pl_module.recurrences.varies and monitor.tokens:
            # The mean over the steps taken: fewer than planned, or a resume with other batches, change it.
            flops_per_token = monitor.flops / monitor.tokens
        return describe(
            pl_module,
            code_version=code_version(),
            status=status,
            stop_reason=reason,
            data_manifest_hash=getattr(data, "manifest_hash", None),
            tokenizer=getattr(data, "tokenizer_name", None),
            unique_tokens=getattr(data, "unique_tokens", None),
            steps=steps,
            steps_planned=planned,
            tokens=monitor.tokens,
            tokens_target=pl_module.plan.tokens,
            flops_per_token=flops_per_token,
            training_flops=monitor.flops,
            flops_budget=pl_module.plan.flops_budget,
            **self._validation,
            wall_seconds=monitor.wall_seconds,
            hardware=hardware(trainer.strategy.root_device),
            precision=str(trainer.precision),
            world_size=trainer.world_size,
            rollbacks=len(rollbacks),
        )


def code_version() -> str:
    """Version of the package and, in a git checkout, its commit (with `+` if files differ from it)."""
    root = Path(looped_lm.__file__).resolve().parent.parent
    describe = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    commit = ""
    with suppress(OSError, subprocess.CalledProcessError):
        if (root / ".git").exists():
            commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout
    return f"{looped_lm.__version__} {commit}".strip()
