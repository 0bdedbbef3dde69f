"""Scaling laws of looped language models, fitted from run records: numpy and scipy only, never torch.

`load_runs`, `fit`, `bootstrap`, `compare` and the laws are here by name, loaded on first use, so that importing this
package (or `fitting.records` from a training callback) costs nothing. See `fitting/README.md` for a worked example.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "RunRecord": "records",
    "RecordError": "records",
    "FitError": "errors",
    "Runs": "data.runs",
    "load_runs": "data.loading",
    "Law": "laws",
    "Inputs": "laws",
    "AdditiveLaw": "laws",
    "ChinchillaLaw": "laws",
    "JointLaw": "laws",
    "LossShift": "laws",
    "Multiplier": "laws",
    "Power": "laws",
    "FixedPower": "laws",
    "PerRecurrence": "laws",
    "Saturating": "laws",
    "LogGrowth": "laws",
    "DriftingPower": "laws",
    "TokenDriftingPower": "laws",
    "PAPER": "data.splits",
    "INJECTION_ONCE": "data.splits",
    "REGRESSED": "data.splits",
    "REGRESSED_AS_LINEAR": "data.splits",
    "fit": "estimation.fits",
    "fit_architectures": "estimation.fits",
    "FitResult": "estimation.results",
    "Status": "estimation.results",
    "Interval": "estimation.results",
    "load_grid": "published",
    "bootstrap": "estimation.resampling",
    "compare": "studies.comparison",
    "Comparison": "studies.comparison",
    "analyse": "studies.analysis",
    "Settings": "studies.analysis",
    "Analysis": "studies.analysis",
    "write_report": "report.report",
    "text": "report.report",
    "plan": "studies.planner",
    "Noise": "studies.planner",
    "forecast": "studies.prediction",
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
