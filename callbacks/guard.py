"""Stops a run that diverged."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from looped_lm import LoopedLM


class DivergenceGuard(L.Callback):
    """Stops when the logged training loss, reduced over ranks, or the validation loss is not finite.

    Losses are checked where they come to the host anyway; every rank sees the same value and stops. Checkpoints are
    written after this check, and never with weights that are not finite, so the last one is good; the run record says
    `diverged`.

    Raises:
        FloatingPointError: naming loss and step.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.ends_step(batch_idx) and pl_module.logs_step(trainer.global_step):
            self._check(trainer, "train/loss")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._check(trainer, "val/loss")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for name, p in pl_module.named_parameters():
            if not bool(torch.isfinite(p).all()):
                self._stop(trainer, f"{name} is not finite")

    def _check(self, trainer: L.Trainer, name: str) -> None:
        loss = trainer.callback_metrics.get(name)
        if loss is not None and not bool(torch.isfinite(loss)):
            self._stop(trainer, f"{name} is {float(loss)}")

    def _stop(self, trainer: L.Trainer, what: str) -> None:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        kept = f"Checkpoints from before it are in {folder}. " if folder else ""
        raise FloatingPointError(
            f"{what} at step {trainer.global_step}: training diverged and stops. {kept}Lower the learning rates "
            "(model.transfer) or look at the data, and resume with --ckpt_path."
        )
