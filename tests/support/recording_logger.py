"""A Lightning logger that keeps everything it is given."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment


class RecordingLogger(Logger):
    """Rows as (step, metrics)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.hparams: list[tuple[dict[str, Any], Any]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.hparams.append((dict(params), metrics))

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one metric."""
        return [(step, metrics[name]) for step, metrics in self.rows if name in metrics]
