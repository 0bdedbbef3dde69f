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
        self._lines: list[str] = []

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
            self._lines.append(json.dumps({"loss": float(row.mean()), "token_losses": row.tolist()}))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if trainer.world_size == 1 else f"-rank{trainer.global_rank}"
        path = folder / f"predictions{suffix}.jsonl"
        # "x": a result of an earlier call is never overwritten.
        with path.open("x") as file:
            file.write("\n".join(self._lines) + "\n")
        print(f"\nloss of every token of {len(self._lines):,} rows: {path}")
        self._lines = []
