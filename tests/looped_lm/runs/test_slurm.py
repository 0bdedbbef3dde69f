"""Runs under a real SLURM: stopped by it, requeued, and equal to the undisturbed run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import torch

import looped_lm
from tests.support.cli_options import tiny_options
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow
STEPS = 120


def job(folder: Path, data_dir: Path, *options: str, launcher: str = "") -> Path:
    """A job script that trains in `folder`; the same command starts the run and goes on with it."""
    root = Path(looped_lm.__file__).parent.parent
    fit = [
        sys.executable, "-m", "looped_lm", "fit", "--config", "r4.yaml", *tiny_options(data_dir, steps=STEPS),
        "--model.val_every_steps=20", "--data.num_workers=1", "--run_name=run", "--resume=auto",
        "--trainer.logger.init_args.save_dir=runs", *options,
    ]  # fmt: skip
    folder.mkdir()
    script = folder / "job.sh"
    script.write_text(
        f"#!/bin/sh\ncd {folder}\nexport PYTHONPATH={root} OMP_NUM_THREADS=1\nexec {launcher} {shlex.join(fit)}\n"
    )
    return script


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (last,) = folder.rglob(f"step={STEPS:06d}.ckpt")
    return torch.load(last, weights_only=True)["state_dict"]


@pytest.mark.parametrize("how", ["USR1 to an array task", "USR1 under srun", "scontrol requeue"])
def test_a_requeued_run_ends_as_the_undisturbed_one(
    how: str, cluster: Cluster, tmp_path: Path, tiny_data_dir: Path
) -> None:
    launcher = "srun" if "srun" in how else ""
    # Room for the signal to arrive in: a step has many micro-batches.
    options = ["--model.batch_tokens=128", "--data.batch_size=2"]
    undisturbed = cluster.submit(
        job(tmp_path / "undisturbed", tiny_data_dir, *options),
        f"--output={tmp_path}/undisturbed.log",
        "--ntasks=1",
    )
    script = job(tmp_path / "disturbed", tiny_data_dir, *options, launcher=launcher)
    log = tmp_path / "disturbed.log"
    submission = [f"--output={log}", "--open-mode=append", "--ntasks=1", "--requeue"]
    number = cluster.submit(script, *submission, *(["--array=5"] if "array" in how else []))
    task = f"{number}_5" if "array" in how else number
    cluster.wait_for(lambda: bool(list((tmp_path / "disturbed").rglob("*.ckpt"))), "a checkpoint")
    if how == "scontrol requeue":
        cluster.call("scontrol", "requeue", task)
    else:
        # To the script's own process, which exec has made the run, or to the tasks of srun.
        cluster.call("scancel", "--signal=USR1", *([] if launcher else ["--batch"]), task)
    cluster.wait_for(lambda: cluster.field(task, "Restarts") == "1", "the requeue")
    for name in (undisturbed, task):
        cluster.wait_for(
            lambda name=name: cluster.field(name, "JobState") == "COMPLETED", f"the end of {name}"
        )
    told = log.read_text()
    print(told)
    signal_name = "SIGTERM" if how == "scontrol requeue" else "SIGUSR1"
    assert f"stopped by {signal_name} after step" in told and "Resuming from" in told
    whole, resumed = weights(tmp_path / "undisturbed"), weights(tmp_path / "disturbed")
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())
    assert len(list((tmp_path / "disturbed").rglob("version_*"))) == 1, "it went on in its own folder"
