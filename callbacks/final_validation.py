"""A validation over all held-out rows at the end of training."""

from __future__ import annotations

from typing import Any

import lightning as L

from callbacks.validating import is_over
from looped_lm import LoopedLM


class FinalValidation(L.Callback):
    """When the last step is done, validates over the data module's full validation rows instead of its fast subset."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if hasattr(trainer.datamodule, "full_validation"):  # type: ignore[attr-defined]
            trainer.datamodule.full_validation = False  # type: ignore[attr-defined]

    def on_train_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        """A run that stopped before its final validation has just that left; the module makes up for it."""
        if pl_module.due_validation.only_final_left:
            pl_module.due_validation.restore_limit(trainer)
            self._use_all_rows(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not is_over(trainer):
            return
        # Lightning validates once more when it is told to stop.
        trainer.should_stop = True
        self._use_all_rows(trainer)

    @staticmethod
    def _use_all_rows(trainer: L.Trainer) -> None:
        if hasattr(trainer.datamodule, "full_validation"):  # type: ignore[attr-defined]
            trainer.datamodule.full_validation = True  # type: ignore[attr-defined]
            # It keeps the loader of the first validation otherwise.
            trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
