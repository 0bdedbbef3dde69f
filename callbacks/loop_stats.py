"""What the recurrences do to the state and contribute to the gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from callbacks.telemetry import Charts, Telemetry, Values
from looped_lm import LoopedLM
from looped_lm.common.errors import UserError


class LoopStats(Telemetry):
    """Writes how the state develops over the recurrences, and how the lanes mix it, at logging steps.

    With s the state after recurrence i (all lanes of it) and s' the one after recurrence i-1:

    - `loop/state_norm_<i>`: root mean square of s;
    - `loop/change_<i>`, i >= 1: ‖s - s'‖ / ‖s'‖;
    - `loop/cosine_<i>`, i >= 1: cosine of the angle between s and s', each taken as one long vector;
    - `loop/mixing_<i>`: largest singular value of the lanes' mixing matrix M_i, if lanes have such matrices
      (`Lanes.mixing_matrices`): products of values above 1 let the lanes grow without bound.

    Values come from the first rows of the step's last micro-batch, on rank zero, for the recurrences that ran; only
    these rows are copied.

    Args:
        rows: how many rows of the micro-batch to look at; each has T·d numbers per lane.

    Raises:
        UserError: fewer than one row.
    """

    def __init__(self, rows: int = 1) -> None:
        if rows < 1:
            raise UserError(f"rows is {rows}; LoopStats needs at least 1 row of the micro-batch.")
        self.rows = rows
        self._seen: dict[str, Tensor] = {}
        self._previous: tuple[Tensor, Tensor] | None = None

    def charts(self, trainer: L.Trainer, pl_module: LoopedLM) -> Charts:
        """What is written, for `TensorBoardLayout`."""
        charts = {"state norm": "state_norm"}
        if max(pl_module.drawn) > 1:
            charts |= {"relative change of the state": "change", "cosine to the state before": "cosine"}
        if pl_module.model.lanes.mixing_matrices() is not None:
            charts["largest singular value of the mixing"] = "mixing"
        return {"recurrences": {title: [rf"loop/{name}_\d+"] for title, name in charts.items()}}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: LoopedLM, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.ends_step(batch_idx) and self.is_wanted(trainer, pl_module):
            self._seen, self._previous = {}, None
            pl_module.model.observer = self._observe

    def on_before_backward(self, trainer: L.Trainer, pl_module: LoopedLM, loss: Tensor) -> None:
        # Before it: recurrences that are computed again in the backward pass must not be counted twice.
        pl_module.model.observer = None
        self._previous = None

    @torch.no_grad()
    def _observe(self, i: int, state: Any) -> None:
        sample = self._sample(state)
        if sample is None:
            return
        size = torch.linalg.vector_norm(sample)
        self._seen[f"loop/state_norm_{i}"] = size / sample.numel() ** 0.5
        before, self._previous = self._previous, (sample, size)
        # A state may grow with the recurrences; then the two cannot be compared.
        if before is not None and before[0].shape == sample.shape:
            previous, its_size = before
            self._seen[f"loop/cosine_{i}"] = torch.dot(sample, previous) / (size * its_size)
            self._seen[f"loop/change_{i}"] = torch.linalg.vector_norm(sample - previous) / its_size

    def _sample(self, state: Any) -> Tensor | None:
        """The first rows of all tensors (..,B,T,d) of a state, as one vector of at least fp32."""
        leaves = [t for t in tree_leaves(state) if isinstance(t, Tensor) and t.is_floating_point()]
        rows = [t.narrow(-3, 0, min(self.rows, t.shape[-3])) if t.dim() >= 3 else t for t in leaves]
        wide = [t.reshape(-1).to(torch.promote_types(t.dtype, torch.float32)) for t in rows]
        # Concatenation copies, so the state itself is not kept.
        return torch.cat(wide) if wide else None

    def after_step(self, trainer: L.Trainer, pl_module: LoopedLM) -> Values:
        if not self._seen:
            return {}
        values: dict[str, Tensor | float] = {**self._seen}
        self._seen = {}
        with torch.no_grad():
            mixing = pl_module.model.lanes.mixing_matrices()
        if mixing is not None:
            # On the host: the decomposition would wait for an accelerator more than once.
            for i, matrix in enumerate(mixing.double().cpu().numpy()):
                values[f"loop/mixing_{i}"] = largest_singular_value(matrix)
        return values


class GradientShare(Telemetry):
    """Writes `loop/grad_share_<i>`, the share of recurrence i in the gradient, at logging steps.

    With y_i the block's normalised output in recurrence i, which the lanes take in, and L the loss of the step:
    share_i = ‖∂L/∂y_i‖ / sum_j ‖∂L/∂y_j‖. ∂L/∂y_i is all of the gradient that reaches the block's parameters through
    recurrence i. All outputs have the scale of the norm's weight, so the shares compare. They sum to 1, with 0 for
    recurrences that run forward only (truncated BPTT). The parameters' own gradients per recurrence would take a
    backward pass each.

    Norms are over the tokens of all micro-batches of the step, on rank zero, for the recurrences that ran.
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

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: LoopedLM, *_: Any) -> None:
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
        # Emptied, since a run that goes back reaches the same step again.
        squares, self._squares = self._squares, []
        reached = [s for s in squares if s is not None]
        if not reached:
            return {}
        norms = torch.stack(reached).sqrt()
        shares = iter(norms / norms.sum())
        return {
            f"loop/grad_share_{i}": 0.0 if square is None else next(shares)
            for i, square in enumerate(squares)
        }


def largest_singular_value(matrix: np.ndarray) -> float:
    """Largest singular value of a matrix (K,K) on the host; NaN if an entry is not finite."""
    if not np.isfinite(matrix).all():
        return float("nan")
    return float(np.linalg.norm(matrix, ord=2))
