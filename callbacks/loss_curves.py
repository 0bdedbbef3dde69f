"""Losses against tokens and FLOPs."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks.final_validation import in_training
from callbacks.flops import FlopsMonitor
from callbacks.telemetry import Telemetry, Values, add_point, needed, write_scalars
from looped_lm import LoopedLM
from looped_lm.common.errors import UserError

#: FLOPs in one unit of `by_mflops/`: TensorBoard's 64 bits are too few for FLOPs. Every optimizer step takes more than
#: one unit, so this axis runs ahead of the steps.
AXIS_FLOPS = 1e6
#: Points of a curve that a checkpoint keeps: as many as TensorBoard draws.
KEPT_POINTS = 1000

Point = tuple[float, float, float]


class LossCurves(Telemetry):
    """Writes losses against what they cost: tokens, and training FLOPs (convention `paper`).

    In TensorBoard, whose x axis is the step, `by_tokens/(train|val)_loss` have tokens instead of steps, and
    `by_mflops/(train|val)_loss` rounded units of 1e6 FLOPs. Loggers that keep rows (CSV, W&B and others) get
    `by_cost/(train|val)_loss` under the step as usual, in one row with `by_cost/tokens` and `by_cost/flops`.

    A resumed run writes its curves again: readers of TensorBoard's files drop what is beyond the step of the resume.

    Raises:
        UserError: no `FlopsMonitor`, which does the counting, comes before it in the list of callbacks.
    """

    shown = {
        "loss": {
            "loss by tokens": ["by_tokens/(train|val)_loss"],
            "loss by MFLOPs": ["by_mflops/(train|val)_loss"],
        }
    }

    def __init__(self) -> None:
        self._points: dict[str, list[Point]] = {"train": [], "val": []}
        self._resumed = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        order = trainer.callbacks  # type: ignore[attr-defined]
        self._monitor = needed(trainer, FlopsMonitor, by=self)
        if order.index(self._monitor) > order.index(self):
            raise UserError(
                "callbacks.LossCurves comes before callbacks.FlopsMonitor in trainer.callbacks and would see the "
                "tokens of the previous micro-batch: put it after."
            )

    def state_dict(self) -> dict[str, Any]:
        return {name: torch.tensor(points, dtype=torch.float64) for name, points in self._points.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._points = {name: [tuple(p) for p in state_dict[name].tolist()] for name in self._points}
        self._resumed = True

    def on_train_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if not self._resumed:
            self._points = {"train": [], "val": []}
        for name, points in self._points.items():
            for point in points:
                _draw(trainer, name, point)
        self._resumed = False

    def after_step(self, trainer: L.Trainer, pl_module: LoopedLM) -> Values:
        if trainer.loggers and "train/loss" in trainer.callback_metrics:
            self._write(trainer, "train", float(trainer.callback_metrics["train/loss"]))
        return {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if in_training(trainer) and trainer.loggers:
            assert pl_module.evaluated is not None
            self._write(trainer, "val", pl_module.evaluated[0])

    def _write(self, trainer: L.Trainer, name: str, loss: float) -> None:
        tokens, flops = self._monitor.tokens, self._monitor.flops
        add_point(self._points[name], (tokens, flops, loss), KEPT_POINTS)
        _draw(trainer, name, (tokens, flops, loss))
        row = {f"by_cost/{name}_loss": loss, "by_cost/tokens": float(tokens), "by_cost/flops": flops}
        write_scalars(trainer, row, to=[x for x in trainer.loggers if not isinstance(x, TensorBoardLogger)])


def _draw(trainer: L.Trainer, name: str, point: Point) -> None:
    """Hand a point to TensorBoard; its logger writes on rank zero only."""
    tokens, flops, loss = point
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_metrics({f"by_tokens/{name}_loss": loss}, step=round(tokens))
            logger.log_metrics({f"by_mflops/{name}_loss": loss}, step=round(flops / AXIS_FLOPS))
