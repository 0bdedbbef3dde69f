"""Final validation, run record, guard, hparams, progress and summary on a tiny run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks import (
    DivergenceGuard,
    FinalValidation,
    FlopsMonitor,
    HParams,
    RunRecordWriter,
    RunSummary,
    StepProgressBar,
)
from fitting.records import RunRecord, record_path
from looped_lm import LoopedLM
from looped_lm.common.errors import UserError
from looped_lm.runs.checkpoint import verify
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import SEQ_LEN, TinyData, tiny_lm, tiny_trainer


def run(folder: Path, lm: LoopedLM, *more: L.Callback, **trainer: Any) -> L.Trainer:
    checkpoint = ModelCheckpoint(folder, filename="{step}", save_top_k=1)
    callbacks = [FlopsMonitor(), FinalValidation(), DivergenceGuard(), RunRecordWriter(), *more, checkpoint]
    t = tiny_trainer(folder, callbacks, enable_checkpointing=True, **trainer)
    t.fit(lm, datamodule=TinyData())
    return t


def test_the_record_lies_beside_and_inside_the_final_checkpoint(tmp_path: Path) -> None:
    lm = tiny_lm(val_every_steps=3)
    lm.provenance = {"run_name": "tiny", "seed": 7, "config": {"model": {"size": 1}}}
    trainer = run(tmp_path, lm)
    path = tmp_path / "step=4.ckpt"
    record = RunRecord.from_json(record_path(path).read_text())
    assert record.to_dict() == torch.load(path, weights_only=True)["run_record"]
    assert (record.status, record.steps, record.steps_planned, record.stop_reason) == (
        "completed",
        4,
        4,
        None,
    )
    assert (record.tokens, record.batch_tokens, record.val_tokens, record.val_step) == (
        512,
        128,
        12 * SEQ_LEN,
        4,
    )
    assert record.val_loss == float(trainer.callback_metrics["val/loss"])
    assert record.training_flops == pytest.approx(512 * lm.flops_per_token)
    assert (record.run_name, record.seed, record.config) == ("tiny", 7, {"model": {"size": 1}})
    assert record.components["injection"] == {"class_path": "looped_lm.LinearInjection", "init_args": {}}
    assert record.n_once + record.n_rec == lm.sections.n and record.flops_convention == "paper"
    assert (record.data_manifest_hash, record.unique_tokens) == ("0" * 8, 10_000)
    assert sorted(p.name for p in tmp_path.glob("step=*")) == ["step=4.ckpt", "step=4.run.json"], (
        "older ones are removed"
    )


def test_a_low_precision_does_not_round_the_recorded_loss(tmp_path: Path) -> None:
    run(tmp_path, tiny_lm(), precision="bf16-true")
    record = RunRecord.from_json((tmp_path / "step=4.run.json").read_text())
    assert record.val_loss is not None and record.val_tokens == 12 * SEQ_LEN
    assert float(torch.tensor(record.val_loss, dtype=torch.bfloat16)) != record.val_loss


def test_a_checkpoint_before_the_end_is_recorded_as_stopped(tmp_path: Path) -> None:
    run(tmp_path, tiny_lm(val_every_steps=2), max_steps=3)
    record = RunRecord.from_json((tmp_path / "step=3.run.json").read_text())
    assert (
        record.status == "stopped" and record.stop_reason == "at step 3 of 4" and record.val_loss is not None
    )


def test_final_validation_covers_all_rows_and_happens_once(tmp_path: Path) -> None:
    logger = RecordingLogger()
    run(tmp_path, tiny_lm(val_every_steps=2), logger=logger)
    assert logger.series("val/tokens") == [(2, 4.0 * SEQ_LEN), (4, 12.0 * SEQ_LEN)]


@pytest.mark.parametrize("log_every, says", [(1, "train/loss is nan"), (50, "is not finite")])
def test_a_nan_stops_the_run_keeps_the_checkpoint_and_is_recorded(
    tmp_path: Path, log_every: int, says: str
) -> None:
    """No checkpoint replaces the last good one, at logging steps and between them."""
    with pytest.raises(FloatingPointError, match=rf"{says} at step 2: .*before it are in {tmp_path}"):
        _poisoned(tmp_path, log_every)
    assert [p.name for p in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]
    assert torch.isfinite(
        torch.load(tmp_path / "step=1.ckpt", weights_only=True)["state_dict"]["model.head.weight"]
    ).all()
    record = RunRecord.from_json(next(tmp_path.glob("diverged-*.run.json")).read_text())
    assert record.status == "diverged" and record.steps == 2 and says in (record.stop_reason or "")


def _poisoned(folder: Path, log_every: int) -> None:
    """A run with a checkpoint after every step, whose weights go bad between the first and the second."""
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1)
    callbacks = [FlopsMonitor(), DivergenceGuard(), RunRecordWriter(), save]
    trainer = tiny_trainer(folder, callbacks, enable_checkpointing=True, log_every_n_steps=log_every)
    lm = tiny_lm()

    def poison(batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            with torch.no_grad():
                lm.model.head.weight.fill_(float("nan"))

    lm.on_train_batch_start = poison  # type: ignore[method-assign,assignment]
    trainer.fit(lm, datamodule=TinyData())


def test_a_nan_found_in_validation_is_recorded_too(tmp_path: Path) -> None:
    """Where base.yaml's checkpoints are written; the stage is then not training."""
    lm = tiny_lm(val_every_steps=2)

    def poison(*args: Any) -> None:
        with torch.no_grad():
            lm.model.head.weight.fill_(float("nan"))

    lm.on_validation_start = poison  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="val/loss is nan at step 2"):
        run(tmp_path, lm)
    (record,) = tmp_path.glob("*.run.json")
    assert RunRecord.from_json(record.read_text()).status == "diverged"


