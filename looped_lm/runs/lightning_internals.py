"""Every private part of Lightning (2.6.6) that this project touches, each behind a function.

`tests/looped_lm/runs/test_lightning_internals.py` fails if one of them moves, or if another file touches one.
Loops, their counters and their limits are undocumented and count as private.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from torch import Tensor

# Strategies require this class; they refuse a public `CheckpointIO` that wraps another.
__all__ = ["WrappingCheckpointIO"]


def version_given(logger: TensorBoardLogger | CSVLogger) -> int | str | None:
    """The version that a logger was built with; the public `version` makes one up."""
    return logger._version


def write_into(logger: TensorBoardLogger | CSVLogger, version: str) -> None:
    """Make a logger write into another version's folder; only the constructor takes `version`."""
    logger._version = version


def purge_after(logger: Logger, step: int) -> None:
    """Make readers of TensorBoard's files drop old rows after `step`; only the constructor takes this."""
    if isinstance(logger, TensorBoardLogger):
        logger._kwargs["purge_step"] = step + 1


def set_max_steps(trainer: L.Trainer, steps: int) -> None:
    """Set the number of optimizer steps after which fit ends. The public `max_steps` is read-only."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def start_without_steps(trainer: L.Trainer) -> None:
    """Make fit call `on_train_start` although no step is left; otherwise it would return first."""
    # The limit is one step higher until the loop resets itself, just before `on_train_start`.
    loop, steps = trainer.fit_loop, trainer.max_steps
    reset = loop.reset

    def reset_and_restore() -> None:
        set_max_steps(trainer, steps)
        loop.reset = reset  # type: ignore[method-assign]
        reset()

    loop.reset = reset_and_restore  # type: ignore[method-assign]
    set_max_steps(trainer, steps + 1)


def batches_begun(trainer: L.Trainer) -> int:
    """Micro-batches since training began, including the current one; hooks get those of the epoch only."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def take_steps_back(trainer: L.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Set the counters of optimizer steps to a checkpoint's; the counters of batches go on."""
    loop, saved = trainer.fit_loop.epoch_loop, checkpoint["loops"]["fit_loop"]
    optimizers = saved["epoch_loop.automatic_optimization.optim_progress"]
    loop.automatic_optimization.optim_progress.load_state_dict(optimizers)
    loop.scheduler_progress.load_state_dict(saved["epoch_loop.scheduler_progress"])
    loop._batches_that_stepped = saved["epoch_loop.state_dict"]["_batches_that_stepped"]


def count_batches_anew(checkpoint: Mapping[str, Any], then: int, now: int) -> int:
    """Recount a checkpoint's micro-batches, in place, as `now` per step instead of `then`; the increase.

    Lightning derives the ends of steps and the times of validations from their number since training began.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    before = progress["total"]["processed"]
    more = before // then * now - before
    for counts in (progress["total"], progress["current"]):
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += more
    return more


def validate_now(trainer: L.Trainer) -> None:
    """Run the validation of fit. `Trainer.validate` would end the fit."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False
    trainer.validating = True
    loop.run()
    trainer.training = True


def reload_validation_data(trainer: L.Trainer) -> None:
    """Make the next validation ask for its loader again; the public setting counts epochs."""
    trainer.fit_loop.epoch_loop.val_loop._combined_loader = None


def validation_progress(trainer: L.Trainer) -> tuple[int, float]:
    """Batches of the current validation: those begun, and the total; hooks get one loader's only."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return loop.batch_progress.current.ready, sum(loop.max_batches)


def cluster_environment(trainer: L.Trainer) -> ClusterEnvironment:
    """The environment whose settings Lightning's signal handlers follow; not every strategy has it."""
    return trainer._accelerator_connector.cluster_environment


def leave_signals_alone(trainer: L.Trainer) -> None:
    """Switch off the broadcast of a SIGTERM at every micro-batch, for which there is no setting."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def take_sigterm(trainer: L.Trainer) -> bool:
    """Whether Lightning's handler has received a SIGTERM; the handler forgets it."""
    received = trainer.received_sigterm
    trainer._signal_connector.received_sigterm = False
    return received


def is_attached(module: L.LightningModule) -> bool:
    """Whether a module has a trainer; the public `trainer` raises if it has none."""
    return module._trainer is not None


def save_now(saver: ModelCheckpoint, trainer: L.Trainer) -> str | None:
    """Make a checkpoint callback save this step, once; its path, or None if the callback keeps those it has."""
    # `Trainer.save_checkpoint` would leave a file that the callback neither counts nor removes.
    if not saver._should_skip_saving_checkpoint(trainer):
        saver._save_topk_checkpoint(trainer, saver._monitor_candidates(trainer))
    return saver._last_checkpoint_saved if saver._last_global_step_saved == trainer.global_step else None


class NewestCheckpoints(ModelCheckpoint):
    """Keeps the newest checkpoints by the trainer's count of steps; no public method decides any of this."""

    def _save_topk_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        path = self.format_checkpoint_name(monitor_candidates)
        if path in self.best_k_models:
            # This run saved this step before; a validation has run since.
            self._save_checkpoint(trainer, path)
        else:
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _should_remove_checkpoint(self, trainer: L.Trainer, previous: str, current: str) -> bool:
        # Lightning keeps the one that the run resumed from; here it is removed like any other.
        return previous != current

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        # A run that goes on from here does not log earlier steps again, so loggers must write them now.
        for logger in trainer.loggers:
            logger.save()
        super()._save_checkpoint(trainer, filepath)

    def _monitor_candidates(self, trainer: L.Trainer) -> dict[str, Tensor]:
        return {**super()._monitor_candidates(trainer), "step": torch.tensor(trainer.global_step)}


def peak_flops_table() -> Mapping[str, Mapping[Any, float]]:
    """Peak FLOPs/s by GPU name and dtype; the public function answers for an installed GPU only."""
    from lightning.fabric.utilities.throughput import _CUDA_FLOPS

    return _CUDA_FLOPS
