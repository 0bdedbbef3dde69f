"""Telemetry on its way to the loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor


def write_scalars(
    trainer: L.Trainer, values: Mapping[str, Tensor | float], to: Sequence[Logger] | None = None
) -> None:
    """Hand values to the trainer's loggers at once, under the number of optimizer steps done.

    Not through `LightningModule.log`, which takes a third of a millisecond for each value, fetches each on its own and
    repeats the last one where none is logged anew. Such values are for loggers alone: nothing can monitor them.

    Args:
        trainer: a trainer whose optimizer step has ended; ranks other than zero write nothing.
        values: numbers by name; tensors () are on one device and cross to the host in one transfer.
        to: some of the trainer's loggers; None: all.
    """
    loggers = trainer.loggers if to is None else to
    if not (loggers and trainer.is_global_zero and values):
        return
    numbers = {name: v for name, v in values.items() if not isinstance(v, Tensor)}
    tensors = {name: v for name, v in values.items() if isinstance(v, Tensor)}
    if tensors:
        numbers |= zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True)
    for logger in loggers:
        logger.log_metrics(numbers, step=trainer.global_step)