def test_a_run_without_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit_val_batches is 0: without validation"):
        run(tmp_path, tiny_lm(), limit_val_batches=0)


def test_a_crash_is_recorded_as_stopped(tmp_path: Path) -> None:
    class Crash(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        run(tmp_path, tiny_lm(), Crash())
    record = RunRecord.from_json(next(tmp_path.glob("stopped-*.run.json")).read_text())
    assert record.stop_reason == "OSError: the disk is gone" and record.val_loss is None


def test_a_disk_that_fills_up_leaves_the_earlier_checkpoint(
    tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    run(tmp_path, tiny_lm(val_every_steps=2))
    size = (tmp_path / "step=4.ckpt").stat().st_size
    disk = small_disk(int(1.6 * size / 1024))
    with pytest.raises(
        UserError, match=r"step=4.ckpt could not be written \(No space left on device\). Earlier"
    ):
        run(disk, tiny_lm(val_every_steps=2))
    left = sorted(p.name for p in disk.iterdir())
    assert left[:2] == ["step=2.ckpt", "step=2.run.json"] and not [n for n in left if "partial" in n]
    verify(disk / "step=2.ckpt")


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content, name, then the name of the old one is taken away: a power cut between any two leaves a whole one."""
    done: list[str] = []

    def note(target: Any, name: str, describe: Callable[..., str]) -> None:
        real = getattr(target, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            done.append(describe(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(target, name, noted)

    def name_of(handle: int) -> str:
        return plain(Path(os.readlink(f"/proc/self/fd/{handle}")))

    def plain(path: Path) -> str:
        return re.sub(r"\.[0-9a-f]{8}\.partial$", ".partial", path.name)

    note(os, "fsync", lambda handle: f"flush {name_of(handle)}")
    note(Path, "replace", lambda old, new: f"{plain(old)} -> {Path(new).name}")
    note(TorchCheckpointIO, "remove_checkpoint", lambda io, path: f"remove {Path(path).name}")
    run(tmp_path, tiny_lm(val_every_steps=2))
    second = done[done.index("flush step=4.ckpt.partial") :]
    assert [d for d in second if "json" not in d] == [
        "flush step=4.ckpt.partial",
        "step=4.ckpt.partial -> step=4.ckpt",
        f"flush {tmp_path.name}",
        "remove step=2.ckpt",
    ]


def test_hparams_carry_the_final_loss(tmp_path: Path) -> None:
    logger = RecordingLogger()
    trainer = run(tmp_path, tiny_lm(), HParams(), logger=logger)
    params, metrics = logger.hparams[-1]
    assert metrics is None and params["num_recurrences"] == 2 and params["injection"] == "LinearInjection"
    assert params["final/val_loss"] == float(trainer.callback_metrics["val/loss"])


def test_the_summary_names_loss_tokens_flops_and_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, tiny_lm(), RunSummary())
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "step=4.run.json").read_text())
    for part in (
        f"{record['val_loss']:.4f} nats/token",
        "unigram entropy  4.1109",
        "512",
        "step=4.ckpt",
        "step=4.run.json",
    ):
        assert part in out, part


def test_the_progress_bar_counts_optimizer_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = StepProgressBar()
    callbacks = [FlopsMonitor(), bar]
    trainer = tiny_trainer(tmp_path, callbacks, enable_progress_bar=True)
    trainer.fit(tiny_lm(), datamodule=TinyData(2))
    assert bar.train_progress_bar.total == 4 and bar.train_progress_bar.n == 4
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "4/4" in text and "tok/s" in text and "(100%)" in text


def test_the_progress_bar_goes_on_after_a_resume(tmp_path: Path) -> None:
    run(tmp_path, tiny_lm(), max_steps=2)
    bar = StepProgressBar()
    trainer = tiny_trainer(tmp_path, [FlopsMonitor(), bar], enable_progress_bar=True)
    trainer.fit(tiny_lm(), datamodule=TinyData(), ckpt_path=tmp_path / "step=2.ckpt")
    assert (bar.train_progress_bar.initial, bar.train_progress_bar.total, bar.train_progress_bar.n) == (
        2,
        4,
        4,
    )


@pytest.mark.parametrize("callback", [RunRecordWriter(), StepProgressBar()])
def test_a_missing_flops_monitor_is_named(tmp_path: Path, callback: L.Callback) -> None:
    with pytest.raises(ValueError, match="needs callbacks.FlopsMonitor.*`trainer.callbacks\\+` appends"):
        tiny_trainer(tmp_path, [callback], enable_progress_bar=isinstance(callback, StepProgressBar)).fit(
            tiny_lm(), datamodule=TinyData()
        )
