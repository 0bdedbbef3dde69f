"""Jobs in one process or several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from datamodules.errors import DataError
from datamodules.workers import leave_signals_to_parent, run_jobs


def describe(number):
    if number < 0:
        raise DataError(f"{number} is negative")
    return {"square": number**2, "process": os.getpid(), "threads": os.environ.get("TOKENIZERS_PARALLELISM")}


def die(number):
    os._exit(9)


def test_one_worker_is_this_process_and_keeps_the_order():
    results = list(run_jobs(describe, [(n, (n,)) for n in (3, 1, 2)], workers=1))
    assert [name for name, _ in results] == [3, 1, 2]
    assert {result["process"] for _, result in results} == {os.getpid()}


def test_several_workers_are_processes_with_one_thread_each_and_errors_come_through():
    results = dict(run_jobs(describe, [(n, (n,)) for n in range(6)], workers=2))
    assert {n: result["square"] for n, result in results.items()} == {n: n**2 for n in range(6)}
    assert os.getpid() not in {result["process"] for result in results.values()}
    assert {result["threads"] for result in results.values()} == {"false"}
    with pytest.raises(DataError, match="-4 is negative"):
        list(run_jobs(describe, [(n, (n,)) for n in (1, -4, 2)], workers=2))


def test_a_worker_that_dies_is_one_clear_error():
    with pytest.raises(DataError, match="a worker process died.*run again, with fewer workers"):
        list(run_jobs(die, [(n, (n,)) for n in range(4)], workers=2))


def note_and_wait(folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_a_parent_that_is_killed_leaves_no_workers_behind(tmp_path):
    code = (
        "from tests.datamodules.test_workers import note_and_wait\n"
        "from datamodules.workers import run_jobs\n"
        f"list(run_jobs(note_and_wait, [(n, ({str(tmp_path)!r},)) for n in range(2)], workers=2))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(workers := list(tmp_path.iterdir())) < 2:
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while any(Path("/proc", worker.name).exists() for worker in workers):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.05)


def read_on(ready):
    leave_signals_to_parent()
    ready.send(True)
    time.sleep(60)


def test_a_reading_process_obeys_its_parent_alone():
    """Ctrl-C and a scheduler's signals reach all processes, and the parent needs its readers for a step more."""
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("fork").Process(target=read_on, args=(theirs,))
    reader.start()
    ours.recv()
    for name in ("INT", "USR1", "USR2", "TERM"):
        subprocess.run(["/bin/kill", f"-{name}", str(reader.pid)], check=True)
    reader.join(0.5)
    assert reader.is_alive()
    reader.terminate()
    reader.join(10)
    assert reader.exitcode == 0


def test_a_reading_process_goes_with_a_parent_that_is_killed(tmp_path):
    parent = multiprocessing.get_context("fork").Process(target=become_a_parent, args=(tmp_path / "pid",))
    parent.start()
    while not (tmp_path / "pid").exists():
        time.sleep(0.02)
    time.sleep(0.1)
    reader = int((tmp_path / "pid").read_text())
    parent.kill()
    end = time.monotonic() + 10
    while running(reader) and time.monotonic() < end:
        time.sleep(0.05)
    assert not running(reader)


def become_a_parent(path):
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("fork").Process(target=read_on, args=(theirs,))
    reader.start()
    ours.recv()
    path.write_text(str(reader.pid))
    time.sleep(60)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
