"""Hands a sweep to SLURM as a job array, through submitit. Queueing, limits and requeueing are SLURM's."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitting.records import write_text_atomically
from looped_lm.common.errors import UserError
from looped_lm.sweeps.earlier import MARKER
from looped_lm.sweeps.files import read_yaml, refuse_unknown
from looped_lm.sweeps.place import Place
from looped_lm.sweeps.runs import Run
from looped_lm.sweeps.worker import accompany, work

SETTINGS = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time": "time",
    "nodes": "nodes",
    "gpus": "gpus_per_node",
    "cpus": "cpus_per_task",
    "memory": "mem",
    "constraint": "constraint",
    "at_once": "array_parallelism",
    "signal_seconds": "signal_delay_s",
    "setup": "setup",
    "options": "additional_parameters",
}
"""Settings under a sweep's `slurm` and in a profile file, and what submitit calls them. `time` is in minutes or as
SLURM writes it ([D-]HH:MM:SS), `gpus` per node, `cpus` per process, `at_once` the most tasks that run together,
`signal_seconds` how long before its end a task saves and asks to be requeued; `setup` has shell lines to run
first, `options` any other options of sbatch."""


def settings(sweep: Mapping[str, Any], profile: Path | None, where: Path) -> dict[str, Any]:
    """Settings of a sweep file, overridden by those of a profile file.

    Raises:
        UserError: an unknown setting, or a time that cannot be read.
    """
    over = {} if profile is None else read_yaml(profile)
    refuse_unknown(sweep, SETTINGS, f"{where}, slurm")
    refuse_unknown(over, SETTINGS, str(profile))
    merged = {**sweep, **over}
    if "time" in merged:
        merged["time"] = minutes(merged["time"])
    return merged


def minutes(time: Any) -> int:
    """A time limit in minutes, rounded up.

    Raises:
        UserError: it is neither minutes nor [D-]HH:MM:SS.
    """
    found = re.fullmatch(r"0*([1-9]\d*)|(?:(\d+)-)?(\d+):(\d\d):(\d\d)", str(time))
    if found is None:
        raise UserError(f"time {time!r} is neither a number of minutes nor [D-]HH:MM:SS (in quotes).")
    whole, *clock = found.groups()
    if whole:
        return int(whole)
    days, hours, mins, seconds = (int(part or 0) for part in clock)
    return (days * 24 + hours) * 60 + mins + (seconds > 0)


def task(place: Place, run: Run, extra: tuple[str, ...], attempts: int) -> None:
    """What every process of a task of the array does. Exits with the run's exit status."""
    import torch

    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", 1)))
    rank = int(os.environ.get("SLURM_PROCID", 0))
    status = accompany(place, run, extra, rank) if rank else work(place, run, extra, attempts)
    if status:
        sys.exit(status)


def executor(folder: Path, name: str, chosen: Mapping[str, Any]) -> Any:
    """A submitit executor.

    Raises:
        UserError: submitit or SLURM is missing, or a setting is refused.
    """
    try:
        import submitit
    except ImportError as error:
        raise UserError(
            f"--launcher slurm needs submitit ({error}): pip install 'looped-lm[slurm]'."
        ) from error
    try:
        made = submitit.SlurmExecutor(folder)
    except RuntimeError as error:
        raise UserError(f"{error} --launcher local runs on this machine.") from error
    parameters = {SETTINGS[key]: value for key, value in chosen.items()}
    options = {"requeue": True, **parameters.pop("additional_parameters", {})}
    # One process per GPU: Lightning takes its ranks from the tasks that SLURM starts.
    parameters["ntasks_per_node"] = max(1, int(chosen.get("gpus", 0)))
    made.update_parameters(
        job_name=name,
        additional_parameters=options,
        stderr_to_stdout=True,
        srun_args=["--kill-on-bad-exit=1"],
        **parameters,
    )
    return made


def machine_arguments(chosen: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments of `fit` that follow from the allocation: devices and nodes."""
    names = {"gpus": "devices", "nodes": "num_nodes"}
    asked = {name: chosen.get(key) for key, name in names.items()}
    return tuple(f"--trainer.{name}={count}" for name, count in asked.items() if count)


def submit(
    made: Any, place: Place, runs: list[Run], extra: tuple[str, ...], attempts: Mapping[str, int]
) -> list[str]:
    """Submit runs as one array, with the attempts at each so far, by hash; return their jobs."""
    counts = [attempts[run.hash] for run in runs]
    jobs = made.map_array(task, [place] * len(runs), runs, [extra] * len(runs), counts)
    for run, job in zip(runs, jobs, strict=True):
        marker = json.dumps({"job": str(job.job_id)})
        write_text_atomically(place.folder(run) / MARKER, marker)
    return [str(job.job_id) for job in jobs]


def queued(place: Place, runs: list[Run]) -> dict[str, str]:
    """Jobs that SLURM still has, by the hash of their runs."""
    jobs = {
        run.hash: json.loads(path.read_text(encoding="utf-8"))["job"]
        for run in runs
        if (path := place.folder(run) / MARKER).is_file()
    }
    if not jobs or shutil.which("squeue") is None:
        return {}
    asked = subprocess.run(
        ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%i"],
        capture_output=True, text=True,
    )  # fmt: skip
    if asked.returncode:
        # A run that is submitted twice is still trained once, thanks to its claim.
        return {}
    there = set(asked.stdout.split())
    return {hash_: job for hash_, job in jobs.items() if job in there}
