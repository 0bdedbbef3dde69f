"""Stops a run at the end of an optimizer step when a signal asks for it."""

from __future__ import annotations

import math
import os
import signal
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from callbacks.final_validation import in_training
from looped_lm import LoopedLM
from looped_lm.runs import lightning_internals as internals
from looped_lm.runs.preemption import SIGNALS, Preempted, answered


class Preemption(L.Callback):
    """On SIGTERM, SIGINT, SIGUSR1 or SIGUSR2, saves a checkpoint at the end of the step and raises `Preempted`.

    Handlers only set a flag; all ranks agree on it once per optimizer step, on the host. A validation that is due is
    left to the resumed run (see FinalValidation), and one that is running is broken off. A second SIGINT ends the
    process at once. The command line turns `Preempted` into its exit status and asks SLURM to run the job again.

    Lightning's own reactions, a broadcast at every micro-batch and a stop within a step, are switched off meanwhile.
    """

    def __init__(self) -> None:
        self._received = self._agreed = 0
        self._checkpoint: str | None = None
        self._answering = ExitStack()
        self._started_at = 0
        self._group: Any = None
        self._common_val_batches = 0.0

    @property
    def reason(self) -> str | None:
        """Why the run stops, once the ranks have agreed on it."""
        return f"preempted by {signal.Signals(self._agreed).name}" if self._agreed else None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # Last in the list, so that a checkpoint at the step's end holds what all others have counted by then.
        trainer.callbacks = [c for c in trainer.callbacks if c is not self] + [self]  # type: ignore[attr-defined]
        self._received, self._agreed, self._checkpoint = 0, 0, None
        environment = internals.cluster_environment(trainer)
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        internals.leave_signals_alone(trainer)
        self._started_at = trainer.global_step
        if trainer.world_size > 1:
            # On the host: a collective on devices would wait for everything that is queued there.
            self._group = dist.new_group(backend="gloo")
        self._answering.enter_context(answered(SIGNALS, self._note))
        if internals.take_sigterm(trainer):
            # It came since Lightning's handlers were installed, a moment ago.
            self._received = signal.SIGTERM
        if self._agree():
            raise self._preempted(trainer)

    def _note(self, signum: int) -> None:
        self._received = self._received or signum
        again = "; once more ends it at once, without" if signum == signal.SIGINT else ""
        if again:
            signal.signal(signum, signal.SIG_DFL)
        # Unlike print, a plain write is allowed in a handler.
        os.write(2, f"\n{signal.Signals(signum).name}: saving at the end of this step{again}.\n".encode())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._answering.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.on_train_end(trainer, pl_module)

    def _agree(self) -> bool:
        """Whether any rank has received a signal; all ranks must call this at the same places."""
        self._agreed = self._received
        if self._group is not None:
            flag = torch.tensor([self._received])
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
            self._agreed = int(flag)
        return bool(self._agreed)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.ends_step(batch_idx) and self._agree():
            self._save(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        # Not right after saving: Lightning logs the step's metrics only then.
        if self._agreed:
            raise self._preempted(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not in_training(trainer):
            return
        if self._agreed:
            raise self._preempted(trainer)
        self._common_val_batches = float(sum(trainer.num_val_batches))
        if self._group is not None:
            # Ranks may have to read one batch more or less.
            batches = torch.tensor([self._common_val_batches], dtype=torch.float64)
            dist.all_reduce(batches, dist.ReduceOp.MIN, group=self._group)
            # Loaders without a length may end anywhere, and ranks could then wait for each other for ever.
            self._common_val_batches = float(batches) if math.isfinite(batches) else 0.0

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if not in_training(trainer) or batch_idx >= self._common_val_batches:
            return
        if self._agree():
            self._save(trainer)
            raise self._preempted(trainer)

    def _preempted(self, trainer: L.Trainer) -> Preempted:
        checkpoint = self._checkpoint or (str(trainer.ckpt_path) if trainer.ckpt_path else None)
        step = trainer.global_step if checkpoint else None
        return Preempted(self._agreed, step, checkpoint, trainer.global_rank)

    def _save(self, trainer: L.Trainer) -> None:
        nothing_new = trainer.ckpt_path and trainer.global_step == self._started_at
        if trainer.fast_dev_run or nothing_new:  # type: ignore[attr-defined]
            return
        savers = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        saved = [path for path in [internals.save_now(saver, trainer) for saver in savers] if path]
        if not saved:
            # No callback saves checkpoints, or each keeps those that it has.
            folder = next((c.dirpath for c in savers if c.dirpath), trainer.default_root_dir)
            saved = [os.path.join(folder, f"preempted-step={trainer.global_step:06d}.ckpt")]
            trainer.save_checkpoint(saved[0])
        for logger in trainer.loggers:
            logger.save()
        self._checkpoint = str(saved[0])
