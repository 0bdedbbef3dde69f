"""Learning rate of every optimizer role."""

from __future__ import annotations

from typing import Any

import lightning as L

from looped_lm import LoopedLM


class LearningRates(L.Callback):
    """Logs `lr/<role>`: the rate that the last optimizer step used."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Any) -> None:
        if pl_module.logs_step(trainer.global_step + 1):
            pl_module.log_dict(
                {f"lr/{group['role']}": float(group["lr"]) for group in optimizer.param_groups}
            )
