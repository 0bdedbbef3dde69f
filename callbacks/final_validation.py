"""Validations of a training run: which ones count, and the last one, over all held-out rows."""

from __future__ import annotations

from typing import Any

import lightning as L

from looped_lm.runs.lightning_internals import reload_validation_data


class FinalValidation(L.Callback):
    """After the last step, validates over the data module's full validation rows, not its fast subset."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._use_all_rows(trainer, False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The module makes up for a final validation that the run stopped before.
        if is_over(trainer):
            self._use_all_rows(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if is_over(trainer):
            # Lightning validates once more when it is told to stop.
            trainer.should_stop = True
            self._use_all_rows(trainer)

    @staticmethod
    def _use_all_rows(trainer: L.Trainer, all_rows: bool = True) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if hasattr(data, "full_validation"):
            data.full_validation = all_rows
            reload_validation_data(trainer)


def in_training(trainer: L.Trainer) -> bool:
    """Whether the trainer is in `fit` and not in Lightning's sanity check before it."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def is_over(trainer: L.Trainer) -> bool:
    """Whether no further step follows: the last one is done, or the run is told to stop."""
    return trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step
