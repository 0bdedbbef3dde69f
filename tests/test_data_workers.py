"""Jobs in one process or several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from datamodules.errors import DataError
from datamodules.workers import run_jobs


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
        "from test_data_workers import note_and_wait\n"
        "from datamodules.workers import run_jobs\n"
        f"list(run_jobs(note_and_wait, [(n, ({str(tmp_path)!r},)) for n in range(2)], workers=2))\n"
    )
    folder = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)])}
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
