"""When a run's state is written, and how much of it is kept."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import torch

from callbacks.final_validation import is_over
from looped_lm import LoopedLM
from looped_lm.common.errors import UserError
from looped_lm.runs.checkpoint import Stored, in_folder
from looped_lm.runs.checkpoint_io import mend_record
from looped_lm.runs.lightning_internals import NewestCheckpoints, batches_begun, save_now


class Checkpoints(NewestCheckpoints):
    """Writes the run's state after every validation and every `every_n_steps` steps, and keeps the newest.

    An old one is removed once the new one is on disk. After a resume, those in the folder count, too, but not
    files with other names, such as another callback's.

    Args:
        keep: how many to keep; -1 keeps all. Keep at least two to have one left if the newest is damaged.
        every_n_steps: optimizer steps between checkpoints besides those after validations; None: only those.
        dirpath: folder; None: `checkpoints` in the run's folder.
        filename: pattern with the metric `step` and no other.

    Raises:
        UserError: a number out of range.
    """

    def __init__(
        self,
        keep: int = 2,
        every_n_steps: int | None = None,
        dirpath: str | None = None,
        filename: str = "{step:06d}",
    ) -> None:
        if keep != -1 and keep < 1:
            raise UserError(f"keep is {keep}; it must be at least 1, or -1 for all.")
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"every_n_steps is {every_n_steps}; it must be at least 1, or null for none.")
        super().__init__(
            dirpath, filename, monitor="step", mode="max", save_top_k=keep, save_on_train_epoch_end=False
        )
        self.every_n_steps = every_n_steps

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.ends_step(batch_idx) and self.is_due(trainer):
            save_now(self, trainer)

    def is_due(self, trainer: L.Trainer) -> bool:
        """Whether the state is written at this step's end, and not after a validation that follows it."""
        if not self.every_n_steps or trainer.global_step % self.every_n_steps or is_over(trainer):
            return False
        return batches_begun(trainer) % trainer.val_check_batch != 0  # type: ignore[operator]

    def _is_own(self, stored: Stored) -> bool:
        name = Path(self.format_checkpoint_name({"step": torch.tensor(stored.step)})).stem
        # Lightning appends a version if the name is taken.
        return re.fullmatch(rf"{re.escape(name)}(-v\d+)?", stored.path.stem) is not None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Adopt the folder's checkpoints up to the run's step, and write records that a kill left missing."""
        super().on_train_start(trainer, pl_module)
        folder = Path(str(self.dirpath))
        found: dict[str, int] = {}
        if trainer.is_global_zero and "://" not in str(self.dirpath):
            for stored in filter(self._is_own, in_folder(folder)[0]):
                found[os.path.join(str(self.dirpath), stored.path.name)] = stored.step
                mend_record(stored)
        found = trainer.strategy.broadcast(found)
        newest = [path for path, step in found.items() if step <= trainer.global_step]
        kept = newest if self.save_top_k == -1 else newest[: self.save_top_k]
        for path in newest[len(kept) :]:
            trainer.strategy.remove_checkpoint(path)
        self.best_k_models = {path: torch.tensor(found[path]) for path in kept}
        if kept:
            self.best_model_path, self.kth_best_model_path = kept[0], kept[-1]
            self.best_model_score, self.kth_value = self.best_k_models[kept[0]], self.best_k_models[kept[-1]]
