"""Losses against tokens and FLOPs: TensorBoard's axis, rows for other loggers, and both after a resume."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import FlopsMonitor, LossCurves
from callbacks import loss_curves as module
from looped_lm import Steps
from looped_lm.runs.folder import go_on_after
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import TinyData, tiny_lm, tiny_trainer


def scalars(folder: str, tag: str) -> list[tuple[int, float]]:
    return [(e.step, e.value) for e in EventAccumulator(folder).Reload().Scalars(tag)]


def run(folder: Path, logger: Any, **options: Any) -> list[Any]:
    callbacks = [FlopsMonitor(), LossCurves(), ModelCheckpoint(folder, filename="{step}", save_top_k=-1)]
    trainer = tiny_trainer(
        folder, callbacks, logger=logger, enable_checkpointing=True, max_steps=options.pop("stop", -1)
    )
    trainer.fit(tiny_lm(horizon=Steps(6), val_every_steps=2), datamodule=TinyData(4), **options)
    return callbacks


def test_rows_hold_loss_tokens_and_flops_under_the_step(tmp_path: Path) -> None:
    logger = RecordingLogger()
    run(tmp_path, logger)
    flops = tiny_lm().flops_per_token
    for name, steps in (("train", [1, 2, 3, 4, 5, 6]), ("val", [2, 4, 6])):
        rows = [(step, row) for step, row in logger.rows if f"by_cost/{name}_loss" in row]
        losses = dict(logger.series(f"{name}/loss"))
        assert [step for step, _ in rows] == steps
        for step, row in rows:
            assert row == {
                f"by_cost/{name}_loss": pytest.approx(losses[step], rel=1e-6),
                "by_cost/tokens": 128.0 * step,
                "by_cost/flops": pytest.approx(128.0 * step * flops),
            }
    assert [s for s, _ in logger.rows] == sorted(s for s, _ in logger.rows)
    assert not any(name.startswith(("by_tokens", "by_mflops")) for _, row in logger.rows for name in row)


@pytest.mark.usefixtures("event_files_in_order")
def test_tensorboard_has_tokens_and_flops_for_steps_also_after_a_resume(tmp_path: Path) -> None:
    """TensorBoard's mark for a resume at step k drops every event beyond k, those counted in tokens included."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    run(tmp_path, TensorBoardLogger(tmp_path, "whole", version=0))
    first = TensorBoardLogger(tmp_path, "run", version=0)
    run(tmp_path / "first", first, stop=4)
    resumed = TensorBoardLogger(tmp_path, "run", version=0)
    go_on_after(resumed, 4, writes=True)
    run(tmp_path / "first", resumed, ckpt_path=str(tmp_path / "first" / "step=4.ckpt"))
    flops = tiny_lm().flops_per_token / 1e6
    for folder in (str(tmp_path / "whole" / "version_0"), resumed.log_dir):
        for name, steps in (("train", [1, 2, 3, 4, 5, 6]), ("val", [2, 4, 6])):
            losses = scalars(folder, f"{name}/loss")
            assert [step for step, _ in losses] == steps
            for tag, scale in (("by_tokens", 1.0), ("by_mflops", flops)):
                expected = [(round(128 * scale * step), loss) for step, loss in losses]
                assert scalars(folder, f"{tag}/{name}_loss") == expected


def test_a_checkpoint_keeps_a_bounded_number_of_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_POINTS", 4)
    _, curves, _ = run(tmp_path, RecordingLogger())
    tokens = [point[0] for point in curves.state_dict()["train"].tolist()]
    assert tokens == [128.0, 384.0, 640.0, 768.0]


def test_it_comes_after_the_one_that_counts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LossCurves comes before callbacks.FlopsMonitor"):
        tiny_trainer(tmp_path, [LossCurves(), FlopsMonitor()]).fit(tiny_lm(), datamodule=TinyData())
    with pytest.raises(ValueError, match="LossCurves needs callbacks.FlopsMonitor"):
        tiny_trainer(tmp_path, [LossCurves()]).fit(tiny_lm(), datamodule=TinyData())
