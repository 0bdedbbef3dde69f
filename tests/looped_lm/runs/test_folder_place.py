"""Where `fit` goes on and where it writes: --resume, --ckpt_path, the run's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from looped_lm.configuration.config_files import BASE
from looped_lm.runs import folder as run_folder
from tests.support.checkpoint_files import flip
from tests.support.cli_options import tiny_options

CHECKPOINTS = Path("runs/r4/version_0/checkpoints")


def names(folder: Path = CHECKPOINTS) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_same_command_again_and_again(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    """What a requeued job does: start, go on, go on from before a damaged checkpoint, find nothing left to do."""
    command = ["fit", "--config", "r4.yaml", *tiny_options(tiny_data_dir, steps=8), "--resume", "auto"]

    status, out = run_cli(*command, "--trainer.max_steps=4")
    assert status == 0 and "No checkpoint of this run in runs/r4: it starts anew." in out, out
    assert names() == ["step=000002.ckpt", "step=000002.run.json", "step=000004.ckpt", "step=000004.run.json"]

    flip(CHECKPOINTS / "step=000004.ckpt", (CHECKPOINTS / "step=000004.ckpt").stat().st_size // 2)
    (CHECKPOINTS / "step=000006.ckpt.partial").write_bytes(b"half")
    (CHECKPOINTS / "step=000002.run.json").unlink()
    status, out = run_cli(*command, "--trainer.max_steps=4", "--data.val_rows=3")
    assert status == 0 and "step=000004.ckpt is damaged: the checksum of" in out, out
    assert f"Resuming from {CHECKPOINTS}/step=000002.ckpt, step 2." in out
    assert "data.init_args.val_rows: 2 in the checkpoint, 3 here" in out and "max_steps:" not in out
    assert names() == [
        "step=000002.ckpt",
        "step=000002.run.json",
        "step=000004.ckpt",
        "step=000004.ckpt.damaged",
        "step=000004.run.json",
    ]

    status, out = run_cli(*command)
    assert status == 0 and "step=000004.ckpt, step 4." in out and "8 of 8" in out, out
    assert "trainer.max_steps: 4 in the checkpoint, -1 here" in out
    kept = [name for name in names() if name.endswith(".ckpt")]
    assert kept == ["step=000006.ckpt", "step=000008.ckpt"], "none stays for having been resumed from"
    parts = [yaml.safe_load(p.read_text()) for p in sorted(CHECKPOINTS.parent.glob("config*.yaml"))]
    assert [p["trainer"]["max_steps"] for p in parts] == [4, 4, -1]

    before = {p: p.stat().st_mtime_ns for p in in_folder.rglob("*")}
    status, out = run_cli(*command)
    assert status == 0 and "The run is complete (8 steps): nothing is left to do." in out, out
    assert {p: p.stat().st_mtime_ns for p in in_folder.rglob("*")} == before

    # As a kill between a checkpoint and its record leaves it.
    last = CHECKPOINTS / "step=000008.run.json"
    record = last.read_text()
    last.unlink()
    status, out = run_cli(*command)
    assert status == 0 and "nothing is left to do" in out and last.read_text() == record

    status, out = run_cli(*command, "--seed_everything=2")
    assert status == 1 and "was trained with seed_everything 1, and 2 is given: that is another run" in out
    assert [p.name for p in Path("runs/r4").iterdir()] == ["version_0"]


def test_a_checkpoint_by_path(run_cli: Any, in_folder: Path, tiny_data_dir: Path, monkeypatch: Any) -> None:
    """From the last one of a run it goes on in that run's folder, from an earlier one in a new one."""
    command = ["fit", "--config", "r4.yaml", *tiny_options(tiny_data_dir, steps=6)]
    status, out = run_cli(*command, "--trainer.max_steps=4")
    assert status == 0, out
    last = CHECKPOINTS / "step=000004.ckpt"
    shutil.copy(last, in_folder / "damaged.ckpt")
    shutil.copy(CHECKPOINTS / "step=000002.ckpt", in_folder / "whole.ckpt")
    flip(in_folder / "damaged.ckpt", last.stat().st_size // 2)
    status, out = run_cli(*command, "--ckpt_path=damaged.ckpt")
    assert status == 1 and "damaged.ckpt is damaged" in out and "--ckpt_path whole.ckpt" in out

    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.0)
    with run_folder.held(CHECKPOINTS.parent):
        status, out = run_cli(*command, "--ckpt_path", str(last))
        assert status == 1 and "version_0 is being written by process" in out, out

    status, out = run_cli(*command, "--ckpt_path", str(CHECKPOINTS / "step=000002.ckpt"))
    assert status == 0 and "(step=000004.ckpt is later): the run goes on in a new folder" in out, out
    assert names()[-1] == "step=000004.run.json" and "version_1" in out

    status, out = run_cli(*command, "--ckpt_path", str(last))
    assert status == 0 and "version_0" in out and "version_2" not in out, out
    both = [
        torch.load(f"runs/r4/version_{i}/checkpoints/step=000006.ckpt", weights_only=True) for i in (0, 1)
    ]
    assert all(torch.equal(w, both[1]["state_dict"][k]) for k, w in both[0]["state_dict"].items())


