"""Norm of the gradient of an optimizer step."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from callbacks.layout import Charts
from callbacks.norms import norm, parameters_by_role
from callbacks.scalars import write_scalars
from looped_lm import LoopedLM


class GradientNorm(L.Callback):
    """Logs `grad/norm` and writes `grad/norm_<role>` for every optimizer role to the loggers, at logging steps only.

    The gradient is accumulated over micro-batches and reduced over ranks: the one that the optimizer gets, before
    `trainer.gradient_clip_val` cuts it, where that is set. Nothing waits for the device before the step has ended.
    """

    def __init__(self) -> None:
        self._norms: dict[str, Tensor] = {}

    def charts(self, trainer: L.Trainer, pl_module: LoopedLM) -> Charts:
        """What is written, for `TensorBoardLayout`."""
        return {"optimizer": {"gradient norms": ["grad/norm(_.+)?"]}}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Optimizer) -> None:
        self._norms = {}
        if not pl_module.logs_step(trainer.global_step + 1):
            return
        for role, parameters in parameters_by_role(optimizer).items():
            self._norms[f"grad/norm_{role}"] = norm([p.grad for p in parameters if p.grad is not None])
        pl_module.log("grad/norm", torch.linalg.vector_norm(torch.stack(list(self._norms.values()))))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        write_scalars(trainer, self._norms)
        self._norms = {}
