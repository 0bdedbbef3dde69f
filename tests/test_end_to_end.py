"""From text to phi's raw material: prepare, train, checkpoint, record, read back, resume, reproduce."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import looped_lm
from fitting import load_runs
from looped_lm import LoopedLM
from tests.support.cli_options import tiny_options


@pytest.fixture
def run(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> tuple[Path, str]:
    """Run folder and output of a tiny r8_hc run through the command line."""
    status, out = run_cli("fit", "--config", "r8_hc.yaml", *tiny_options(tiny_data_dir, steps=4))
    assert status == 0, out
    return in_folder / "runs" / "r8_hc" / "version_0", out


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.rglob(pattern)
    return path


def newest(folder: Path, pattern: str) -> Path:
    """Of the run's checkpoints or their records: their names sort by step."""
    return max(folder.rglob(pattern), key=lambda path: path.name)


def test_the_run_leaves_a_checkpoint_a_record_an_event_file_and_says_where(run: tuple[Path, str]) -> None:
    folder, out = run
    for pattern in ("*.ckpt", "*.run.json", "events.out.tfevents.*"):
        assert newest(folder, pattern).name in out
    record = json.loads(newest(folder, "*.run.json").read_text())
    assert f"{record['val_loss']:.4f} nats/token" in out and "unigram entropy" in out
    assert record["status"] == "completed" and record["run_name"] == "r8_hc" and record["seed"] == 1
    assert record["config"]["model"]["num_recurrences"] == 8
    assert record["components"]["lanes"] == {
        "class_path": "looped_lm.HyperConnectionLanes", "init_args": {"num_lanes": 2},
    }  # fmt: skip
    assert record["tokens"] == 4 * 32 and record["data_manifest_hash"]
    assert (folder / "config.yaml").exists()


def test_fitting_reads_the_run(run: tuple[Path, str]) -> None:
    folder, _ = run
    runs = load_runs(folder)
    record = json.loads(newest(folder, "*.run.json").read_text())
    assert list(runs.r) == [8] and list(runs.val_loss) == [record["val_loss"]]
    assert (list(runs.n_once), list(runs.n_rec)) == ([record["n_once"]], [record["n_rec"]])


def test_the_event_file_holds_the_curves_and_the_hparams(run: tuple[Path, str]) -> None:
    folder, _ = run
    events = EventAccumulator(
        str(only(folder, "events.out.tfevents.*")), size_guidance={"scalars": 0}
    ).Reload()
    tags = set(events.Tags()["scalars"])
    expected = {"train/loss", "val/loss", "val/perplexity", "cost/tokens", "cost/flops", "grad/norm"}
    expected |= {f"lr/{role}" for role in ("matrix", "embedding", "head", "norm", "lanes")}
    expected |= {f"loop/state_norm_{i}" for i in range(8)} | {"final/val_loss"}
    expected |= {f"loop/{kind}_{i}" for kind in ("change", "cosine", "mixing") for i in range(1, 8)}
    expected |= {f"{kind}_lanes" for kind in ("grad/norm", "update/norm", "update/relative")}
    assert expected <= tags
    record = json.loads(newest(folder, "*.run.json").read_text())
    assert events.Scalars("final/val_loss")[-1].value == pytest.approx(record["val_loss"])
    assert [e.step for e in events.Scalars("val/loss")] == [2, 4]
    (session,) = (m for tag, m in events.summary_metadata.items() if tag.endswith("session_start_info"))
    given = HParamsPluginData.FromString(session.plugin_data.content).session_start_info.hparams
    for name in ("n_once", "n_rec", "num_recurrences", "flops_per_token"):
        assert given[name].number_value == pytest.approx(record[name]), name
    assert events.Scalars("final/training_flops")[-1].value == pytest.approx(record["training_flops"])


