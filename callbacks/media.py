"""Images and texts on their way to the loggers that take them; others get nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import Logger


def writer_of(logger: Logger) -> Any:
    """What a logger writes with, such as TensorBoard's SummaryWriter; None if it has no such thing. On rank zero."""
    return getattr(logger, "experiment", None)


def takes_images(logger: Logger) -> bool:
    """Whether a logger has a place for images: `log_image`, as W&B's, or TensorBoard's writer. On rank zero."""
    return hasattr(logger, "log_image") or hasattr(writer_of(logger), "add_image")


def takes_texts(logger: Logger) -> bool:
    """Whether a logger has a place for texts: `log_text`, as W&B's, or TensorBoard's writer. On rank zero."""
    return hasattr(logger, "log_text") or hasattr(writer_of(logger), "add_text")


def write_image(trainer: L.Trainer, name: str, image: np.ndarray) -> None:
    """Hand an image (H,W,3) of uint8 to every logger that takes images; called on rank zero."""
    for logger in filter(takes_images, trainer.loggers):
        if hasattr(logger, "log_image"):
            logger.log_image(name, [image], step=trainer.global_step)
        else:
            writer_of(logger).add_image(name, image, trainer.global_step, dataformats="HWC")


def write_texts(trainer: L.Trainer, name: str, parts: Mapping[str, str]) -> None:
    """Hand texts by their titles to every logger that takes texts: a row of a table in W&B, Markdown in TensorBoard.

    Called on rank zero.
    """
    for logger in filter(takes_texts, trainer.loggers):
        if hasattr(logger, "log_text"):
            logger.log_text(name, list(parts), [list(parts.values())], step=trainer.global_step)
        else:
            writer_of(logger).add_text(name, as_markdown(parts), trainer.global_step)


def as_markdown(parts: Mapping[str, str]) -> str:
    """Titles in bold, each over its text as it stands: indented, so that nothing in it counts as Markdown."""
    blocks = []
    for title, text in parts.items():
        lines = text.replace("\t", "    ").splitlines() or [""]
        blocks.append(f"**{title}**\n\n" + "\n".join(f"    {line}" for line in lines))
    return "\n\n".join(blocks)
