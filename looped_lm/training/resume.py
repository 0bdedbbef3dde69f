"""Going on from a checkpoint: with a recipe that changed, and with other processes than before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L

from looped_lm.common.errors import UserError
from looped_lm.common.text import say
from looped_lm.runs.checkpoint import Difference, differences
from looped_lm.seams import before

if TYPE_CHECKING:
    from looped_lm.training.lightning_module import LoopedLM

CHECKPOINT_KEY = "micro_batches_per_step"

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


def realign(checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
    """Count a checkpoint's micro-batches anew where a step has more or fewer of them than before.

    With another number of processes or rows per device a step consists of another number of micro-batches. Lightning
    takes the end of a step, and the time of a validation, from how many there were since the beginning of training.

    Args:
        checkpoint: as loaded; its counters are changed in place before Lightning and the data module read them.
        trainer: the trainer with the accumulation that this run uses.
    """
    then, now = checkpoint.get(CHECKPOINT_KEY), trainer.accumulate_grad_batches
    if then in (None, now):
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    before = progress["total"]["processed"]
    after = before // then * now
    for counts in (progress["total"], progress["current"]):
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += after - before
    data = trainer.datamodule  # type: ignore[attr-defined]
    position = checkpoint.get(type(data).__qualname__, {})
    if "batches_processed" in position:
        # Rows are counted from there; how many were read is not changed by how they are counted.
        position["batches_processed"] += after - before


def changed_recipe(checkpoint: dict[str, Any], module: LoopedLM) -> list[Difference]:
    """How the way of training differs from the checkpoint's.

    Raises:
        UserError: the model differs, too; every difference is named.
    """
    stored = {**BEFORE, **before(), **checkpoint["hyper_parameters"]}
    changed = differences(stored, dict(module.hparams))
    recipe = [d for d in changed if d.key.split(".")[0] in RECIPE]
    if len(recipe) < len(changed):
        raise UserError(
            "The configuration describes another model than the checkpoint:\n"
            + "\n".join(f"  {d}" for d in changed)
            + "\nGive the configuration it was trained with (config.yaml in its run folder), or use "
            "LoopedLM.load_from_checkpoint."
        )
    return recipe


def refuse_weights_alone(checkpoint: Mapping[str, Any]) -> None:
    """Refuse to train on from a checkpoint that was converted, or saved without the optimizer.

    Raises:
        UserError: it has no optimizer state.
    """
    if not checkpoint.get("optimizer_states"):
        raise UserError(
            "The checkpoint holds weights and no state of an optimizer, as converted ones do, so training cannot go on "
            "from it. validate, test, predict, generate and export read it."
        )


def use_own_recipe(checkpoint: dict[str, Any], module: LoopedLM, recipe: list[Difference]) -> None:
    """Say what changed, and put the module's rates and optimizer options into the checkpoint's states.

    Raises:
        UserError: the optimizer is of another class, which has no use for the state.
    """
    if any(d.key == "optimizer.class_path" for d in recipe):
        raise UserError(f"The checkpoint's optimizer state is another class's:\n  {recipe[0]}")
    listing = "\n".join(f"  {d}" for d in recipe)
    say(module.trainer, f"The recipe differs from the checkpoint's; the one given here is used:\n{listing}")
    groups = module.configure_optimizers()["optimizer"].param_groups
    steps = module.plan.steps
    multiplier = module.schedule.multiplier(min(checkpoint["global_step"], steps), steps)
    for state in checkpoint["optimizer_states"]:
        for saved, own in zip(state["param_groups"], groups, strict=True):
            saved.update({k: v for k, v in own.items() if k not in ("params", "initial_norms")})
            saved["lr"] = own["initial_lr"] * multiplier
    for state in checkpoint["lr_schedulers"]:
        state["base_lrs"] = [own["initial_lr"] for own in groups]
        state["_last_lr"] = [own["initial_lr"] * multiplier for own in groups]
