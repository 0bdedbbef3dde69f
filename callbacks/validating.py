"""Which validations are those of a training run, and when it is over."""

from __future__ import annotations

import lightning as L


def in_training(trainer: L.Trainer) -> bool:
    """Whether what runs belongs to `fit` and is not Lightning's sanity check before it."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def is_over(trainer: L.Trainer) -> bool:
    """Whether no further step follows: the last one is done, or the run is told to stop."""
    return trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step
