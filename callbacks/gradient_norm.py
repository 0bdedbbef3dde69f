"""Norm of the gradient that the optimizer sees."""

from __future__ import annotations

import lightning as L
import torch
from torch.optim import Optimizer

from callbacks.norms import norm, parameters_by_role
from looped_lm import LoopedLM


class GradientNorm(L.Callback):
    """Logs `grad/norm` and, for every optimizer role, `grad/norm_<role>`, at logging steps only and without host sync.

    The gradient is the one that the optimizer gets: accumulated over micro-batches and reduced over ranks.
    """

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Optimizer) -> None:
        if not pl_module.logs_step(trainer.global_step + 1):
            return
        norms = {
            role: norm([p.grad for p in parameters if p.grad is not None])
            for role, parameters in parameters_by_role(optimizer).items()
        }
        pl_module.log("grad/norm", torch.linalg.vector_norm(torch.stack(list(norms.values()))))
        pl_module.log_dict({f"grad/norm_{role}": value for role, value in norms.items()})
