"""What happens to the state from one recurrence to the next."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from looped_lm import LoopedLM


class LoopStats(L.Callback):
    """Logs `loop/state_norm_<i>`: root mean square of the state after recurrence i, at logging steps.

    With lanes the state holds all lanes. It is taken from the last micro-batch of the step on rank zero.
    """

    def __init__(self) -> None:
        self._norms: dict[int, Tensor] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: LoopedLM, batch: Any, batch_idx: int
    ) -> None:
        wanted = pl_module.ends_step(batch_idx) and pl_module.logs_step(trainer.global_step + 1)
        pl_module.model.observer = self._observe if wanted else None

    def _observe(self, i: int, state: Any) -> None:
        # Lanes may carry their state in any form that holds tensors.
        leaves = [t.detach() for t in tree_leaves(state) if isinstance(t, Tensor)]
        squares = [t.square().sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in leaves]
        self._norms[i] = (torch.stack(squares).sum() / sum(t.numel() for t in leaves)).sqrt()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._norms:
            pl_module.log_dict({f"loop/state_norm_{i}": norm for i, norm in self._norms.items()})
        self._norms = {}
        pl_module.model.observer = None
