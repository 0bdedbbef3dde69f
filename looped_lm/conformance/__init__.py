"""Does a component, shipped or your own, keep the promises that the rest of the project builds on?

In your own project, with pytest:

    import pytest
    from looped_lm.conformance import checks
    from my_injection import GatedInjection

    @pytest.mark.parametrize("check", checks(injection=GatedInjection), ids=str)
    def test_gated_injection(check):
        check()

`checks` takes what `LoopedLM` takes (`injection`, `lanes`, `residual`, `bptt`, `objective`, `recurrences`, `optimizer`,
alone or together), as classes, `functools.partial` of classes, or class_path and init_args. Each check tries a tiny
model and raises `ConformanceError` with what is wrong. Without pytest, `for check in checks(...): check()` does the
same; a script needs the guard `if __name__ == "__main__":` around it, since one check starts processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from looped_lm.conformance import properties, training
from looped_lm.conformance.candidate import Candidate, ConformanceError

__all__ = ["Candidate", "Check", "ConformanceError", "checks"]

#: Every check that needs one process, by name.
SINGLE_PROCESS: dict[str, Callable[[Candidate], None]] = {
    "gradients": properties.every_parameter_learns,
    "counts": properties.counts_and_roles_are_whole,
    "flops": properties.flops_agree_with_the_counter,
    "one_recurrence": properties.one_recurrence_is_one_application,
    "inputs": properties.inputs_stay_as_they_are,
    "mixing": properties.telemetry_sees_the_mixing,
    "causality": properties.tokens_see_their_own_past_alone,
    "more_recurrences": properties.more_recurrences_run_or_are_refused,
    "autocast": training.mixed_precision_agrees,
    "compiled": training.compiled_equals_eager,
    "graphs": training.few_graphs_serve_all_recurrences,
    "recompute": training.recomputation_changes_nothing,
    "checkpoint": training.a_checkpoint_alone_rebuilds_it,
    "training": training.a_few_steps_lower_the_loss,
}


@dataclass(frozen=True)
class Check:
    """One named check of one candidate; call it to run it."""

    name: str
    run: Callable[[Candidate], None]
    candidate: Candidate

    def __call__(self) -> None:
        self.run(self.candidate)

    def __str__(self) -> str:
        return self.name


def checks(ddp: bool = True, **components: Any) -> list[Check]:
    """The checks of a component, or of several that are used together.

    Args:
        ddp: include the check that spawns two processes, which takes as long as all others.
        components: arguments of `LoopedLM` that differ from the tiny linear model.
    """
    candidate = Candidate(components)
    named = [Check(name, run, candidate) for name, run in SINGLE_PROCESS.items()]
    return [*named, Check("ddp", training.ddp_equals_single, candidate)] if ddp else named
