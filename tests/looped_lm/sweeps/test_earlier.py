"""Runs that were begun under other ids: by the version before, and before a key existed."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fitting.records import RunRecord
from looped_lm.sweeps import files
from looped_lm.sweeps.earlier import Earlier
from looped_lm.sweeps.expansion import expand
from looped_lm.sweeps.identity import identity, resolve, resolve_again, values
from looped_lm.sweeps.place import Place
from looped_lm.sweeps.runs import Run

ROOT = Path(__file__).parents[3]
EARLIER = ROOT / "tests" / "support" / "earlier"
#: Of the third run, which waits in SLURM's queue.
QUEUED = "r4_additive-num_recurrences=1-24f5cd54"


@pytest.fixture
def earlier(in_folder: Path) -> Path:
    """The working folder: a copy of what the version before wrote, with its invented paths made real."""
    shutil.copytree(EARLIER, in_folder, dirs_exist_ok=True)
    for path in in_folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml"):
            text = path.read_text().replace("/home/you/src/configs", str(ROOT / "configs"))
            path.write_text(text.replace("/home/you/made", str(in_folder)))
    return in_folder


def waiting_call(folder: Path) -> tuple[Any, Place, Run, tuple[str, ...], int]:
    """The call of the queued job, with its paths made real."""
    task, place, run, extra, attempts = pickle.loads((folder / "queued.pkl").read_bytes())
    place.root = folder / "runs" / "sweep"
    place.records = place.root / "records"
    vars(run)["configs"] = (str(ROOT / "configs" / "r4_additive.yaml"), str(folder / "scale.yaml"))
    return task, place, run, extra, attempts


#: In one process that imports everything once: looks at the sweep, makes the queued job's call, trains the rest. Two
#: runs at a time have a thread each, which is quicker than two threads that wait for a busy core.
GO_ON = """
import multiprocessing, pickle, sys
from looped_lm.commands import sweep
sweep.main(["status", "sweep.yaml"])
task, *call = pickle.load(open("call.pkl", "rb"))
job = multiprocessing.get_context("fork").Process(target=task, args=call)
job.start()
job.join()
sys.exit(job.exitcode or sweep.main(["run", "sweep.yaml", "--jobs", "2"]))
"""


def test_a_sweep_of_the_version_before_goes_on(earlier: Path, run_cli: Any) -> None:
    (earlier / "call.pkl").write_bytes(pickle.dumps(waiting_call(earlier)))
    done = subprocess.run([sys.executable, "-c", GO_ON], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    before, job_done = (line for line in done.stdout.splitlines() if "4 runs: " in line)
    assert before == "4 runs: 1 finished, 1 interrupted, 2 waiting"
    assert all(f"\n{name} " in done.stdout for name in ("571a6515", "a3dabe6b")), "as their folders are named"
    root = earlier / "runs" / "sweep"
    assert (root / ".claims" / "24f5cd54").exists()
    assert RunRecord.load(root / "records" / f"{QUEUED}.run.json").finished
    assert job_done == "sweep: 4 runs: 2 finished, 1 interrupted, 1 waiting"
    interrupted = root / "r4-num_recurrences=2-a3dabe6b"
    assert re.search(r"Resuming from .*step=000002", (interrupted / "log.txt").read_text())
    assert [path.name for path in interrupted.glob("version_*")] == ["version_0"]
    status, out = run_cli("sweep", "records", "sweep.yaml")
    assert "4 of 4 runs are finished" in out and "belong to no run" not in out, out
    records = {path.name: RunRecord.load(path) for path in (root / "records").iterdir()}
    assert len(records) == 4 and records[f"{interrupted.name}.run.json"].steps == 4
    assert all(record.run_name == name.removesuffix(".run.json") for name, record in records.items())


def test_a_call_that_waited_in_the_queue_sees_what_was_trained_meanwhile(earlier: Path) -> None:
    _, _, run, _, _ = waiting_call(earlier)
    run_of_today = expand(files.load(Path("sweep.yaml")))[2]
    assert run.hash == "24f5cd54" != run_of_today.hash
    place = Place(Path("runs"), "sweep")
    place.note(run_of_today, command=["fit", *run_of_today.arguments()])
    command = place.command(run_of_today)
    place.note(run_of_today, command=command)
    _, queued_place, *_ = waiting_call(earlier)
    assert queued_place.folder(run) == place.folder(run_of_today)


def test_a_job_that_waits_in_the_queue_keeps_its_folder(earlier: Path) -> None:
    """Its folder holds the number of the job alone, and submitit's file the call."""
    helpers = pytest.importorskip("submitit.core.utils")
    root = earlier / "runs" / "sweep"
    (root / QUEUED).mkdir()
    (root / QUEUED / "queued.json").write_text('{"job": "77_0"}')
    run = expand(files.load(Path("sweep.yaml")))[2]
    assert Place(Path("runs"), "sweep").name(run) == run.id, "without submitit's file nobody can know"
    (root / "slurm").mkdir()
    helpers.DelayedSubmission(*waiting_call(earlier)).dump(root / "slurm" / "77_0_submitted.pkl")
    place = Place(Path("runs"), "sweep")
    assert place.name(run) == QUEUED and place.hash(run) == "24f5cd54"


