"""Trains one run of a sweep in this process: claims it, and writes its log and attempts."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

from looped_lm.configuration.command_line import run_as_command_line
from looped_lm.sweeps.place import Claimed, Place, State
from looped_lm.sweeps.runs import Run

BUSY = 76
"""Exit status if another process has the run."""
_CLAIM_SECONDS = 2.0
"""How long to wait for a run: a process that only checks its claim holds it for a moment."""


def work(place: Place, run: Run, extra: tuple[str, ...] = (), attempts: int | None = None) -> int:
    """Train or continue a run that is neither finished nor taken; return its exit status.

    A run that failed under another launcher since it was chosen is left to the user to retry.

    Must be called in the main thread of a process that does nothing else: its output goes into the run's log.

    Args:
        place: folder of the sweep's runs.
        run: what to train.
        extra: arguments of the command line for this machine.
        attempts: attempts at the run when it was chosen; None: retry it even if it has failed since.

    Raises:
        OSError: the run's folder cannot be written to.
    """
    try:
        with place.claimed(run, timeout=_CLAIM_SECONDS):
            before = place.status(run)
            if before.state is State.FINISHED:
                place.keep_record(run)
                return 0
            if before.state is State.FAILED and attempts is not None and before.attempts > attempts:
                return before.exit_status or 1
            command = [*place.command(run), *extra]
            place.note(run, command=command)
            began = time.perf_counter()
            status = _fit(command, place.log(run))
            if status == 0 and place.keep_record(run) is None:
                print(
                    "error: the run ended without a completed record. Either it stopped before its plan was met "
                    "(trainer.max_steps, max_time), or trainer.callbacks has no callbacks.RunRecordWriter.",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                status = 1
            seconds = time.perf_counter() - began
            after = place.record(run)
            fit_seconds = after.wall_seconds if after else 0.0
            fit_seconds -= before.record.wall_seconds if before.record else 0.0
            place.note(run, exit_status=status, seconds=seconds, fit_seconds=fit_seconds)
            return status
    except Claimed:
        return BUSY


def accompany(place: Place, run: Run, extra: tuple[str, ...], rank: int) -> int:
    """What the other processes of a run do if a scheduler starts them all; rank 0 does `work`."""
    if place.finished(run):
        return 0
    return _fit([*place.command(run), *extra], place.log(run).with_name(f"log-rank{rank}.txt"))


def _fit(command: list[str], log: Path) -> int:
    """Run a command line with all output, even that of C code, in a log; return its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    print(f"$ python -m looped_lm {shlex.join(command)}", flush=True)
    try:
        return run_as_command_line(command)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def follow_parent() -> None:
    """Stop this process's run, as SIGTERM would, once the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="follow_parent", daemon=True).start()
