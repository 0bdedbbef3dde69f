"""Hyperparameters and final loss for TensorBoard's HPARAMS tab."""

from __future__ import annotations

import lightning as L

from callbacks.run_record import run_record
from looped_lm import LoopedLM


class HParams(L.Callback):
    """At the end of training, hands every logger the run's settings together with its final validation loss."""

    def on_train_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        record = run_record(trainer, needed_by="callbacks.HParams")
        if record.val_loss is None or not trainer.is_global_zero:
            return
        components = {name: spec["class_path"].rpartition(".")[2] for name, spec in record.components.items()}
        settings = {
            **components,
            "d_model": record.d_model,
            "num_recurrences": record.num_recurrences,
            "layers": f"{record.prelude_layers}-{record.recurrent_layers}-{record.coda_layers}",
            "seed": record.seed,
            "batch_tokens": record.batch_tokens,
            "n_once": record.n_once,
            "n_rec": record.n_rec,
            "flops_per_token": record.flops_per_token,
            "steps_planned": record.steps_planned,
            **{f"lr/{role}": rate for role, rate in pl_module.learning_rates().items()},
        }
        results = {
            "final/val_loss": record.val_loss,
            "final/step": float(record.steps),
            "final/tokens": float(record.tokens),
            "final/training_flops": record.training_flops,
        }
        for logger in trainer.loggers:
            _log(logger, settings, results)


def _log(logger: L.pytorch.loggers.Logger, settings: dict, results: dict) -> None:
    if isinstance(logger, L.pytorch.loggers.TensorBoardLogger):
        logger.log_hyperparams(settings, results, step=int(results["final/step"]))
    else:
        logger.log_hyperparams({**settings, **results})
    logger.save()