def stored(root: Path, name: str, config: dict[str, Any]) -> None:
    checkpoints = root / name / "version_0" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step=000001.run.json").write_text(json.dumps({"config": config}))


@pytest.mark.parametrize(("repeat", "found"), [(0, True), (1, False)])
def test_a_key_that_did_not_exist_then_is_at_its_default(tmp_path: Path, repeat: int, found: bool) -> None:
    """An optional argument more, of a class that anybody may have written, trains nothing again."""
    run = Run("mine", (), {"data.seed": repeat}, {"data.seed": repeat})
    config = resolve(run.arguments())
    del config["data"]["init_args"]["seed"]
    stored(tmp_path, "mine-00000000", config)
    assert Earlier(tmp_path, tmp_path / "records").name(run) == ("mine-00000000" if found else None)


def test_a_record_that_lacks_a_part_is_another_run_and_a_fault_of_ours_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("mine", (), {"data.seed": 0}, {"data.seed": 0})
    config = resolve(run.arguments())
    stored(tmp_path, "mine-00000000", {key: config[key] for key in ("model", "data", "trainer")})
    assert Earlier(tmp_path, tmp_path / "records").name(run) is None

    def faulty(config: Any) -> Any:
        raise KeyError("ours")

    monkeypatch.setattr("looped_lm.sweeps.identity.resolve_again", faulty)
    with pytest.raises(KeyError, match="ours"):
        Earlier(tmp_path, tmp_path / "records").name(run)


def test_what_names_no_class_stays_as_it_is() -> None:
    for path in ("gone.Class", "Class", ".Class", "looped_lm.loop", "math.pi"):
        assert values({"model": {"class_path": path}}) == {"model": path}


def test_a_value_that_differs_is_another_run(tmp_path: Path) -> None:
    run = Run("mine", (), {"model.size": 3}, {"model.size": 3})
    stored(tmp_path, "mine-00000000", resolve(["--model.size=4"]))
    assert Earlier(tmp_path, tmp_path / "records").name(run) is None


def test_a_configuration_alone_or_a_command_line_alone_tells_the_run(tmp_path: Path) -> None:
    run = Run("mine", (), {"model.size": 3}, {"model.size": 3})
    folder = tmp_path / "mine-00000000"
    (folder / "version_0").mkdir(parents=True)
    (folder / "version_0" / "config.yaml").write_text(yaml.safe_dump(resolve(run.arguments())))
    assert Earlier(tmp_path, tmp_path / "records").name(run) == folder.name
    shutil.rmtree(folder / "version_0")
    assert Earlier(tmp_path, tmp_path / "records").name(run) is None
    place = Place(tmp_path.parent, tmp_path.name)
    (folder / "attempts.jsonl").write_text(json.dumps({"command": place.command(run)}) + "\n")
    assert Earlier(tmp_path, tmp_path / "records").name(run) == folder.name


def test_an_axis_at_its_default_changes_no_identity() -> None:
    config = resolve(["--model.num_recurrences=2"])
    before = {**config, "model": {k: v for k, v in config["model"].items() if k != "residual"}}
    assert "residual" in config["model"]
    assert identity(values(before), ()) == identity(values(config), ())
    scaled = resolve(["--model.num_recurrences=2", "--model.residual=looped_lm.ScaledResidual"])
    assert identity(values(scaled), ()) != identity(values(config), ())
    assert identity(values(resolve_again(before)), ()) == identity(values(config), ())
