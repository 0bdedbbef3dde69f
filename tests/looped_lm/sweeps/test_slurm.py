"""Sweeps as SLURM job arrays through submitit: settings, scripts, submitit's own local executor, a real cluster."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from looped_lm.sweeps import files, slurm
from looped_lm.sweeps.expansion import expand
from looped_lm.sweeps.place import Place, State
from tests.support.cli_options import tiny_sweep
from tests.support.slurm_cluster import Cluster, program

ROOT = Path(__file__).parents[3]


def test_a_profile_goes_over_the_sweeps_own_settings(tmp_path: Path) -> None:
    profile = tmp_path / "cluster.yaml"
    # YAML 1.1 takes a time without days for a number in base 60.
    profile.write_text("time: 12:00:00\n")
    assert slurm.settings({}, profile, tmp_path / "mine.yaml") == {"time": 12 * 60}
    profile.write_text("partition: gpu\ntime: '1-02:30:00'\noptions: {mail-type: END}\n")
    found = slurm.settings({"partition": "cpu", "gpus": 4, "time": 10}, profile, tmp_path / "mine.yaml")
    assert found == {"partition": "gpu", "gpus": 4, "time": 26 * 60 + 30, "options": {"mail-type": "END"}}
    assert slurm.machine_arguments({"gpus": 4, "nodes": 2}) == (
        "--trainer.devices=4",
        "--trainer.num_nodes=2",
    )
    with pytest.raises(
        ValueError, match=r"mine.yaml, slurm: unknown key 'partitoin'. Did you mean 'partition'"
    ):
        slurm.settings({"partitoin": "cpu"}, None, tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("written", "minutes"), [(90, 90), ("90", 90), ("01:30:00", 90), ("2-00:00:30", 2881), ("00:00:10", 1)]
)
def test_time_limits(written: Any, minutes: int) -> None:
    assert slurm.minutes(written) == minutes


@pytest.mark.parametrize("written", ["soon", "1:30", 0, "-5", "1-2"])
def test_what_is_no_time_limit_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="is neither a number of minutes nor"):
        slurm.minutes(written)


def test_runs_are_submitted_once_as_one_array(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for SLURM keeps the script it was given and says that its jobs are in the queue."""
    programs = in_folder / "bin"
    programs.mkdir()
    program(programs, "srun", "exit 0")
    program(programs, "sbatch", f'cp "$1" {in_folder}/script.sh; echo Submitted batch job 77')
    program(programs, "squeue", "printf '77_0\\n77_1\\n77_2\\n'")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    file = tiny_sweep(in_folder, tiny_data_dir, seeds=3, steps=4)
    text = (
        file.read_text().removesuffix("}") + ', "slurm": {"partition": "gpu", "account": "mine", "gpus": 2}}'
    )
    file.write_text(text)
    (in_folder / "profile.yaml").write_text("time: '02:00:00'\nnodes: 1\nat_once: 2\nsignal_seconds: 120\n")
    submit = ["sweep", "run", str(file), "--launcher", "slurm", "--profile", "profile.yaml"]
    status, out = run_cli(*submit)
    assert status == 0 and "Submitted 3 runs, jobs 77_0 to 77_2" in out, out
    script = (in_folder / "script.sh").read_text()
    for option in (
        "array=0-2%2", "partition=gpu", "account=mine", "gpus-per-node=2", "ntasks-per-node=2", "nodes=1", "time=120",
        "requeue", "signal=USR2@120", "open-mode=append", "job-name=tiny",
    ):  # fmt: skip
        assert f"#SBATCH --{option}\n" in script, script
    place = Place(Path("runs"), "tiny")
    first = expand(files.load(file))[0]
    place.note(first, command=["fit"])
    place.note(first, exit_status=1)
    status, out = run_cli("sweep", "status", str(file))
    assert "3 queued" in out and "retry" not in out, "one that failed and was submitted again is queued, too"
    (place.folder(first) / "attempts.jsonl").unlink()
    (in_folder / "script.sh").unlink()
    status, out = run_cli(*submit)
    assert status == 0 and "3 are in SLURM's queue already" in out and not (in_folder / "script.sh").exists()
    program(programs, "squeue", "printf '77_1\\n'")
    status, out = run_cli(*submit)
    assert "Submitted 2 runs" in out


def test_without_slurm_the_message_says_what_to_do(
    run_cli: Any, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_folder / "mine.yaml").write_text("grid: {config: r4.yaml}")
    monkeypatch.setenv("PATH", str(in_folder))
    status, out = run_cli("sweep", "run", "mine.yaml", "--launcher", "slurm")
    assert status == 1 and "--launcher local" in out


@pytest.mark.slow
def test_submitit_runs_a_sweep_in_processes_of_its_own(tmp_path: Path, tiny_data_dir: Path) -> None:
    import submitit

    runs = expand(files.load(tiny_sweep(tmp_path, tiny_data_dir, seeds=2, steps=4)))
    place = Place(tmp_path / "runs", "tiny")
    made = submitit.LocalExecutor(tmp_path / "jobs")
    made.update_parameters(timeout_min=10)
    for run in runs:
        for job in made.map_array(slurm.task, [place], [run], [()], [0]):
            job.result()
    assert [place.status(run).state for run in runs] == [State.FINISHED] * 2
    assert [place.status(run).attempts for run in runs] == [1, 1]


@pytest.mark.slow
def test_twelve_runs_on_a_real_cluster_one_of_them_requeued(
    cluster: Cluster, run_cli: Any, in_folder: Path, tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tiny_sweep(in_folder, tiny_data_dir, seeds=12, steps=200)
    (in_folder / "profile.yaml").write_text(
        "time: 30\ncpus: 1\nat_once: 2\nsetup: [export OMP_NUM_THREADS=1]\n"
    )
    status, out = run_cli("sweep", "run", str(file), "--launcher", "slurm", "--profile", "profile.yaml")
    assert status == 0 and "Submitted 12 runs" in out, out
    print(out)
    runs = expand(files.load(file))
    place = Place(Path("runs"), "tiny")
    first = slurm.queued(place, runs)[runs[0].hash]
    cluster.wait_for(lambda: bool(list(place.folder(runs[0]).rglob("*.ckpt"))), "a checkpoint")

    def signalled() -> bool:
        # The next attempt may have begun since.
        if any("exit_status" in event for event in place.attempts(runs[0])):
            return True
        # SLURM may refuse at times, also after it has passed the signal on.
        with suppress(RuntimeError):
            cluster.call("scancel", "--signal=USR2", first)
        return False

    cluster.wait_for(signalled, "the end of the first attempt")
    # The task that was requeued comes after all the others.
    cluster.wait_for(lambda: all(place.finished(run) for run in runs), "the end of the sweep", seconds=2400)
    told = [
        line
        for line in place.log(runs[0]).read_text().splitlines()
        if "requeued" in line or "Resuming" in line
    ]
    print("\n".join(told))
    assert "is requeued" in told[0] and "Resuming from" in told[1]
    ends = [[e["exit_status"] for e in place.attempts(run) if "exit_status" in e] for run in runs]
    assert ends == [[75, 0], *[[0]] * 11]
    assert len(list(place.records.iterdir())) == 12
    status, out = run_cli("sweep", "status", str(file))
    print(out)
    assert "12 runs: 12 finished" in out
