"""TensorBoard's CUSTOM SCALARS tab: the run's curves in groups."""

from __future__ import annotations

import lightning as L

from callbacks.telemetry import Charts, writer_of
from looped_lm import LoopedLM


class TensorBoardLayout(L.Callback):
    """Groups the curves of loggers that have a custom layout (TensorBoard): loss, optimizer, recurrences, cost, speed.

    Every callback says by a method `charts(trainer, pl_module) -> Charts` what it will log and how that belongs
    together, so a callback of your own has its place, too. Charts are told by patterns and not by lists of tags:
    TensorBoard joins the layouts of all runs that it shows, and runs with other recurrences or roles then share charts.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if not trainer.is_global_zero:
            return
        layout = as_layout(self.collect(trainer, pl_module))
        for writer in map(writer_of, trainer.loggers):
            if hasattr(writer, "add_custom_scalars"):
                writer.add_custom_scalars(layout)

    @staticmethod
    def collect(trainer: L.Trainer, pl_module: LoopedLM) -> Charts:
        """Charts of the module and of all callbacks that have some."""
        groups: Charts = {"loss": {"loss by step": ["train/loss", "val/loss"]}}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            of_callback = getattr(callback, "charts", None)
            for group, charts in (of_callback(trainer, pl_module) if of_callback else {}).items():
                groups.setdefault(group, {}).update(charts)
        groups["loss"]["perplexity"] = ["val/perplexity"]
        if pl_module.recurrences.varies:
            groups.setdefault("recurrences", {})["recurrences of the step"] = ["train/recurrences"]
        return groups


def as_layout(groups: Charts) -> dict[str, dict[str, list]]:
    """Charts in the form of `SummaryWriter.add_custom_scalars`, whose patterns match beginnings of tags."""
    return {
        group: {title: ["Multiline", [f"{tag}$" for tag in tags]] for title, tags in charts.items()}
        for group, charts in groups.items()
    }
