"""Learning rate of every optimizer role."""

from __future__ import annotations

from typing import Any

import lightning as L

from looped_lm import LoopedLM


class LearningRates(L.Callback):
    """Logs `lr/<role>`: the rate that the last optimizer step used."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        self._rates = {f"lr/{group['role']}": float(group["lr"]) for group in optimizer.param_groups}
        self._fresh = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._fresh = False

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fresh and pl_module.logs_this_step():
            pl_module.log_dict(self._rates)
        self._fresh = False
