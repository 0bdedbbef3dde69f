"""Tokens, cumulative training FLOPs, speed and MFU; stops at the FLOPs budget."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.fabric.utilities.throughput import get_available_flops

from callbacks.telemetry import Charts, write_scalars
from looped_lm import LoopedLM
from looped_lm.common.errors import UserError
from looped_lm.training.devices import compute_dtype


class FlopsMonitor(L.Callback):
    """Counts what the run has cost, over all ranks and across resumes.

    FLOPs are counted in the convention `paper` (arXiv 2604.21106). Logs `cost/tokens` and `cost/flops` (cumulative),
    `speed/tokens_per_second`, `speed/flops_per_second` and, where the device's peak is known, `speed/mfu`.

    Args:
        peak_flops: peak FLOPs/s of one device for MFU; null asks Lightning's table of accelerators.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise UserError(f"peak_flops is {peak_flops}; it must be positive.")
        self.peak_flops = peak_flops
        self.tokens = 0
        self.flops = 0.0
        self._mark = (0.0, 0, 0.0)
        self._validated = False
        self._started = 0.0
        self._seconds_before = 0.0

    def charts(self, trainer: L.Trainer, pl_module: LoopedLM) -> Charts:
        """What is written, for `TensorBoardLayout`."""
        speed = {
            "tokens per second": ["speed/tokens_per_second"],
            "FLOPs per second": ["speed/flops_per_second"],
        }
        if self.peak_flops:
            speed["MFU"] = ["speed/mfu"]
        return {"speed": speed, "cost": {"tokens": ["cost/tokens"], "training FLOPs": ["cost/flops"]}}

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "flops": self.flops, "seconds": self.wall_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.go_back(state_dict)
        self._seconds_before = state_dict["seconds"]

    def go_back(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from an earlier step, while the clock of the run goes on."""
        self.tokens, self.flops = state_dict["tokens"], state_dict["flops"]
        self._restart_clock()

    @property
    def wall_seconds(self) -> float:
        """Seconds spent in fit so far, validation and earlier parts of the run included."""
        running = time.perf_counter() - self._started if self._started else 0.0
        return self._seconds_before + running

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self.tokens, self.flops, self._seconds_before = 0, 0.0, 0.0
        self._started = time.perf_counter()
        self._restart_clock()
        if self.peak_flops is None and trainer.strategy.root_device.type == "cuda":
            self.peak_flops = get_available_flops(
                trainer.strategy.root_device, compute_dtype(trainer.precision)
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = True

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self._validated:
            # Now, not at the validation's end, when other callbacks still save, draw and write texts.
            self._validated = False
            self._restart_clock()

    def _restart_clock(self) -> None:
        self._mark = (time.perf_counter(), self.tokens, self.flops)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        tokens = batch[1].numel() * trainer.world_size
        self.tokens += tokens
        ends = pl_module.ends_step(batch_idx)
        # After the micro-batch that ends a step, the count of steps has already gone up.
        self.flops += tokens / pl_module.batch_tokens * pl_module.step_flops(trainer.global_step - ends)
        if not ends:
            return
        budget = pl_module.plan.flops_budget
        # Strictly above: at exactly half a step short the plan may have rounded up.
        if budget is not None and self.flops > budget - 0.5 * pl_module.step_flops(trainer.global_step):
            trainer.should_stop = True
        if not pl_module.logs_step(trainer.global_step):
            return
        then, tokens_then, flops_then = self._mark
        seconds = time.perf_counter() - then
        flops_per_second = (self.flops - flops_then) / seconds
        values = {
            "cost/tokens": float(self.tokens),
            "cost/flops": self.flops,
            "speed/tokens_per_second": (self.tokens - tokens_then) / seconds,
            "speed/flops_per_second": flops_per_second,
        }
        if self.peak_flops:
            values["speed/mfu"] = flops_per_second / (self.peak_flops * trainer.world_size)
        write_scalars(trainer, values)
        self._restart_clock()
