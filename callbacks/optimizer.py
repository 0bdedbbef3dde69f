"""What the optimizer does, by role: learning rates, norms of gradients and of updates."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from callbacks.telemetry import Telemetry, Values
from looped_lm import LoopedLM


class LearningRates(Telemetry):
    """Writes `lr/<role>` to the loggers: the rate that the last optimizer step used."""

    # Lightning's LearningRateMonitor writes at every micro-batch, under the number of the previous step, keeps all
    # rates and refuses to run without a logger.
    shown = {"optimizer": {"learning rates": ["lr/.+"]}}

    def before_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Optimizer) -> Values:
        return {f"lr/{group['role']}": float(group["lr"]) for group in optimizer.param_groups}


class GradientNorm(Telemetry):
    """Logs `grad/norm` and writes `grad/norm_<role>` for every optimizer role, at logging steps only.

    The gradient is accumulated over micro-batches, reduced over ranks, and not yet clipped.
    """

    shown = {"optimizer": {"gradient norms": ["grad/norm(_.+)?"]}}

    def before_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Optimizer) -> Values:
        norms = {
            f"grad/norm_{role}": norm([p.grad for p in parameters if p.grad is not None])
            for role, parameters in parameters_by_role(optimizer).items()
        }
        pl_module.log("grad/norm", torch.linalg.vector_norm(torch.stack(list(norms.values()))))
        return norms


class UpdateNorms(Telemetry):
    """Writes `update/norm_<role>` = ‖ΔW‖ and `update/relative_<role>` = ‖ΔW‖/‖W‖, W before the step.

    At logging steps only, on rank zero, for any optimizer. A second copy of the parameters exists from the end of the
    backward pass to the end of the optimizer step, when no activations are held.
    """

    shown = {
        "optimizer": {"update norms": ["update/norm_.+"], "relative update norms": ["update/relative_.+"]}
    }

    def __init__(self) -> None:
        self._before: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def before_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Optimizer) -> Values:
        if self.is_wanted(trainer, pl_module):
            for role, parameters in parameters_by_role(optimizer).items():
                self._before[role] = (parameters, [p.detach().clone() for p in parameters])
        return {}

    def after_step(self, trainer: L.Trainer, pl_module: LoopedLM) -> Values:
        values: dict[str, Tensor] = {}
        for role, (parameters, before) in self._before.items():
            size = norm(before)
            torch._foreach_sub_(before, [p.detach() for p in parameters])
            update = norm(before)
            values |= {f"update/norm_{role}": update, f"update/relative_{role}": update / size}
        self._before = {}
        return values


def parameters_by_role(optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Parameters that have a gradient, by the `role` of their group."""
    roles: dict[str, list[Tensor]] = {}
    for group in optimizer.param_groups:
        with_gradient = [p for p in group["params"] if p.grad is not None]
        if with_gradient:
            roles.setdefault(group["role"], []).extend(with_gradient)
    return roles


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all entries together, as a tensor () on their device; at least in fp32."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(tensors), 2, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(norms))
