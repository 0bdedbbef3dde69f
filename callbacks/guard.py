"""Stops a run that diverged."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from looped_lm import LoopedLM


class DivergenceGuard(L.Callback):
    """Stops when the logged training loss, reduced over ranks, or the validation loss is not finite.

    Checked at logging steps, where the loss comes to the host anyway; every rank sees the same value and stops. The
    checkpoints before it stay; the run record says `diverged`.

    Raises:
        FloatingPointError: naming loss and step.
    """

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        # The module logs the loss after this callback's on_train_batch_end; it is seen at the next batch.
        self._check(trainer, "train/loss")

    def on_validation_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:  # type: ignore[override]
        self._check(trainer, "train/loss")
        self._check(trainer, "val/loss")

    def _check(self, trainer: L.Trainer, name: str) -> None:
        loss = trainer.callback_metrics.get(name)
        if loss is None or bool(torch.isfinite(loss)):
            return
        kept = getattr(trainer.checkpoint_callback, "best_model_path", "") or "none was written yet"
        raise FloatingPointError(
            f"{name} is {float(loss)} at step {trainer.global_step}: training diverged and stops. Last checkpoint: "
            f"{kept}. Lower the learning rates (model.transfer) or look at the data, and resume with --ckpt_path."
        )
