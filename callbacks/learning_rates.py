"""Learning rate of every optimizer role."""

from __future__ import annotations

from typing import Any

import lightning as L

from callbacks.layout import Charts
from callbacks.scalars import write_scalars
from looped_lm import LoopedLM


class LearningRates(L.Callback):
    """Writes `lr/<role>` to the loggers: the rate that the last optimizer step used."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def charts(self, trainer: L.Trainer, pl_module: LoopedLM) -> Charts:
        """What is written, for `TensorBoardLayout`."""
        return {"optimizer": {"learning rates": ["lr/.+"]}}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Any) -> None:
        self._rates = {}
        if pl_module.logs_step(trainer.global_step + 1):
            self._rates = {f"lr/{group['role']}": float(group["lr"]) for group in optimizer.param_groups}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        write_scalars(trainer, self._rates)
        self._rates = {}