def test_a_run_named_by_its_folder_goes_on_there(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    """And writes nothing into the folder of another run, whatever its configs are called."""
    command = ["fit", "--config", "r4.yaml", *tiny_options(tiny_data_dir, steps=4)]
    status, out = run_cli(*command, "--run_name=other", "--trainer.max_steps=2")
    assert status == 0, out
    status, out = run_cli(*command, "--resume=runs/other/version_0", "--run_name=mine")
    assert status == 1 and "writes into runs/mine: give --run_name other, and runs as" in out, out
    status, out = run_cli(*command, "--resume=runs/other/version_0")
    assert status == 0 and "4 of 4" in out, out
    assert [str(p) for p in Path("runs").iterdir()] == ["runs/other"]
    record = json.loads(Path("runs/other/version_0/checkpoints/step=000004.run.json").read_text())
    assert record["run_name"] == "other"
    assert Path("runs/other/version_0/config_resumed_1.yaml").is_file()


def test_two_checkpoint_callbacks_may_share_a_folder(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path
) -> None:
    """Each removes its own files only, after a resume, too."""
    first = {"dirpath": "kept/../kept", "monitor": "step", "mode": "min", "filename": "first"}
    callbacks = yaml.safe_load(BASE.read_text())["trainer"]["callbacks"]
    (saves,) = [c for c in callbacks if c["class_path"] == "callbacks.Checkpoints"]
    saves["init_args"] |= {"dirpath": "kept", "keep": 1}
    callbacks.append({"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": first})
    Path("own.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    command = ["fit", "--config", "own.yaml", *tiny_options(tiny_data_dir, steps=6), "--resume=auto"]
    for stop in (4, 6):
        status, out = run_cli(*command, f"--trainer.max_steps={stop}")
        assert status == 0, out
        assert {p.name for p in Path("kept").glob("*.ckpt")} == {"first.ckpt", f"step={stop:06d}.ckpt"}


@pytest.mark.parametrize(
    "options, says",
    [
        (["--resume=auto", "--ckpt_path=own.ckpt"], "'own.ckpt' is not a file"),
        (["--resume=nowhere"], "resume 'nowhere' is not a run's folder with a whole checkpoint"),
        (["--trainer.logger.version=3"], "version_3 holds results already, and they are not overwritten"),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=taken"],
            "taken (dirpath of the checkpoint callback) holds checkpoints of another run, such as a.ckpt",
        ),
    ],
)
def test_what_is_in_the_way_is_refused(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, options: list[str], says: str
) -> None:
    for there in ("runs/r4/version_3/mine.txt", "taken/a.ckpt"):
        (in_folder / there).parent.mkdir(parents=True)
        (in_folder / there).write_text("mine")
    status, out = run_cli("fit", "--config", "r4.yaml", *tiny_options(tiny_data_dir), *options)
    assert status == 1 and says in out, out
    assert (in_folder / "runs/r4/version_3/mine.txt").read_text() == "mine"
    assert (in_folder / "taken/a.ckpt").read_text() == "mine"


def test_resume_is_for_fit(run_cli: Any) -> None:
    status, out = run_cli("validate", "--resume=auto")
    assert status == 1 and "resume is for fit; validate takes a checkpoint, with --ckpt_path FILE" in out
