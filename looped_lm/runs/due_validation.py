"""A validation that was due when a run stopped, made up for when it resumes.

Lightning counts it as done: a run that stops between the last micro-batch before a validation and the validation's end
would have one validation fewer than the uninterrupted run, and a run that stops before its final one would have none.
"""

from __future__ import annotations

from typing import Any

import lightning as L

CHECKPOINT_KEY = "validated_at_step"


class DueValidation:
    """Remembers the step of the last finished validation; makes up for the one that should have come after it."""

    def __init__(self) -> None:
        self.validated_at: int | None = None
        self._resumed_at: int | None = None
        self._max_steps: int | None = None

    def reset(self) -> None:
        """Forget an earlier fit."""
        self.__init__()  # type: ignore[misc]

    def nothing_left(self, checkpoint: dict[str, Any], steps: int, same_recipe: bool) -> bool:
        """Whether a run of `steps` steps has nothing to do for a checkpoint, not even that run's final validation."""
        done = checkpoint["global_step"]
        awaits_validation = done == steps and same_recipe and checkpoint.get(CHECKPOINT_KEY, done) != done
        return done >= steps and not awaits_validation

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
        """Take over what the checkpoint knows; the trainer's counters are not restored yet."""
        self._resumed_at = checkpoint["global_step"]
        self.validated_at = checkpoint.get(CHECKPOINT_KEY, self._resumed_at)
        if self._resumed_at == trainer.max_steps and self.validated_at != self._resumed_at:
            # Lightning would leave before on_train_start, since no step is left.
            self._max_steps = trainer.max_steps
            trainer.fit_loop.epoch_loop.max_steps = trainer.max_steps + 1

    @property
    def only_final_left(self) -> bool:
        """Whether the run resumed after its last step and before its final validation."""
        return self._max_steps is not None

    def restore_limit(self, trainer: L.Trainer) -> None:
        """Give the trainer its number of steps back, once it has come as far as on_train_start."""
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps = self._max_steps

    def make_up(self, trainer: L.Trainer) -> None:
        """Validate now if that was due at the step of the checkpoint; called at the start of training."""
        self.restore_limit(trainer)
        step, epoch_loop = trainer.global_step, trainer.fit_loop.epoch_loop
        if self._resumed_at != step or self.validated_at == step or not trainer.enable_validation:
            return
        # As Lightning reckons it; after a rollback batches are ahead of steps.
        if not self.only_final_left and epoch_loop.batch_progress.total.ready % trainer.val_check_batch:  # type: ignore[operator]
            return
        epoch_loop.val_loop.restarting = False
        trainer.validating = True
        epoch_loop.val_loop.run()
        trainer.training = True
