"""What the run ended with and where its results lie."""

from __future__ import annotations

import math
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from callbacks.run_record import run_record
from fitting.records import record_path


class RunSummary(L.Callback):
    """Prints validation loss, tokens, FLOPs and the paths of checkpoint, run record and event file.

    Raises:
        ValueError: at the end of training, without `RunRecordWriter`.
    """

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        log_dir = trainer.log_dir  # a collective: every rank asks
        if not trainer.is_global_zero:
            return
        record = run_record(trainer, needed_by="callbacks.RunSummary")
        lines: list[tuple[str, str]] = [("run", f"{record.run_name} ({record.status})")]
        if record.val_loss is not None and record.val_tokens is not None:
            lines.append(
                ("validation loss", f"{record.val_loss:.4f} nats/token over {record.val_tokens:,} tokens")
            )
            lines.append(("perplexity", f"{math.exp(record.val_loss):.2f}"))
        entropy = getattr(trainer.datamodule, "val_unigram_entropy", None)  # type: ignore[attr-defined]
        if entropy is not None:
            lines.append(
                (
                    "unigram entropy",
                    f"{entropy:.4f} nats/token of all validation tokens (a model without context)",
                )
            )
        lines.append(("steps", f"{record.steps:,} of {record.steps_planned:,}"))
        lines.append(("tokens", f"{record.tokens:,}"))
        lines.append(
            ("training FLOPs", f"{record.training_flops:.4g} (convention {record.flops_convention})")
        )
        lines.append(("wall time", f"{record.wall_seconds:.0f} s"))
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if checkpoint:
            lines.append(("checkpoint", checkpoint))
            lines.append(("run record", str(record_path(checkpoint))))
        for events in sorted(Path(log_dir or ".").glob("events.out.tfevents.*")):
            lines.append(("event file", str(events)))
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                lines.append(("logged rows", logger.experiment.metrics_file_path))
        width = max(len(name) for name, _ in lines)
        print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in lines))
