"""How far an optimizer step moves the parameters of every role."""

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


class UpdateNorms(L.Callback):
    """Writes `update/norm_<role>` = ‖ΔW‖ and `update/relative_<role>` = ‖ΔW‖/‖W‖ to the loggers, W before the step.

    At logging steps only, on rank zero. It works for any optimizer, since it compares parameters before and
    after the step: at a logging step a second copy of them lives from the end of the backward pass to the end of the
    optimizer step, where no activations are held.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def charts(self, trainer: L.Trainer, pl_module: LoopedLM) -> Charts:
        """What is written, for `TensorBoardLayout`."""
        charts = {"update norms": ["update/norm_.+"], "relative update norms": ["update/relative_.+"]}
        return {"optimizer": charts}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Optimizer) -> None:
        self._before = {}
        wanted = trainer.loggers and trainer.is_global_zero
        if wanted and pl_module.logs_step(trainer.global_step + 1):
            for role, parameters in parameters_by_role(optimizer).items():
                self._before[role] = (parameters, [p.detach().clone() for p in parameters])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        values: dict[str, Tensor] = {}
        for role, (parameters, before) in self._before.items():
            size = norm(before)
            torch._foreach_sub_(before, [p.detach() for p in parameters])
            update = norm(before)
            values |= {f"update/norm_{role}": update, f"update/relative_{role}": update / size}
        self._before = {}
        write_scalars(trainer, values)
