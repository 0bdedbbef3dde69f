"""Fixtures shared by the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Under xdist each worker has a core of its own; this is read when torch is first imported, here and in children.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests.support.slurm_cluster import Cluster, install, slurm_cluster

os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
# Threads cost more than they bring on the small matrices of a fit; numpy reads this when it is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# One process of two threads is as fast here as it gets; more only wait for each other.
torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture
def run_cli(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run `python -m looped_lm ARGS` inside this process; returns the exit status and all it printed."""

    def run(*args: str) -> tuple[int, str]:
        from looped_lm.cli import cli

        monkeypatch.setattr(sys, "argv", ["looped_lm", *args])
        capfd.readouterr()
        try:
            status = cli(list(args))
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capfd.readouterr()
        return status, captured.out + captured.err

    return run


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two event files of one second are read in the order of their numbers, as text: the tenth before the ninth."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of so many KiB; root only."""
    mounted: list[Path] = []

    def make(kib: int) -> Path:
        folder = tmp_path / f"disk_{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"no small disk to fill: {error}")
        if done.returncode:
            pytest.skip(f"no small disk to fill: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def tiny_data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of rows of 17 bytes, made once per test session."""
    from datamodules import ByteTokenizer, PrepareSettings, TextFiles
    from datamodules.prepare import prepare

    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "the loop runs once more " * (3 + i % 5))
    out = tmp_path_factory.mktemp("prepared") / "rows"
    settings = PrepareSettings(seq_len=16, val_fraction=0.2)
    prepare(TextFiles([str(folder)]), ByteTokenizer(), settings, out, progress=False)
    return out


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real SLURM of one node."""
    reason = install()
    if reason:
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running
