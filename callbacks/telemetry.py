"""What reaches the loggers: values at logging steps, groups of curves, images and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.optim import Optimizer

from looped_lm import LoopedLM
from looped_lm.common.errors import UserError

#: Regular expressions of tags, by the title of their chart, by group.
Charts = dict[str, dict[str, list[str]]]
Values = Mapping[str, Tensor | float]
Kind = TypeVar("Kind", bound=L.Callback)


class Telemetry(L.Callback):
    """Hands values to the loggers at logging steps, and costs nothing at other steps.

    A subclass gives values from before the optimizer step, after it, or both. All wait for the device together,
    after the step.
    """

    #: What `charts` returns.
    shown: ClassVar[Charts] = {}
    #: Values of the logging step under way.
    _values: Values | None = None

    def charts(self, trainer: L.Trainer, pl_module: LoopedLM) -> Charts:
        """What is written, for `TensorBoardLayout`."""
        return self.shown

    def before_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Optimizer) -> Values:
        """Values by name from before the optimizer step; called at logging steps, on every rank."""
        return {}

    def after_step(self, trainer: L.Trainer, pl_module: LoopedLM) -> Values:
        """The same from after the step."""
        return {}

    def is_wanted(self, trainer: L.Trainer, pl_module: LoopedLM) -> bool:
        """Whether this optimizer step is a logging step, and this process has loggers to write to."""
        writes = bool(trainer.loggers) and trainer.is_global_zero
        return writes and pl_module.logs_step(trainer.global_step + 1)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: LoopedLM, optimizer: Optimizer) -> None:
        # Before the step, as for the loss that the module logs: a stop that is decided later logs nothing.
        due = pl_module.logs_step(trainer.global_step + 1)
        self._values = self.before_step(trainer, pl_module, optimizer) if due else None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: LoopedLM, *_: Any) -> None:
        values, self._values = self._values, None
        if values is not None:
            write_scalars(trainer, {**values, **self.after_step(trainer, pl_module)})


class TensorBoardLayout(L.Callback):
    """Groups the curves of loggers that have a custom layout (TensorBoard).

    Every callback, including yours, may say what it will log by a method `charts(trainer, pl_module) -> Charts`.
    It gives patterns, since TensorBoard joins the layouts of all runs, whose recurrences and roles may differ.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if not trainer.is_global_zero:
            return
        layout = self.layout(trainer, pl_module)
        for writer in map(writer_of, trainer.loggers):
            if hasattr(writer, "add_custom_scalars"):
                writer.add_custom_scalars(layout)

    @staticmethod
    def layout(trainer: L.Trainer, pl_module: LoopedLM) -> dict[str, dict[str, list]]:
        """Charts of the module and of all callbacks, in the form of `SummaryWriter.add_custom_scalars`."""
        groups: Charts = {"loss": {"loss by step": ["train/loss", "val/loss"]}}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            of_callback = getattr(callback, "charts", None)
            for group, charts in (of_callback(trainer, pl_module) if of_callback else {}).items():
                groups.setdefault(group, {}).update(charts)
        groups["loss"]["perplexity"] = ["val/perplexity"]
        if pl_module.recurrences.varies:
            groups.setdefault("recurrences", {})["recurrences of the step"] = ["train/recurrences"]
        # TensorBoard's patterns match the beginnings of tags.
        return {
            group: {title: ["Multiline", [f"{tag}$" for tag in tags]] for title, tags in charts.items()}
            for group, charts in groups.items()
        }


def needed(trainer: L.Trainer, kind: type[Kind], by: L.Callback) -> Kind:
    """The trainer's callback of a class; UserError if there is none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kind):
            return callback
    raise UserError(
        f"callbacks.{type(by).__name__} needs callbacks.{kind.__name__}, and trainer.callbacks has none. A config that "
        "sets `trainer.callbacks` replaces the list of base.yaml; `trainer.callbacks+` appends to it."
    )


def write_scalars(trainer: L.Trainer, values: Values, to: Sequence[Logger] | None = None) -> None:
    """Hand values to the trainer's loggers at once, under the number of optimizer steps done.

    `LightningModule.log` takes a third of a millisecond per value, fetches each separately and repeats old ones.
    Values handed over here cannot be monitored, by `ModelCheckpoint` for example.

    Args:
        trainer: the trainer; ranks other than zero write nothing.
        values: numbers by name; tensors () must be on one device, and reach the host in one transfer.
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


def writer_of(logger: Logger) -> Any:
    """What a logger writes with, such as TensorBoard's SummaryWriter, if anything. Called on rank zero."""
    return getattr(logger, "experiment", None)


def takers(trainer: L.Trainer, of: str) -> list[Logger]:
    """Loggers that take an "image" or a "text": by `log_image`, as W&B's, or by a writer. On rank zero."""
    return [x for x in trainer.loggers if hasattr(x, f"log_{of}") or hasattr(writer_of(x), f"add_{of}")]


def add_point(points: list[Any], point: tuple[Any, ...], most: int) -> None:
    """Add a point to a curve that a checkpoint keeps, in the order of the points' first values.

    Later points, left from before a rollback, are removed. Of more than `most`, every second one is removed.
    """
    while points and points[-1][0] >= point[0]:
        points.pop()
    points.append(point)
    if len(points) > most:
        del points[1::2]


def write_image(trainer: L.Trainer, name: str, image: np.ndarray) -> None:
    """Hand an image (H,W,3) of uint8 to every logger that takes images; called on rank zero."""
    for logger in takers(trainer, "image"):
        if hasattr(logger, "log_image"):
            logger.log_image(name, [image], step=trainer.global_step)
        else:
            writer_of(logger).add_image(name, image, trainer.global_step, dataformats="HWC")


def write_texts(trainer: L.Trainer, name: str, parts: Mapping[str, str]) -> None:
    """Hand texts by title to loggers: W&B gets a row of a table, others Markdown. Called on rank zero."""
    for logger in takers(trainer, "text"):
        if hasattr(logger, "log_text"):
            logger.log_text(name, list(parts), [list(parts.values())], step=trainer.global_step)
        else:
            writer_of(logger).add_text(name, as_markdown(parts), trainer.global_step)


def as_markdown(parts: Mapping[str, str]) -> str:
    """Titles in bold above their texts, which are indented so that nothing in them counts as Markdown."""
    blocks = []
    for title, text in parts.items():
        lines = text.replace("\t", "    ").splitlines() or [""]
        blocks.append(f"**{title}**\n\n" + "\n".join(f"    {line}" for line in lines))
    return "\n\n".join(blocks)
