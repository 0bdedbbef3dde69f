"""Progress of the run in optimizer steps."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from callbacks.flops import FlopsMonitor
from callbacks.telemetry import needed
from looped_lm import LoopedLM
from looped_lm.runs.lightning_internals import validation_progress


class StepProgressBar(TQDMProgressBar):
    """Optimizer steps done out of those planned, with the last losses, tokens/s and share of the FLOPs.

    Args:
        refresh_rate: optimizer steps between updates of the line; 0 shows nothing.
    """

    #: So LoopedLM logs without `prog_bar=True`, with which Lightning fetches losses at every micro-batch.
    fetches_losses = True

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)
        self._planned_flops = 0.0
        self._losses: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        super().on_train_start(trainer, pl_module)
        self._monitor = needed(trainer, FlopsMonitor, by=self)
        self._tokens_before = self._monitor.tokens
        self._planned_flops = trainer.max_steps * pl_module.batch_tokens * pl_module.flops_per_token
        # Here, not at the epoch's start, which Lightning leaves out after a resume.
        self.train_progress_bar.reset(trainer.max_steps)
        self.train_progress_bar.initial = trainer.global_step
        self.train_progress_bar.set_description("training")

    def init_validation_tqdm(self) -> Tqdm:
        # A second line would break up the first one if the output is not a terminal.
        bar = super().init_validation_tqdm()
        if self.trainer.state.fn == "fit":
            bar.disable = True
        return bar

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_validation_batch_end(trainer, *args, **kwargs)
        if trainer.state.fn == "fit" and not self.is_disabled:
            done, total = validation_progress(trainer)
            told = "training" if done >= total else f"validating {done}/{total}"
            self.train_progress_bar.set_description(told)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._fetch_losses(trainer)

    def _fetch_losses(self, trainer: L.Trainer) -> None:
        if not self.is_disabled:
            for key in ("train/loss", "val/loss"):
                if key in trainer.callback_metrics:
                    self._losses[key] = f"{float(trainer.callback_metrics[key]):.4f}"

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """The bar counts the run, not epochs."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        bar: Tqdm = self.train_progress_bar
        step = trainer.global_step
        if self.is_disabled or bar.disable or not pl_module.ends_step(batch_idx):
            return
        if pl_module.logs_step(step):
            self._fetch_losses(trainer)
        if step % self.refresh_rate and step != bar.total:
            return
        bar.n = step
        elapsed = bar.format_dict["elapsed"]
        values = dict(self._losses)
        values["tok/s"] = f"{(self._monitor.tokens - self._tokens_before) / max(elapsed, 1e-9):,.0f}"
        values["FLOPs"] = f"{self._monitor.flops:.3g} ({self._monitor.flops / self._planned_flops:.0%})"
        bar.set_postfix(values, refresh=False)
        bar.refresh()
