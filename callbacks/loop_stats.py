"""What happens to the state from one recurrence to the next."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from callbacks.telemetry import Charts, Telemetry, Values
from looped_lm import LoopedLM
from looped_lm.common.errors import UserError


class LoopStats(Telemetry):
    """Writes how the state develops over the recurrences, and how the lanes mix it, to the loggers at logging steps.

    With s the state after recurrence i (all lanes of it) and s' the one after recurrence i-1:

    - `loop/state_norm_<i>`: root mean square of s;
    - `loop/change_<i>`, i >= 1: ‖s - s'‖ / ‖s'‖;
    - `loop/cosine_<i>`, i >= 1: cosine of the angle between s and s', taken as one long vector each;
    - `loop/mixing_<i>`: largest singular value of the lanes' mixing matrix M_i, where lanes have such matrices
      (`Lanes.mixing_matrices`): products of values above 1 let the lanes grow without bound.

    Values come from the first rows of the last micro-batch of the step, on rank zero: a sample of that size is copied
    per recurrence, never a whole state. A recurrence that did not run is not logged.

    Args:
        rows: rows of the micro-batch that are looked at; each has T·d numbers per lane.

    Raises:
        UserError: fewer than one row.
    """

    def __init__(self, rows: int = 1) -> None:
        if rows < 1:
            raise UserError(f"rows is {rows}; LoopStats must look at least at 1 row of the micro-batch.")
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
        # A state may grow with the recurrences; then there is nothing to compare.
        if before is not None and before[0].shape == sample.shape:
            previous, its_size = before
            self._seen[f"loop/cosine_{i}"] = torch.dot(sample, previous) / (size * its_size)
            self._seen[f"loop/change_{i}"] = torch.linalg.vector_norm(sample - previous) / its_size

    def _sample(self, state: Any) -> Tensor | None:
        """The first rows of every tensor (..,B,T,d) of a state of any form, as one vector of at least fp32."""
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
            # On the host: the decomposition of such small matrices waits for an accelerator more than once.
            for i, matrix in enumerate(mixing.double().cpu().numpy()):
                values[f"loop/mixing_{i}"] = largest_singular_value(matrix)
        return values


def largest_singular_value(matrix: np.ndarray) -> float:
    """Largest singular value of a matrix (K,K) on the host; NaN if an entry is not finite."""
    if not np.isfinite(matrix).all():
        return float("nan")
    return float(np.linalg.norm(matrix, ord=2))
