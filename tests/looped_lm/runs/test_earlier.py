"""Runs that an earlier version wrote load, are judged as they were, and go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from looped_lm import LoopedLM
from looped_lm.runs.checkpoint import load_checkpoint

EARLIER = Path(__file__).parents[2] / "support" / "earlier"
CHECKPOINTS = Path("runs/tiny/version_0/checkpoints")


@pytest.fixture
def earlier(in_folder: Path) -> Path:
    """A working folder with a copy of the run, its data and its configuration; its last checkpoint."""
    shutil.copytree(EARLIER / "runs" / "tiny", "runs/tiny")
    shutil.copytree(EARLIER / "data", "data")
    shutil.copy(EARLIER / "tiny.yaml", "tiny.yaml")
    return CHECKPOINTS / "step=000004.ckpt"


def test_its_checkpoint_alone_rebuilds_the_module(earlier: Path) -> None:
    lm = LoopedLM.load_from_checkpoint(earlier, map_location="cpu")
    stored = load_checkpoint(earlier)["state_dict"]
    assert lm.state_dict().keys() == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in lm.state_dict().items())


def test_its_validation_loss_is_the_recorded_one(run_cli: Any, earlier: Path) -> None:
    recorded = json.loads(earlier.with_suffix(".run.json").read_text())
    status, out = run_cli("validate", "--ckpt_path", str(earlier), "--trainer.logger=true")
    assert status == 0, out
    (rows,) = [line for line in out.splitlines() if "val/loss" in line]
    assert f"{recorded['val_loss']:.6f}"[:6] in rows


def test_the_same_command_finds_it_complete(run_cli: Any, earlier: Path) -> None:
    status, out = run_cli("fit", "--config", "tiny.yaml", "--resume=auto")
    assert status == 0 and "The run is complete (4 steps): nothing is left to do." in out, out


@pytest.mark.parametrize("config", ["tiny.yaml", "runs/tiny/version_0/config.yaml"])
def test_it_goes_on_with_a_longer_horizon(run_cli: Any, earlier: Path, config: str) -> None:
    """With its YAML, whose class paths are the old modules', and with the resolved one in its folder."""
    before = json.loads(earlier.with_suffix(".run.json").read_text())
    state = load_checkpoint(earlier)
    status, out = run_cli("fit", "--config", config, "--resume=auto", "--model.horizon.steps=8")
    assert status == 0, out
    assert "Resuming from" in out and "step 4." in out and "8 of 8" in out
    assert "horizon.init_args.steps: 4 in the checkpoint, 8 here" in out
    after = json.loads((CHECKPOINTS / "step=000008.run.json").read_text())
    assert after["tokens"] == 2 * before["tokens"] and after["status"] == "completed"
    assert after["components"]["injection"] == before["components"]["injection"]
    assert after["wall_seconds"] > before["wall_seconds"], "the states of callbacks were taken over"
    resumed = load_checkpoint(CHECKPOINTS / "step=000008.ckpt")
    assert resumed["callbacks"].keys() == state["callbacks"].keys()
    assert resumed["TokenDataModule"].keys() == state["TokenDataModule"].keys()
