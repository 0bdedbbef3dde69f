"""A real SLURM cluster with one node, on this machine: munged, slurmctld and slurmd in a folder of their own."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue", "srun")
NODE = "one"


def install() -> str | None:
    """Install SLURM from Debian's packages if it is missing; returns why that is impossible, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not missing:
        return None
    if os.geteuid() or shutil.which("apt-get") is None:
        return f"no {', '.join(missing)}: install {' and '.join(PACKAGES)} (as root with apt this test does it itself)"
    command = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(command, capture_output=True, env=environment).returncode:
        subprocess.run(["apt-get", "update"], capture_output=True)
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            return f"apt-get cannot install {' and '.join(PACKAGES)}: {done.stderr.strip()[-300:]}"
    return None


class Cluster:
    """Commands on a running cluster.

    Args:
        environment: environment in which SLURM's commands find its configuration.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def call(self, *command: str) -> str:
        """Output of one of SLURM's commands.

        Raises:
            RuntimeError: the command failed.
        """
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

    def submit(self, script: Path, *options: str) -> str:
        """Number of the job that runs the script."""
        return self.call("sbatch", "--parsable", *options, str(script)).partition(";")[0]

    def field(self, job: str, name: str) -> str:
        """One field of what `scontrol show job` says, such as JobState, Restarts or ExitCode."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: the condition did not come to hold.
        """
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{what} did not come in {seconds:.0f} s:\n{self.call('scontrol', 'show', 'job')}"
                )
            time.sleep(0.2)


@contextmanager
def slurm_cluster(folder: Path, cpus: int = 2) -> Iterator[Cluster]:
    """Start a cluster, and end it afterwards.

    Args:
        folder: an empty folder for configuration, state and logs.
        cpus: number of CPUs that the node has for jobs.

    Raises:
        RuntimeError: a part of the cluster does not start. The message shows its log.
    """
    configuration = _configure(folder, cpus)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    socket_path = folder / "munge.socket"
    munged = [
        "munged", "--foreground", "--force", f"--socket={socket_path}", f"--key-file={folder / 'munge.key'}",
        f"--pid-file={folder / 'munged.pid'}", f"--log-file={folder / 'munged.log'}",
        f"--seed-file={folder / 'munge.seed'}",
    ]  # fmt: skip
    with ExitStack() as stack:
        _start(munged, folder / "munged.out", environment, stack)
        _until(socket_path.exists, "munged", folder)
        _start(["slurmctld", "-D"], folder / "slurmctld.out", environment, stack)
        _start(["slurmd", "-D", "-N", NODE], folder / "slurmd.out", environment, stack)
        cluster = Cluster(environment)

        def up() -> bool:
            try:
                return cluster.call("sinfo", "--noheader", "--format=%T") == "idle"
            except RuntimeError:
                return False

        _until(up, "the node", folder)
        try:
            yield cluster
        finally:
            subprocess.run(["scancel", "--full", "--user=root"], env=environment, capture_output=True)
            end = time.monotonic() + 20
            while cluster.call("squeue", "--noheader") and time.monotonic() < end:
                time.sleep(0.2)


def _configure(folder: Path, cpus: int) -> Path:
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        "SlurmUser=root",
        f"SlurmctldPort={_free_port()}",
        f"SlurmdPort={_free_port()}",
        "AuthType=auth/munge",
        # A requeued job waits until its old credential has expired.
        f"AuthInfo=socket={folder / 'munge.socket'},cred_expire=5",
        f"StateSaveLocation={folder / 'state'}",
        f"SlurmdSpoolDir={folder / 'spool'}",
        f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
        f"SlurmdPidFile={folder / 'slurmd.pid'}",
        f"SlurmctldLogFile={folder / 'slurmctld.log'}",
        f"SlurmdLogFile={folder / 'slurmd.log'}",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=1",
        "JobRequeue=1",
        "KillWait=30",
        "MpiDefault=none",
        "ReturnToService=2",
        f"NodeName={NODE} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1024 State=UNKNOWN",
        f"PartitionName=all Nodes={NODE} Default=YES MaxTime=INFINITE State=UP",
    ]
    path = folder / "slurm.conf"
    path.write_text("\n".join(lines) + "\n")
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(command: list[str], log: Path, environment: dict[str, str], stack: ExitStack) -> None:
    process = subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)

    def end() -> None:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _until(condition: Callable[[], bool], what: str, folder: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            logs = "\n".join(
                f"{p.name}: {p.read_text()[-800:]}"
                for p in sorted(folder.glob("*.out")) + sorted(folder.glob("*.log"))
            )
            raise RuntimeError(f"{what} does not come up:\n{logs}")
        time.sleep(0.2)


def program(folder: Path, name: str, script: str) -> None:
    """An executable that runs a shell script, in place of one of SLURM's programs."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
