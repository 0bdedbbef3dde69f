"""What `predict` found, as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor


class PredictionWriter(BasePredictionWriter):
    """Writes the loss of every token (nats) as JSON lines, one row of the data each, into the run's log folder.

    Each line holds `loss` (mean over the row) and `token_losses`. Every process writes a file of its own.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="batch")
        self._rows = 0

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if trainer.world_size == 1 else f"-rank{trainer.global_rank}"
        self._path = folder / f"predictions{suffix}.jsonl"
        # "x", and before any work: a result of an earlier call is never overwritten.
        self._file = self._path.open("x")
        self._rows = 0

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Tensor,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        for row in prediction.float().cpu():
            self._file.write(json.dumps({"loss": float(row.mean()), "token_losses": row.tolist()}) + "\n")
            self._rows += 1

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._file.close()
        print(f"\nloss of every token of {self._rows:,} rows: {self._path}")
