"""The custom layout: every pattern finds tags that are logged, and every telemetry tag has its chart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG

from callbacks import FlopsMonitor, TensorBoardLayout
from looped_lm import HyperConnectionLanes, PassthroughInjection, Steps
from tests.support.own_components import FewerAndFewer
from tests.support.recording_logger import RecordingLogger
from tests.support.shipped import default_callbacks
from tests.support.tiny import TinyData, tiny_lm, tiny_trainer

#: Logged, but no curve of a chart: the axes themselves and what is known beforehand.
NO_CURVES = {"step", "epoch", "val/tokens", "hp_metric"}

MODELS: dict[str, dict[str, Any]] = {
    "lanes": {"lanes": HyperConnectionLanes, "injection": PassthroughInjection},
    "sampled": {"num_recurrences": 3, "recurrences": FewerAndFewer, "horizon": Steps(2)},
    "no loop": {"num_recurrences": 1},
}


@pytest.mark.parametrize("model", MODELS)
def test_charts_and_logged_tags_belong_together(tmp_path: Path, model: str) -> None:
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    callbacks = [
        FlopsMonitor(peak_flops=1e12) if isinstance(c, FlopsMonitor) else c for c in default_callbacks()
    ]
    tiny_trainer(tmp_path, callbacks, logger=logger, enable_checkpointing=True, enable_progress_bar=True).fit(
        tiny_lm(**MODELS[model]), datamodule=TinyData(4)
    )
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0}).Reload()
    layout = Layout()
    layout.ParseFromString(events.Tensors(CONFIG_SUMMARY_TAG)[0].tensor_proto.string_val[0])
    assert [c.title for c in layout.category][0] == "loss"
    charts = {chart.title: list(chart.multiline.tag) for c in layout.category for chart in c.chart}
    tags = set(events.Tags()["scalars"])
    for title, patterns in charts.items():
        for pattern in patterns:
            # As TensorBoard looks for them: from the beginning of the tag.
            assert [t for t in tags if re.match(pattern, t)], (title, pattern)
    shown = {t for t in tags for patterns in charts.values() for p in patterns if re.match(p, t)}
    left_out = {t for t in tags - shown if not t.startswith("final/")}
    assert left_out <= NO_CURVES
    assert ("largest singular value of the mixing" in charts) == (model == "lanes")
    assert ("recurrences of the step" in charts) == (model == "sampled")


def test_without_a_known_peak_there_is_no_chart_of_mfu(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [FlopsMonitor(), TensorBoardLayout()])
    charts = TensorBoardLayout.layout(trainer, tiny_lm())
    assert list(charts["speed"]) == ["tokens per second", "FLOPs per second"]


def test_a_callback_of_ones_own_has_its_chart_and_other_loggers_are_left_alone(tmp_path: Path) -> None:
    class Own(TensorBoardLayout):
        def charts(self, trainer: Any, pl_module: Any) -> Any:
            return {"mine": {"speed of light": ["own/c"]}}

    trainer = tiny_trainer(tmp_path, [Own()], logger=RecordingLogger())
    trainer.fit(tiny_lm(), datamodule=TinyData())
    groups = TensorBoardLayout.layout(trainer, tiny_lm())
    assert groups["mine"] == {"speed of light": ["Multiline", ["own/c$"]]}
