"""Callbacks of the training run, one concern per file. Configurations name them `callbacks.<Name>`."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "FlopsMonitor": "flops",
    "RandomState": "random_state",
    "Preemption": "preemption",
    "Checkpoints": "checkpoints",
    "RunRecordWriter": "run_record",
    "LearningRates": "optimizer",
    "GradientNorm": "optimizer",
    "UpdateNorms": "optimizer",
    "LoopStats": "loop_stats",
    "GradientShare": "loop_stats",
    "LossCurves": "loss_curves",
    "LaneMaps": "lane_maps",
    "Samples": "samples",
    "FinalValidation": "final_validation",
    "DivergenceGuard": "guard",
    "HParams": "summary",
    "TensorBoardLayout": "telemetry",
    "StepProgressBar": "progress",
    "RunSummary": "summary",
    "PredictionWriter": "predictions",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__
