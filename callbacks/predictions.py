"""What `predict` found, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from looped_lm import LoopedLM
from looped_lm.common.writing import failing_with


class PredictionWriter(BasePredictionWriter):
    """Writes the loss of every token (nats) as JSON lines, one per row, into the run's log folder.

    Each line holds `loss` (mean over the row), `token_losses` and the `recurrences` that they were computed with.
    Every process writes its own file.

    Raises:
        UserError: the file is there already, or cannot be written.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="batch")
        self._rows = 0

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        suffix = "" if trainer.world_size == 1 else f"-rank{trainer.global_rank}"
        self._path = folder / f"predictions{suffix}.jsonl"
        with failing_with("Name another folder with the logger's save_dir, or make room.", self._path):
            folder.mkdir(parents=True, exist_ok=True)
            # "x", and before any work: results of an earlier call are never overwritten.
            self._file = self._path.open("x")
        self._rows = 0

    def write_on_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, prediction: Tensor, *_: Any
    ) -> None:
        for row in prediction.float().cpu():
            losses = {"loss": float(row.mean()), "token_losses": row.tolist()}
            self._file.write(json.dumps({"recurrences": pl_module.eval_recurrences, **losses}) + "\n")
            self._rows += 1

    def on_predict_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        self._file.close()
        r = pl_module.eval_recurrences
        print(f"\nloss of every token of {self._rows:,} rows with {r} recurrences: {self._path}")
