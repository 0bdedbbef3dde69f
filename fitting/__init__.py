"""Scaling laws of looped language models, fitted from run records: numpy and scipy only, never torch.

`load_runs`, `fit`, `bootstrap`, `compare` and the laws are here by name, loaded on first use, so that
importing this package (or `fitting.records` from a training callback) costs nothing. See
`fitting/README.md` for a worked example.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "RunRecord": "records",
    "RecordError": "records",
    "FitError": "errors",
    "Runs": "runs",
    "load_runs": "loading",
    "Law": "laws",
    "Inputs": "laws",
    "AdditiveLaw": "laws",
    "ChinchillaLaw": "laws",
    "JointLaw": "laws",
    "LossShift": "laws",
    "Multiplier": "multipliers",
    "Power": "multipliers",
    "FixedPower": "multipliers",
    "PerRecurrence": "multipliers",
    "Saturating": "multipliers",
    "LogGrowth": "multipliers",
    "DriftingPower": "multipliers",
    "TokenDriftingPower": "multipliers",
    "PAPER": "splits",
    "INJECTION_ONCE": "splits",
    "REGRESSED": "splits",
    "REGRESSED_AS_LINEAR": "splits",
    "fit": "fits",
    "fit_architectures": "fits",
    "FitResult": "results",
    "Status": "results",
    "Interval": "results",
    "load_grid": "published",
    "bootstrap": "resampling",
    "compare": "comparison",
    "Comparison": "comparison",
    "analyse": "analysis",
    "Settings": "analysis",
    "write_report": "report",
    "plan": "planner",
    "Noise": "planner",
    "forecast": "prediction",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"fitting has no {name!r}; it has: {', '.join(__all__)}")
    value = getattr(import_module(f"fitting.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
