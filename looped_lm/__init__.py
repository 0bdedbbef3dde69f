"""Looped (depth-recurrent) language models: define a loop, train it, measure what one recurrence is worth."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

#: Names that load on first use, so that importing the package (and `--help`) stays cheap.
_NAMES = {
    "training.lightning_module": "LoopedLM",
    "model.transformer": "LoopedTransformer",
    "loop.injection": "Injection LinearInjection AdditiveInjection PassthroughInjection",
    "loop.variants.diagonal_injection": "DiagonalInjection",
    "loop.variants.loop_index_injection": "LoopIndexInjection",
    "loop.lanes": "Lanes SingleLane HyperConnectionLanes",
    "loop.variants.doubly_stochastic_lanes": "DoublyStochasticLanes",
    "loop.residual": "Residual PlainResidual ScaledResidual",
    "loop.layer": "Layer LayerSizes LoopContext",
    "loop.blocks": "PreNormLayer",
    "loop.variants.swiglu_layer": "SwiGLULayer",
    "loop.variants.adapter_layer": "AdapterLayer",
    "loop.variants.loop_modulated_layer": "LoopModulatedLayer",
    "loop.variants.mixture_layer": "MixtureLayer",
    "loop.variants.previous_state_layer": "PreviousStateLayer",
    "loop.variants.random_state_injection": "RandomStateInjection",
    "loop.variants.shared_keys_values_layer": "SharedKeysValuesLayer",
    "loop.bptt": "BPTTStrategy FullBPTT TruncatedBPTT",
    "loop.objective": "Objective FinalCrossEntropy",
    "loop.variants.weighted_recurrences": "WeightedRecurrences",
    "loop.variants.exit_distribution": "ExitDistribution",
    "loop.variants.ponder": "PonderCost",
    "loop.recurrences": "RecurrenceSampler FixedRecurrences LogNormalPoisson",
    "training.optim": "MuonH",
    "training.schedules": "Horizon FlopsBudget TokenBudget TokensPerParameter Steps HyperP LinearSchedule",
}
_EXPORTS = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_EXPORTS]

#: Subpackages, with the modules of theirs that were once directly in looped_lm.
_MOVED = {
    "loop": "blocks bptt component injection lanes recurrences residual trainability variants",
    "model": "accounting compilation loss transformer",
    "training": "lightning_module memory metrics optim orthogonalisation schedules sharding",
}
_ROOMS = {module: room for room, modules in _MOVED.items() for module in modules.split()}


class _EarlierNames:
    """Finds modules under their earlier names: users' files and YAML say `looped_lm.injection.LinearInjection`.

    An earlier name gives the very module of today, so that its classes are the same. There is no base class, since
    importing importlib.abc would double the time that `--help` takes.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        room = _ROOMS.get(rest.partition(".")[0]) if package == __name__ else None
        if room is None:
            return None
        origin = f"{__name__}.{room}.{rest}"
        return importlib.util.spec_from_loader(fullname, self, origin=origin)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        # The import system is about to replace `module.__spec__`; `exec_module` puts it back.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        earlier = module.__spec__
        assert earlier is not None
        module.__spec__ = earlier.loader_state


# Before all other finders: they would load `looped_lm.variants.x` a second time.
sys.meta_path.insert(0, _EarlierNames())


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__
