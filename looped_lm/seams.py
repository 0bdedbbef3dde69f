"""The axes of the loop in one table. Whatever depends on the list of axes is derived from it.

A new axis needs a base class in `looped_lm.loop`, a row here, and an argument and attribute of `LoopedTransformer` with
the row's key: checkpoints, run records, exported folders and the conformance suite then know it. configs/base.yaml
names the default of every axis; a test compares it with this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from looped_lm.loop.blocks import PreNormLayer
from looped_lm.loop.bptt import BPTTStrategy, FullBPTT
from looped_lm.loop.component import Component, Spec, build, callable_spec, component_spec
from looped_lm.loop.injection import Injection, LinearInjection
from looped_lm.loop.lanes import Lanes, SingleLane
from looped_lm.loop.layer import Layer
from looped_lm.loop.objective import FinalCrossEntropy, Objective
from looped_lm.loop.recurrences import FixedRecurrences, RecurrenceSampler
from looped_lm.loop.residual import PlainResidual, Residual


@dataclass(frozen=True)
class Seam:
    """One axis.

    Args:
        key: the axis's name as argument and attribute of its owner, in YAML, config.json and run records.
        base: base class of its components.
        default: class used where none is named.
        sizes: first arguments of the constructor, which the owner supplies. Without any, an instance may be given.
        of_training: owned by LoopedLM and not part of the model, so weights load without it.
        later: added after the first files were written; files that do not name it were made with the default.
    """

    key: str
    base: type[Component]
    default: type[Component]
    sizes: tuple[str, ...] = ()
    of_training: bool = False
    later: bool = True

    def build(self, given: Any, sizes: Mapping[str, Any]) -> Any:
        """The component from an instance, a factory, class_path and init_args, or None; raises what `build` raises."""
        if isinstance(given, self.base) and not self.sizes:
            return given
        supplied = {name: sizes[name] for name in self.sizes}
        return build(self.default if given is None else given, self.key, supplied)

    def spec(self, component: Component) -> Spec:
        """`{"class_path", "init_args"}` of a component of this axis, without the sizes."""
        return component_spec(component, len(self.sizes))


SEAMS: dict[str, Seam] = {
    seam.key: seam
    for seam in (
        Seam("injection", Injection, LinearInjection, ("d_model",), later=False),
        Seam("lanes", Lanes, SingleLane, ("d_model", "num_recurrences"), later=False),
        Seam("residual", Residual, PlainResidual, ("d_model", "num_recurrences")),
        Seam("layer", Layer, PreNormLayer, ("sizes",)),
        Seam("bptt", BPTTStrategy, FullBPTT, later=False),
        Seam("objective", Objective, FinalCrossEntropy, ("d_model", "num_recurrences")),
        Seam("recurrences", RecurrenceSampler, FixedRecurrences, ("num_recurrences",), of_training=True),
    )
}


def components(owner: object, of_training: bool = False) -> dict[str, Component]:
    """The components of a model by key; with `of_training`, those of the LoopedLM around it."""
    return {key: getattr(owner, key) for key, seam in SEAMS.items() if seam.of_training is of_training}


def specs(owner: object, of_training: bool = False) -> dict[str, Spec]:
    """`{"class_path", "init_args"}` of these components, by key."""
    return {key: SEAMS[key].spec(component) for key, component in components(owner, of_training).items()}


#: Arguments of the model that are no axes and came after the first files were written, with what those were made with.
LATER = {"layer_in_block_only": False, "document_start": None}


def before() -> dict[str, Any]:
    """What a file that is older than an axis, or than another argument of the model, was made with, by key."""
    return LATER | {key: callable_spec(seam.default, key) for key, seam in SEAMS.items() if seam.later}