def test_validate_reproduces_the_stored_loss_exactly(run: tuple[Path, str], run_cli: Any) -> None:
    """From the checkpoint alone: model and data come from the run it was trained in."""
    folder, _ = run
    record = json.loads(newest(folder, "*.run.json").read_text())
    seen: list[float] = []
    original = LoopedLM._log_evaluation

    def spy(self: LoopedLM, prefix: str) -> None:
        seen.append(float(self.val_loss.compute()[0]))
        original(self, prefix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopedLM, "_log_evaluation", spy)
        status, out = run_cli("validate", "--ckpt_path", str(newest(folder, "*.ckpt")))
        assert status == 0, out
        status, out = run_cli("test", "--ckpt_path", str(newest(folder, "*.ckpt")))
        assert status == 0, out
    assert seen == [record["val_loss"], record["val_loss"]]


def test_the_checkpoint_alone_rebuilds_the_model(run: tuple[Path, str]) -> None:
    folder, _ = run
    path = newest(folder, "*.ckpt")
    lm = LoopedLM.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert lm.model.num_recurrences == 8 and lm.model.lanes.num_lanes == 2
    stored = torch.load(path, weights_only=True)["state_dict"]
    assert set(stored) == set(lm.state_dict()) and not [k for k in stored if "_orig_mod" in k]
    assert all(torch.equal(v, stored[k]) for k, v in lm.state_dict().items())


def test_predict_writes_the_loss_of_every_token(run: tuple[Path, str], run_cli: Any) -> None:
    folder, _ = run
    status, out = run_cli("predict", "--ckpt_path", str(newest(folder, "*.ckpt")))
    assert status == 0, out
    path = only(folder.parent, "predictions.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert str(path.relative_to(folder.parent.parent.parent)) in out
    assert len(rows) == 4 and len(rows[0]["token_losses"]) == 16
    record = json.loads(newest(folder, "*.run.json").read_text())
    assert sum(row["loss"] for row in rows) / 4 == pytest.approx(record["val_loss"], rel=1e-6)


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path
) -> None:
    """Model, optimizer, schedule, counters and data position: same weights, tokens and loss, bit by bit."""
    options = ["--config", "r4_hc.yaml", *tiny_options(tiny_data_dir, steps=4)]
    status, out = run_cli("fit", *options, "--run_name=whole")
    assert status == 0, out
    status, out = run_cli("fit", *options, "--run_name=first", "--trainer.max_steps=2")
    assert status == 0, out
    first = newest(in_folder / "runs" / "first", "*.ckpt")
    status, out = run_cli("fit", *options, "--run_name=second", "--ckpt_path", str(first))
    assert status == 0, out

    def final(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        folder = in_folder / "runs" / name
        weights = torch.load(newest(folder, "*.ckpt"), weights_only=True)["state_dict"]
        return weights, json.loads(newest(folder, "*.run.json").read_text())

    (whole, record), (resumed, resumed_record) = final("whole"), final("second")
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)
    for field in ("val_loss", "tokens", "training_flops", "steps", "val_tokens", "status"):
        assert record[field] == resumed_record[field], field


def test_two_processes_equal_one(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    """With the Trainer's own launcher, losses, tokens and FLOPs count all ranks."""
    options = ["--config", "r4_hc.yaml", *tiny_options(tiny_data_dir), "--model.batch_tokens=64"]
    status, out = run_cli("fit", *options, "--run_name=one")
    assert status == 0, out
    command = [sys.executable, "-m", "looped_lm", "fit", *options, "--run_name=two"]
    command += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    root = Path(looped_lm.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr

    def series(name: str) -> dict[str, list[float]]:
        events = EventAccumulator(str(only(in_folder / "runs" / name, "events.out.tfevents.*"))).Reload()
        tags = ("train/loss", "val/loss", "val/tokens", "cost/tokens", "cost/flops", "grad/norm")
        return {tag: [e.value for e in events.Scalars(tag)] for tag in tags}

    one, two = series("one"), series("two")
    for tag, values in one.items():
        assert values == pytest.approx(two[tag], rel=1e-5), tag
    assert json.loads(newest(in_folder / "runs" / "two", "*.run.json").read_text())["world_size"] == 2
