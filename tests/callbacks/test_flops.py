"""Tokens and FLOPs as counted, their resume, and the stop at the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks import FlopsMonitor
from looped_lm import FlopsBudget, Steps, TokenBudget
from looped_lm.training.devices import compute_dtype
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import TinyData, tiny_lm, tiny_trainer


@pytest.mark.parametrize("batch_size", [8, 2])
def test_counts_do_not_depend_on_accumulation(tmp_path: Path, batch_size: int) -> None:
    """4 steps of 128 tokens whether in one micro-batch or in four."""
    lm, monitor, logger = tiny_lm(), FlopsMonitor(), RecordingLogger()
    trainer = tiny_trainer(tmp_path, [monitor], logger=logger)
    trainer.fit(lm, datamodule=TinyData(batch_size))
    assert trainer.global_step == 4 and monitor.tokens == 4 * 128
    assert monitor.flops == pytest.approx(4 * 128 * lm.flops_per_token, rel=1e-12)
    assert logger.series("cost/tokens") == [(s, 128.0 * s) for s in (1, 2, 3, 4)]
    assert [v for _, v in logger.series("cost/flops")] == pytest.approx(
        [128 * s * lm.flops_per_token for s in (1, 2, 3, 4)]
    )
    assert all(v > 0 for _, v in logger.series("speed/tokens_per_second"))
    assert not logger.series("speed/mfu"), "the peak of this CPU is not known"


def test_mfu_is_the_share_of_the_given_peak(tmp_path: Path) -> None:
    logger = RecordingLogger()
    tiny_trainer(tmp_path, [FlopsMonitor(peak_flops=1e12)], logger=logger).fit(
        tiny_lm(), datamodule=TinyData()
    )
    for (_, mfu), (_, speed) in zip(
        logger.series("speed/mfu"), logger.series("speed/flops_per_second"), strict=True
    ):
        assert mfu == pytest.approx(speed / 1e12)


def test_counts_go_on_after_a_resume(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    tiny_trainer(tmp_path, [FlopsMonitor(), save], enable_checkpointing=True).fit(
        tiny_lm(), datamodule=TinyData()
    )
    monitor = FlopsMonitor()
    trainer = tiny_trainer(tmp_path, [monitor])
    trainer.fit(tiny_lm(), datamodule=TinyData(), ckpt_path=tmp_path / "step=2.ckpt")
    assert trainer.global_step == 4 and monitor.tokens == 4 * 128 and monitor.wall_seconds > 0


def test_the_budget_stops_the_run_where_the_horizon_says(tmp_path: Path) -> None:
    lm = tiny_lm(horizon=TokenBudget(128 * 50))
    # A plan that is wrong about what a step costs.
    lm.plan = type(lm.plan)(50, lm.plan.tokens, flops_budget=25 * lm.step_flops(0))
    trainer = tiny_trainer(tmp_path, [FlopsMonitor()])
    trainer.fit(lm, datamodule=TinyData())
    assert trainer.global_step == 25


@pytest.mark.parametrize("batches, steps", [(3.4, 3), (3.5, 4), (2.5, 2), (3.6, 4)])
def test_planned_and_counted_budget_agree(tmp_path: Path, batches: float, steps: int) -> None:
    lm = tiny_lm(horizon=FlopsBudget(batches * 128 * tiny_lm().flops_per_token))
    trainer = tiny_trainer(tmp_path, [FlopsMonitor()])
    trainer.fit(lm, datamodule=TinyData())
    assert lm.plan.steps == trainer.global_step == steps


@pytest.mark.parametrize(
    "precision, dtype",
    [
        ("bf16-mixed", torch.bfloat16),
        ("16-mixed", torch.float16),
        ("32-true", torch.float32),
        ("bf16-true", torch.bfloat16),
    ],
)
def test_the_peak_is_that_of_the_precision(precision: str, dtype: torch.dtype) -> None:
    assert compute_dtype(precision) is dtype


def test_a_peak_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="peak_flops is -1"):
        FlopsMonitor(-1)


def test_steps_are_planned_steps_also_without_a_budget(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, [FlopsMonitor()])
    trainer.fit(tiny_lm(horizon=Steps(3)), datamodule=TinyData())
    assert trainer.global_step == 3
