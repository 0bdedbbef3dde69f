"""What the run ended with: on the terminal, and in TensorBoard's HPARAMS tab."""

from __future__ import annotations

import math
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from callbacks.run_record import RunRecordWriter
from callbacks.telemetry import needed
from fitting.records import record_path
from looped_lm import LoopedLM

OF_THE_RECORD = "d_model num_recurrences seed batch_tokens n_once n_rec flops_per_token steps_planned".split()


class _OfRecord(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        needed(trainer, RunRecordWriter, by=self)


class RunSummary(_OfRecord):
    """Prints validation loss, tokens, FLOPs and the paths of checkpoint, run record and event file.

    Raises:
        UserError: training starts, and there is no `RunRecordWriter`.
    """

    def on_fit_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        log_dir = trainer.log_dir  # a collective: every rank asks
        if not trainer.is_global_zero:
            return
        record = needed(trainer, RunRecordWriter, by=self).record(trainer, pl_module)
        lines = [("run", f"{record.run_name} ({record.status})")]
        if record.val_loss is not None and record.val_tokens is not None:
            loss = f"{record.val_loss:.4f} nats/token over {record.val_tokens:,} tokens"
            lines += [("validation loss", loss), ("perplexity", f"{math.exp(record.val_loss):.2f}")]
        entropy = getattr(trainer.datamodule, "val_unigram_entropy", None)  # type: ignore[attr-defined]
        if entropy is not None:
            told = f"{entropy:.4f} nats/token of all validation tokens (a model without context)"
            lines.append(("unigram entropy", told))
        lines += [
            ("steps", f"{record.steps:,} of {record.steps_planned:,}"),
            ("tokens", f"{record.tokens:,}"),
            ("training FLOPs", f"{record.training_flops:.4g} (convention {record.flops_convention})"),
            ("wall time", f"{record.wall_seconds:.0f} s"),
        ]
        if checkpoint := getattr(trainer.checkpoint_callback, "best_model_path", ""):
            lines += [("checkpoint", checkpoint), ("run record", str(record_path(checkpoint)))]
        events = sorted(Path(log_dir or ".").glob("events.out.tfevents.*"))
        lines += [("event file", str(path)) for path in events]
        written = [x.experiment.metrics_file_path for x in trainer.loggers if isinstance(x, CSVLogger)]
        lines += [("logged rows", path) for path in written]
        width = max(len(name) for name, _ in lines)
        print("\n" + "\n".join(f"{name:<{width}}  {value}" for name, value in lines))


class HParams(_OfRecord):
    """Hands every logger the run's settings and final validation loss at the end of training.

    Raises:
        UserError: training starts, and there is no `RunRecordWriter`.
    """

    def on_train_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        record = needed(trainer, RunRecordWriter, by=self).record(trainer, pl_module)
        if record.val_loss is None or not trainer.is_global_zero:
            return
        components = {name: spec["class_path"].rpartition(".")[2] for name, spec in record.components.items()}
        settings = {
            **components,
            **{name: getattr(record, name) for name in OF_THE_RECORD},
            "layers": f"{record.prelude_layers}-{record.recurrent_layers}-{record.coda_layers}",
            **{f"lr/{role}": rate for role, rate in pl_module.learning_rates().items()},
        }
        results = {
            "final/val_loss": record.val_loss,
            "final/step": float(record.steps),
            "final/tokens": float(record.tokens),
            "final/training_flops": record.training_flops,
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(settings, results, step=record.steps)
            else:
                logger.log_hyperparams({**settings, **results})
            logger.save()
