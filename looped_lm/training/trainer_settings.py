"""Trainer settings that follow from the recipe: steps, accumulation, validation interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L

from looped_lm.common.errors import UserError
from looped_lm.common.text import say
from looped_lm.runs.lightning_internals import set_max_steps
from looped_lm.training.schedules import accumulation


@dataclass(frozen=True)
class Derived:
    """What a fit set on its Trainer, which the next fit must not take for a user's setting."""

    accumulate_grad_batches: int = 1
    val_check_interval: int | float = 1.0


def derive(
    trainer: L.Trainer,
    steps: int,
    batch_tokens: int,
    seq_len: int,
    val_every_steps: int | None,
    before: Derived,
) -> Derived:
    """Put the recipe's settings on a trainer whose loops have not started.

    `before` is what an earlier fit derived; `val_every_steps` None leaves validation to the end.

    Raises:
        UserError: a trainer setting contradicts the recipe, or would do nothing.
    """
    if trainer.accumulate_grad_batches not in (1, before.accumulate_grad_batches):
        raise UserError(
            f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, but accumulation follows from "
            f"model.batch_tokens ({batch_tokens:,}): leave it at 1 and set batch_tokens."
        )
    if trainer.val_check_interval not in (1.0, before.val_check_interval):
        raise UserError(
            f"trainer.val_check_interval is {trainer.val_check_interval}, but the interval follows from "
            f"model.val_every_steps ({val_every_steps}), in optimizer steps: leave it unset."
        )
    rows = getattr(trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
    if rows is None:
        raise UserError(
            "The data module has no `batch_size` (rows per device), so batch_tokens cannot be met."
        )
    micro_batches = accumulation(batch_tokens, rows, seq_len, trainer.world_size)
    trainer.accumulate_grad_batches = micro_batches
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return Derived(micro_batches)
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        raise UserError(
            "trainer.overfit_batches has no effect on endless data: use a small data.data_dir instead."
        )
    limit = trainer.limit_train_batches
    if limit != 1.0 and (isinstance(limit, float) or limit % micro_batches):
        raise UserError(
            f"trainer.limit_train_batches is {limit}, which cuts short an optimizer step of {micro_batches} "
            "micro-batches: set trainer.max_steps to stop early."
        )
    for name, value in (("min_steps", trainer.min_steps or 0), ("max_steps", trainer.max_steps)):
        if value > steps:
            raise UserError(
                f"trainer.{name} is {value}, beyond the {steps} steps that model.horizon plans: set model.horizon "
                "instead, for example looped_lm.Steps."
            )
    # Without an interval, the FinalValidation callback validates at the end.
    interval = (steps + 1 if val_every_steps is None else val_every_steps) * micro_batches
    trainer.val_check_interval = interval
    if trainer.max_steps == -1:
        set_max_steps(trainer, steps)
    elif trainer.max_steps < steps:
        say(
            trainer,
            f"trainer.max_steps stops this run after {trainer.max_steps} of the {steps} steps that its horizon plans; "
            "the learning-rate schedule follows the plan.",
        )
    return Derived(micro_batches, interval)


def processes_of_torchrun(devices: Any, num_nodes: int, environment: Mapping[str, str]) -> tuple[Any, int]:
    """`devices` and `num_nodes`: torchrun's if it started the processes and the run does not set its own.

    With base.yaml's one device, each process would train a separate model.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or str(devices) not in ("1", "auto", "-1"):
        return devices, num_nodes
    here, everywhere = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
    return here, everywhere // here
