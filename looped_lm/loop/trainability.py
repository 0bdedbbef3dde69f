"""Which components can train together: every parameter must get a gradient in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from looped_lm.common.errors import UserError
from looped_lm.loop.bptt import BPTTStrategy
from looped_lm.loop.injection import Injection
from looped_lm.loop.layer import Layer
from looped_lm.loop.objective import Objective


def refuse_untrainable(
    injection: Injection,
    bptt: BPTTStrategy,
    layer: Layer,
    objective: Objective,
    step_specific: Mapping[str, str],
    num_recurrences: int,
    drawn: Iterable[int] = (),
) -> None:
    """Refuse combinations in which some parameter would get no gradient in some step.

    `step_specific` maps the name of each class with parameters for every recurrence to that of a class to use instead;
    `drawn` has the counts of recurrences that training steps run, where they are not all `num_recurrences`.

    Raises:
        UserError: for such a combination; the message names the components, the reason and the way out.
    """
    counts = sorted(set(drawn)) or [num_recurrences]
    if counts != [num_recurrences]:
        _refuse_specific(
            step_specific,
            f"Training steps run {counts[0]} to {counts[-1]} recurrences",
            "get no gradient in some steps. Use FixedRecurrences with it, or {} with counts that vary.",
        )
    for r in counts:
        read = objective.readings(r)
        kept = [bptt.keeps_grad(i, r) for i in range(r)]
        if not kept[-1] or kept != sorted(kept):
            raise UserError(
                f"{type(bptt).__name__} keeps gradients in recurrences {[i for i, k in enumerate(kept) if k]} of {r}: "
                "gradients enter at the last recurrence and stop at the first that is cut, so the recurrences that "
                "keep gradients must be the last ones and at least one."
            )
        if all(kept):
            continue
        cut = f"{type(bptt).__name__} runs {kept.count(False)} of {r} recurrences without gradients"
        if idle := [i for i in read if not kept[i]]:
            raise UserError(
                f"{cut}, and {type(objective).__name__} reads the states after recurrences {idle} among them: a loss "
                "there would train coda and head alone, and not the loop. Use FullBPTT or a longer window, or read "
                f"recurrences from {kept.index(True)} on."
            )
        _refuse_specific(
            step_specific, cut, "never train there. Use FullBPTT with it, or {} with truncation."
        )
        if layer.first_recurrence_only:
            raise UserError(
                f"{cut}, the first among them, and {type(layer).__name__} has parameters that act in the first alone, "
                "so they would never train. Use FullBPTT with it, or PreNormLayer with truncation."
            )
        if not injection.reinjects_input:
            raise UserError(
                f"{cut}, and {type(injection).__name__} passes the prelude's output to the first recurrence only, so "
                "prelude and embedding would get no gradient at all. Use FullBPTT, or an injection that reads the "
                "prelude's output in every recurrence (LinearInjection, AdditiveInjection)."
            )


def _refuse_specific(step_specific: Mapping[str, str], because: str, fate: str) -> None:
    for name, instead in step_specific.items():
        raise UserError(
            f"{because}, and {name} has separate parameters for every recurrence, which would "
            + fate.format(instead)
        )
