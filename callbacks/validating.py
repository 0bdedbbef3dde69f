"""Which validations are those of a training run."""

from __future__ import annotations

import lightning as L


def in_training(trainer: L.Trainer) -> bool:
    """Whether what runs belongs to `fit` and is not Lightning's sanity check before it."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking
