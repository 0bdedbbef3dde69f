"""What happens to a run that diverges: it stops, or goes back and leaves out the rows that led there."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import lightning as L
import torch

from callbacks.checkpoints import Checkpoints
from callbacks.flops import FlopsMonitor
from looped_lm import FinalCrossEntropy, LoopedLM
from looped_lm.common.errors import UserError
from looped_lm.common.text import say
from looped_lm.runs.lightning_internals import take_steps_back

#: How many of the last logged training losses the median is over, and how many it needs.
MEDIAN_OF, MEDIAN_NEEDS = 50, 5


class Diverged(UserError, FloatingPointError):
    """A loss or a weight is not finite, or a loss is far above the usual; says where, and how to go on."""


class DivergenceGuard(L.Callback):
    """Stops, or goes back, when a loss is not finite or far above the usual.

    The training loss, reduced over ranks, is checked at logging steps, when it comes to the host anyway, and the
    validation loss after each validation: every rank sees the same value and does the same. Checkpoints are written
    after this check and with finite weights only, so the last one is good. If the run stops, its record says
    `diverged`.

    To go back, the run loads weights, optimizer, schedule and counters from the last checkpoint and leaves out the rows
    read since; its record counts these rollbacks. This callback belongs before `FinalValidation` in the list, so that
    it can take back even the last step.

    Args:
        max_loss_ratio: largest ratio of the training loss to the median of the last 50 logged ones (at least five);
            None: only values that are not finite count. Sampled recurrences need some room.
        max_rollbacks: how often the run goes back instead of stopping.

    Raises:
        UserError: a number out of range.
        Diverged: the run diverged and stops; the message names loss and step.
    """

    def __init__(self, max_loss_ratio: float | None = None, max_rollbacks: int = 0) -> None:
        if max_loss_ratio is not None and not max_loss_ratio > 1:
            raise UserError(f"max_loss_ratio is {max_loss_ratio}; it must be above 1, or null for none.")
        if max_rollbacks < 0:
            raise UserError(f"max_rollbacks is {max_rollbacks}; it must not be negative.")
        self.max_loss_ratio = max_loss_ratio
        self.max_rollbacks = max_rollbacks
        #: The steps from which and to which the run went back, with the reason.
        self.rollbacks: list[dict[str, Any]] = []
        self._losses: deque[float] = deque(maxlen=MEDIAN_OF)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "rollbacks": self.rollbacks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses = deque(state_dict["losses"], maxlen=MEDIAN_OF)
        self.rollbacks = list(state_dict["rollbacks"])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.ends_step(batch_idx):
            return
        fault = None
        if pl_module.logs_step(trainer.global_step) and "train/loss" in trainer.callback_metrics:
            fault = self._fault_of(float(trainer.callback_metrics["train/loss"]))
            fault = fault and fault + _objective(trainer, pl_module)
        saves = [c for c in trainer.checkpoint_callbacks if isinstance(c, Checkpoints)]
        if fault is None and self.max_rollbacks and any(c.is_due(trainer) for c in saves):
            fault = _weights_fault(pl_module)
        if fault:
            self._diverged(trainer, pl_module, fault)

    def on_validation_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        loss = trainer.callback_metrics.get("val/loss")
        if trainer.state.fn == "fit" and loss is not None and not bool(torch.isfinite(loss)):
            self._diverged(trainer, pl_module, f"val/loss is {float(loss)}", last=trainer.should_stop)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: LoopedLM, checkpoint: dict[str, Any]) -> None:
        fault = _weights_fault(pl_module)
        if fault:
            self._stop(trainer, fault)

    def _fault_of(self, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"train/loss is {loss}"
        if self.max_loss_ratio and len(self._losses) >= MEDIAN_NEEDS:
            usual = statistics.median(self._losses)
            if loss > self.max_loss_ratio * usual:
                return f"train/loss is {loss:.4g}, {loss / usual:.1f} times the usual {usual:.4g},"
        self._losses.append(loss)
        return None

    def _diverged(self, trainer: L.Trainer, pl_module: LoopedLM, what: str, last: bool = False) -> None:
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
        # In the last validation the training loop is over, and the run cannot go back.
        if len(self.rollbacks) >= self.max_rollbacks or not checkpoint or last:
            self._stop(trainer, what)
        self._go_back(trainer, pl_module, what, checkpoint)

    def _stop(self, trainer: L.Trainer, what: str) -> None:
        folder = getattr(trainer.checkpoint_callback, "dirpath", None)
        kept = f"Checkpoints from before it are in {folder}. " if folder else ""
        raise Diverged(
            f"{what} at step {trainer.global_step}: training diverged and stops. {kept}Lower the learning rates "
            "(model.transfer) or look at the data, and resume with --ckpt_path or --resume auto; max_rollbacks of "
            "callbacks.DivergenceGuard leaves out rows that cannot be trained on."
        )

    def _go_back(self, trainer: L.Trainer, pl_module: LoopedLM, what: str, path: str) -> None:
        checkpoint = trainer.strategy.load_checkpoint(path)
        step, back = trainer.global_step, checkpoint["global_step"]
        pl_module.on_load_checkpoint(checkpoint)
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        scaler = checkpoint.get(type(trainer.precision_plugin).__qualname__)
        if scaler:
            trainer.precision_plugin.load_state_dict(scaler)
        # The counters of batches stay: they say which rows come next.
        take_steps_back(trainer, checkpoint)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = checkpoint["callbacks"].get(callback.state_key)
            if isinstance(callback, FlopsMonitor) and state is not None:
                callback.go_back(state)
        self._losses = deque(checkpoint["callbacks"][self.state_key]["losses"], maxlen=MEDIAN_OF)
        # If anything asked the run to stop, it did so at a step that is taken back.
        trainer.should_stop = False
        self.rollbacks.append({"from_step": step, "to_step": back, "reason": what})
        of = f"rollback {len(self.rollbacks)} of {self.max_rollbacks}"
        on = f"going back to step {back} ({path}) and on with the rows that come next"
        say(trainer, f"{what} at step {step}: {on} ({of}).")


def _objective(trainer: L.Trainer, pl_module: LoopedLM) -> str:
    """Name of an objective other than the cross entropy, with those of its terms that are not finite, in brackets."""
    objective = type(pl_module.model.objective)
    terms = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train/")}
    bad = [f"{k} is {v}" for k, v in terms.items() if k != "train/loss" and not math.isfinite(v)]
    return "" if objective is FinalCrossEntropy else f" ({'; '.join([objective.__name__, *bad])})"


def _weights_fault(pl_module: LoopedLM) -> str | None:
    bad = (name for name, p in pl_module.named_parameters() if not bool(torch.isfinite(p).all()))
    name = next(bad, None)
    return f"{name} is not finite" if name else None
