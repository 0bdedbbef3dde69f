"""Learning rate of every optimizer role."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from looped_lm import LoopedLM


class LearningRates(L.Callback):
    """Logs `lr/<role>`: the rate that the last optimizer step used."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Any) -> None:
        if pl_module.logs_step(trainer.global_step + 1):
            # Tensors on the host: Lightning would copy plain numbers to the device, and fetch them back.
            pl_module.log_dict(
                {
                    f"lr/{group['role']}": torch.tensor(float(group["lr"]), dtype=torch.float64)
                    for group in optimizer.param_groups
                }
            )
