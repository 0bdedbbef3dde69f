"""Scaling laws of looped language models, fitted from run records: numpy and scipy only, never torch.

`load_runs`, `fit`, `bootstrap`, `compare` and the laws can be imported from here. They load on first use, so that
importing this package (or `fitting.records` from a training callback) costs nothing. `fitting/README.md` has examples.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "records": "RunRecord RecordError",
    "errors": "FitError",
    "data.runs": "Runs",
    "data.loading": "load_runs",
    "data.splits": "PAPER INJECTION_ONCE REGRESSED REGRESSED_AS_LINEAR",
    "published": "load_grid",
    "laws": "Law Inputs AdditiveLaw ChinchillaLaw JointLaw LossShift Multiplier Power FixedPower PerRecurrence "
    "Saturating LogGrowth DriftingPower TokenDriftingPower",
    "estimation.fits": "fit fit_architectures",
    "estimation.results": "FitResult Status Interval",
    "estimation.resampling": "bootstrap",
    "estimation.noise": "Noise",
    "studies.analysis": "analyse Analysis Settings",
    "studies.comparison": "compare Comparison",
    "studies.matching": "match Matching",
    "studies.planner": "plan",
    "studies.prediction": "forecast",
    "report.report": "write_report text",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"fitting has no {name!r}; it has: {', '.join(__all__)}")
    value = getattr(import_module(f"fitting.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
