"""Which recurrences the gradient comes from."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from callbacks.telemetry import Telemetry, Values
from looped_lm import LoopedLM


class GradientShare(Telemetry):
    """Writes `loop/grad_share_<i>`, the share of recurrence i in the gradient, to the loggers at logging steps.

    With y_i the block's normalised output in recurrence i, which the lanes take in, and L the loss of the step:
    share_i = ‖∂L/∂y_i‖ / sum_j ‖∂L/∂y_j‖. ∂L/∂y_i is all of the gradient that reaches the block's parameters by way of
    recurrence i; the outputs of all recurrences have the same scale, that of the norm's weight, so these gradients
    compare. Recurrences that run forward only (truncated BPTT) have the share 0; shares sum to 1. It is not the
    norm of the parameters' own gradient per recurrence, which would take a backward pass for each.

    Norms are over the tokens of all micro-batches of the step, on rank zero. A recurrence that did not run is not
    logged. Nothing waits for the device before the step has ended.
    """

    shown = {"recurrences": {"share of the gradient": [r"loop/grad_share_\d+"]}}

    def __init__(self) -> None:
        self._step: int | None = None
        self._wanted = False
        self._ran = 0
        self._handle: RemovableHandle | None = None
        #: ‖∂L/∂y_i‖² so far; None: no gradient has come to recurrence i.
        self._squares: list[Tensor | None] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        self._step = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: LoopedLM, batch: Any, batch_idx: int
    ) -> None:
        if self._step != trainer.global_step:
            self._step, self._squares = trainer.global_step, []
            self._wanted = self.is_wanted(trainer, pl_module)
        if self._wanted:
            self._ran = 0
            self._handle = pl_module.model.norm_recur.register_forward_hook(self._watch)

    def on_before_backward(self, trainer: L.Trainer, pl_module: LoopedLM, loss: Tensor) -> None:
        # Before it: recurrences that are computed again in the backward pass must not be counted twice.
        self._release()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _watch(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        i, self._ran = self._ran, self._ran + 1
        if i == len(self._squares):
            self._squares.append(None)
        if output.requires_grad:
            output.register_hook(partial(self._add, i))

    @torch.no_grad()
    def _add(self, i: int, gradient: Tensor) -> None:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        square = torch.linalg.vector_norm(gradient, dtype=dtype).square()
        before = self._squares[i]
        self._squares[i] = square if before is None else before + square

    def after_step(self, trainer: L.Trainer, pl_module: LoopedLM) -> Values:
        reached = [s for s in self._squares if s is not None]
        if not reached:
            return {}
        norms = torch.stack(reached).sqrt()
        shares = iter(norms / norms.sum())
        return {
            f"loop/grad_share_{i}": 0.0 if square is None else next(shares)
            for i, square in enumerate(self._squares)
        }
