"""Going on from a checkpoint: a recipe that changed, and a validation that was due when the run stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from torch.optim import Optimizer

from looped_lm.common.errors import UserError
from looped_lm.common.text import say
from looped_lm.runs.checkpoint import Difference, differences
from looped_lm.runs.lightning_internals import batches_begun, start_without_steps, validate_now
from looped_lm.seams import before

#: Key in a checkpoint: the step of its run's last finished validation.
VALIDATED_AT = "validated_at_step"

#: Hyperparameters that say how to train, not what: a resumed run may change them.
RECIPE = (
    "horizon",
    "transfer",
    "schedule",
    "optimizer",
    "batch_tokens",
    "val_every_steps",
    "compile_layers",
    "recompute",
)
#: What checkpoints that are older than a hyperparameter were trained with; `seams.before` adds the axes.
BEFORE = {"compile_layers": False, "recompute": False}


def changed_recipe(checkpoint: dict[str, Any], hparams: Mapping[str, Any]) -> list[Difference]:
    """How the way of training that `hparams` describe differs from the checkpoint's.

    Raises:
        UserError: the model differs; every such difference is named.
    """
    stored = {**BEFORE, **before(), **checkpoint["hyper_parameters"]}
    changed = differences(stored, hparams)
    recipe = [d for d in changed if d.key.split(".")[0] in RECIPE]
    if len(recipe) < len(changed):
        raise UserError(
            "The configuration describes another model than the checkpoint:\n"
            + "\n".join(f"  {d}" for d in changed if d not in recipe)
            + "\nGive the checkpoint's own configuration (config.yaml in its run folder), or use "
            "LoopedLM.load_from_checkpoint."
        )
    return recipe


def use_own_recipe(
    checkpoint: dict[str, Any],
    recipe: list[Difference],
    own: Optimizer,
    multiplier: float,
    trainer: L.Trainer,
) -> None:
    """Say what changed, and put the rates and options of the module's `own` optimizer into the checkpoint.

    `multiplier` is that of the module's schedule at the checkpoint's step.

    Raises:
        UserError: the optimizer is of another class, which cannot use the state.
    """
    for d in recipe:
        if d.key == "optimizer.class_path":
            told = f"The checkpoint holds the state of another class of optimizer:\n  {d}\n"
            raise UserError(f"{told}Give the optimizer that it was trained with, or start a new run.")
    listing = "\n".join(f"  {d}" for d in recipe)
    say(trainer, f"The recipe differs from the checkpoint's; the one given here is used:\n{listing}")
    groups = own.param_groups
    for state in checkpoint["optimizer_states"]:
        for saved, group in zip(state["param_groups"], groups, strict=True):
            saved.update({k: v for k, v in group.items() if k not in ("params", "initial_norms")})
            saved["lr"] = group["initial_lr"] * multiplier
    for state in checkpoint["lr_schedulers"]:
        state["base_lrs"] = [group["initial_lr"] for group in groups]
        state["_last_lr"] = [group["initial_lr"] * multiplier for group in groups]


class DueValidation:
    """Remembers the step of the last finished validation, and makes up for one that was missed since.

    Lightning counts a validation as done even if the run stopped before or during it.
    """

    def __init__(self) -> None:
        self.validated_at: int | None = None
        self._resumed_at: int | None = None

    def nothing_left(self, checkpoint: dict[str, Any], steps: int, same_recipe: bool) -> bool:
        """Whether a run of `steps` steps has nothing left to do, not even its final validation."""
        done = checkpoint["global_step"]
        awaits_validation = done == steps and same_recipe and checkpoint.get(VALIDATED_AT, done) != done
        return done >= steps and not awaits_validation

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
        """Take over what the checkpoint knows; the trainer's counters are not restored yet."""
        self._resumed_at = checkpoint["global_step"]
        self.validated_at = checkpoint.get(VALIDATED_AT, self._resumed_at)
        if self._resumed_at == trainer.max_steps and self.validated_at != self._resumed_at:
            start_without_steps(trainer)

    def make_up(self, trainer: L.Trainer) -> None:
        """Validate now, at the start of training, if a validation was due at the checkpoint's step."""
        step = trainer.global_step
        if self._resumed_at != step or self.validated_at == step or not trainer.enable_validation:
            return
        # Reckoned as Lightning does, in batches: after a rollback they are ahead of the steps.
        if step == trainer.max_steps or batches_begun(trainer) % trainer.val_check_batch == 0:  # type: ignore[operator]
            validate_now(trainer)
