"""Looped (depth-recurrent) language models: define a loop, train it, measure what one recurrence is worth.

The names below load on first use, so that importing the package (and `--help`) stays cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "LoopedLM": "lightning_module",
    "LoopedTransformer": "transformer",
    "Injection": "injection",
    "LinearInjection": "injection",
    "AdditiveInjection": "injection",
    "PassthroughInjection": "injection",
    "DiagonalInjection": "variants.diagonal_injection",
    "LoopIndexInjection": "variants.loop_index_injection",
    "Lanes": "lanes",
    "SingleLane": "lanes",
    "HyperConnectionLanes": "lanes",
    "DoublyStochasticLanes": "variants.doubly_stochastic_lanes",
    "Residual": "residual",
    "PlainResidual": "residual",
    "ScaledResidual": "residual",
    "BPTTStrategy": "bptt",
    "FullBPTT": "bptt",
    "TruncatedBPTT": "bptt",
    "RecurrenceSampler": "recurrences",
    "FixedRecurrences": "recurrences",
    "LogNormalPoisson": "recurrences",
    "MuonH": "optim",
    "Horizon": "schedules",
    "FlopsBudget": "schedules",
    "TokenBudget": "schedules",
    "TokensPerParameter": "schedules",
    "Steps": "schedules",
    "HyperP": "schedules",
    "LinearSchedule": "schedules",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__
