"""Launchers that are killed, runs that are killed, two launchers at once: every run ends once, with its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fitting.records import RunRecord
from looped_lm.sweeps.local import LocalLauncher, duration
from looped_lm.sweeps.place import Place
from tests.support.cli_options import tiny_sweep

ROOT = Path(__file__).parents[3]


def drive(folder: Path, file: Path, kills: int, seed: int) -> dict[str, Any]:
    script = str(ROOT / "tests" / "support" / "sweep_drive.py")
    done = subprocess.run(
        [sys.executable, script, str(folder), str(file), str(kills), str(seed)],
        capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(folder: Path, report: dict[str, Any], count: int) -> None:
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
    assert report["states"] == ["finished"] * count, logs
    assert report["exits"] == [-9, 0, 0], logs
    assert len(report["records"]) == count
    for name, events in report["attempts"].items():
        ends = [e["exit_status"] for e in events if "exit_status" in e]
        assert ends.count(0) == 1, f"{name} was trained to its end more than once: {events}"
        # Nobody began where another one was still at it.
        order = sorted(events, key=lambda e: e["time"])
        for one, two in zip(order, order[1:], strict=False):
            if "exit_status" in two:
                assert one["process"] == two["process"], order
        assert report["begun"][name] == 1, "it went on in the folder with its checkpoints"
    for path in (folder / "runs" / "tiny" / "records").iterdir():
        record = RunRecord.load(path)
        assert record.finished and record.val_loss and record.config and record.code_version
        assert record.data_manifest_hash and record.run_name == path.name.removesuffix(".run.json")


@pytest.mark.slow
def test_a_killed_launcher_and_two_at_once(tmp_path: Path, tiny_data_dir: Path) -> None:
    file = tiny_sweep(tmp_path, tiny_data_dir, seeds=3, steps=40)
    report = drive(tmp_path, file, kills=0, seed=1)
    check(tmp_path, report, 3)
    after = (tmp_path / "second.log").read_text() + (tmp_path / "third.log").read_text()
    assert "finished  " in after or "elsewhere " in after, (
        "nothing was left for the launchers that came after"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twelve_runs_a_killed_launcher_and_two_killed_runs(
    seed: int, tmp_path: Path, tiny_data_dir: Path
) -> None:
    file = tiny_sweep(tmp_path, tiny_data_dir, seeds=12, steps=100)
    report = drive(tmp_path, file, kills=2, seed=seed)
    check(tmp_path, report, 12)
    killed = sum(
        "exit_status" not in one and ("exit_status" not in two)
        for events in report["attempts"].values()
        for one, two in zip(events, events[1:], strict=False)
    )
    assert killed >= 2, "the kills hit nothing"


def test_times_are_told_in_units_that_suit(tmp_path: Path) -> None:
    assert [duration(s) for s in (5, 119, 600, 7200, 5 * 86400)] == [
        "5 s",
        "119 s",
        "10.0 min",
        "2.0 h",
        "5.0 days",
    ]
    launcher = LocalLauncher(Place(tmp_path, "x"), 4, ["0", "1"], {}, {})
    assert launcher.threads == max(1, len(os.sched_getaffinity(0)) // 4)
