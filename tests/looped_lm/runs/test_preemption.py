"""Signals on the command line: status, message, way back into the queue."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

import looped_lm
from callbacks import Preemption
from looped_lm.runs.preemption import (
    EXIT_STATUS,
    SIGNALS,
    Preempted,
    report,
    requeue_job,
    stopped_before_training,
)
from tests.support.cli_options import tiny_options
from tests.support.tiny import TinyData, tiny_lm, tiny_trainer


class SignalInSetup(L.Callback):
    """A signal while a run starts."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        os.kill(os.getpid(), self.signum)


class SignalAtStep(L.Callback):
    """A signal in the optimizer step after `steps` steps of a run."""

    def __init__(self, signum: int, steps: int) -> None:
        self.signum, self.steps = signum, steps
        self.handlers: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.steps:
            os.kill(os.getpid(), self.signum)
            self.handlers = [signal.getsignal(s) for s in SIGNALS]


def added(callback: str, **init_args: Any) -> list[str]:
    """Options that append a callback of this file."""
    settings = json.dumps(
        {"class_path": f"tests.looped_lm.runs.test_preemption.{callback}", "init_args": init_args}
    )
    return [f"--trainer.callbacks+={settings}"]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `scontrol` that writes down what it is asked, in the environment of a task of a job array."""
    asked = tmp_path / "asked"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    variables = {
        "SLURM_JOB_ID": "4712", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return asked


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.rglob(pattern)
    return path


def test_a_stopped_run_exits_with_its_status_is_requeued_and_goes_on(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, scontrol: Path
) -> None:
    """The whole way through the command line, under what looks like SLURM."""
    options = ["--config", "r4.yaml", *tiny_options(tiny_data_dir, steps=5)]
    status, out = run_cli("fit", *options, "--run_name=whole")
    assert status == 0, out
    before = [signal.getsignal(s) for s in SIGNALS]
    stop = added("SignalAtStep", signum=signal.SIGUSR1, steps=2)
    status, out = run_cli("fit", *options, "--run_name=stopped", *stop)
    assert status == EXIT_STATUS == 75, out
    checkpoint = only(in_folder / "runs" / "stopped", "*=000003.ckpt")
    assert "Traceback" not in out
    assert f"stopped by SIGUSR1 after step 3, saved in {checkpoint.relative_to(in_folder)}" in out
    assert scontrol.read_text() == "requeue 4711_3\n" and "SLURM job 4711_3 is requeued." in out
    # Lightning's own answer to the signal would save from inside the handler.
    assert "auto-requeueing" not in out and not list(in_folder.rglob("hpc_ckpt*"))
    assert [signal.getsignal(s) for s in SIGNALS] == before
    status, out = run_cli("fit", *options, "--run_name=stopped", "--resume=auto")
    assert status == 0, out
    whole = torch.load(only(in_folder / "runs" / "whole", "*=000005.ckpt"), weights_only=True)
    resumed = torch.load(only(in_folder / "runs" / "stopped", "*=000005.ckpt"), weights_only=True)
    assert all(torch.equal(v, resumed["state_dict"][k]) for k, v in whole["state_dict"].items())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_before_training_a_signal_ends_the_run_at_once(
    signum: int, run_cli: Any, in_folder: Path, tiny_data_dir: Path, scontrol: Path
) -> None:
    options = ["--config", "r4.yaml", *tiny_options(tiny_data_dir), *added("SignalInSetup", signum=signum)]
    status, out = run_cli("fit", *options)
    assert "Traceback" not in out and not list(in_folder.rglob("*.ckpt"))
    if signum == signal.SIGINT:
        assert status == 130 and "interrupted" in out
    else:
        assert status == EXIT_STATUS and f"stopped by {signal.Signals(signum).name} before training" in out
    # The scheduler is asked to start it again only where the signal means that.
    assert scontrol.exists() == (signum == signal.SIGUSR1)


def test_only_rank_zero_of_a_requeueable_stop_asks_slurm(
    scontrol: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report(Preempted(signal.SIGUSR1, 5, "a.ckpt", rank=1)) == 0
    assert report(Preempted(signal.SIGTERM, 5, "a.ckpt")) == EXIT_STATUS
    assert not scontrol.exists()
    assert "--ckpt_path a.ckpt" in capfd.readouterr().err
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
    assert report(Preempted(signal.SIGUSR2, 5, "a.ckpt")) == EXIT_STATUS
    assert scontrol.read_text() == "requeue 4712\n"
    program = Path(os.environ["PATH"].partition(os.pathsep)[0]) / "scontrol"
    program.write_text("#!/bin/sh\necho 'Requested operation is presently disabled' >&2\nexit 1\n")
    assert requeue_job() == "SLURM job 4712 is not requeued: Requested operation is presently disabled."
    monkeypatch.setenv("PATH", "")
    assert "scontrol cannot be run" in str(requeue_job())
    monkeypatch.delenv("SLURM_JOB_ID")
    assert requeue_job() is None


def test_handlers_are_there_while_training_and_gone_after_it(tmp_path: Path) -> None:
    before = [signal.getsignal(s) for s in SIGNALS]
    at = SignalAtStep(signal.SIGINT, 1)
    with pytest.raises(Preempted, match="after step 2, saved in .*preempted-step=000002.ckpt"):
        tiny_trainer(tmp_path, [at, own := Preemption()]).fit(tiny_lm(), datamodule=TinyData())
    during = dict(zip(SIGNALS, at.handlers, strict=True))
    # Ctrl-C once more ends the process at once, in whatever it is doing.
    assert during.pop(signal.SIGINT) == signal.SIG_DFL
    for signum, handler in during.items():
        own._received = 0
        handler(signum, None)
        assert own._received == signum, "the handler is the callback's"
    assert [signal.getsignal(s) for s in SIGNALS] == before
    tiny_trainer(tmp_path, [Preemption()]).fit(tiny_lm(), datamodule=TinyData())
    assert [signal.getsignal(s) for s in SIGNALS] == before


def test_forked_children_keep_the_default_action() -> None:
    with stopped_before_training():
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            finally:
                os._exit(3)
        _, code = os.waitpid(child, 0)
    assert os.WTERMSIG(code) == signal.SIGTERM


def test_lightning_still_has_what_is_replaced() -> None:
    """Its broadcast at every micro-batch has a name of its own, which a new version may change."""
    assert callable(_TrainingEpochLoop._broadcast_sigterm_tensor)


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    root = Path(looped_lm.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "looped_lm", "fit", *options],
        cwd=folder, env=environment, text=True, stdout=(folder / "log").open("w"), stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def wait_for(condition: Any, process: subprocess.Popen[str], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.05)


def long_run(data_dir: Path) -> list[str]:
    return [
        "--config", "r4.yaml", *tiny_options(data_dir, steps=100_000), "--model.val_every_steps=20",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "workers"), [(1, 2), (2, 1)])
def test_a_process_is_stopped_from_outside(
    devices: int, workers: int, tmp_path: Path, tiny_data_dir: Path
) -> None:
    """Ctrl-C reaches the whole group: readers live on until the step is done. SIGTERM reaches the first one."""
    options = [*long_run(tiny_data_dir), f"--data.num_workers={workers}"]
    if devices == 2:
        options += ["--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch_size=1"]
    for signum in (signal.SIGTERM, signal.SIGINT):
        folder = tmp_path / str(signum)
        folder.mkdir()
        process = start(folder, *options)
        wait_for(lambda folder=folder: list(folder.rglob("*.ckpt")), process)
        sent = time.monotonic()
        if signum == signal.SIGINT:
            os.killpg(process.pid, signum)
        else:
            process.send_signal(signum)
        process.wait(timeout=60)
        out = (folder / "log").read_text()
        print(f"{signum.name}, {devices} processes, {workers} workers: {time.monotonic() - sent:.1f} s")
        assert process.returncode == EXIT_STATUS, out
        step = int(out.partition("after step ")[2].partition(",")[0])
        assert only(folder, f"step={step:06d}.ckpt") and "Traceback" not in out


@pytest.mark.slow
def test_a_second_interrupt_ends_the_process_at_once(tmp_path: Path, tiny_data_dir: Path) -> None:
    # One step of many micro-batches: it does not end by itself before the second signal.
    options = [*long_run(tiny_data_dir), "--model.batch_tokens=32000", "--trainer.log_every_n_steps=1"]
    process = start(tmp_path, *options)
    wait_for(lambda: list(tmp_path.rglob("events.out*")), process)
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == -signal.SIGINT, (tmp_path / "log").read_text()
    assert not list(tmp_path.rglob("*.ckpt"))
