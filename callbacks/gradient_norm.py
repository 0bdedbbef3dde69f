"""Norm of the gradient that the optimizer sees."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from looped_lm import LoopedLM


class GradientNorm(L.Callback):
    """Logs `grad/norm`, after reduction over ranks and accumulation, at logging steps only and without host sync."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Any) -> None:
        if not pl_module.logs_step(trainer.global_step + 1):
            return
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        norms = torch._foreach_norm(gradients)
        pl_module.log("grad/norm", torch.stack(norms).norm())
