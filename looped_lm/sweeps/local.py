"""Runs a sweep on this machine, one run or several at a time over devices and cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from types import FrameType

from looped_lm.common.text import duration
from looped_lm.runs.preemption import EXIT_STATUS
from looped_lm.sweeps.place import Place, State
from looped_lm.sweeps.runs import Run
from looped_lm.sweeps.worker import BUSY, follow_parent, work

CANNOT_START = 77
"""Exit status of a process that could not begin its run."""
POLL_SECONDS = 1.0
"""How often to look at runs that another launcher has taken."""


@dataclass
class Outcome:
    """What became of the runs that a launcher was given."""

    finished: list[Run] = field(default_factory=list)
    interrupted: list[Run] = field(default_factory=list)
    failed: list[Run] = field(default_factory=list)
    elsewhere: list[Run] = field(default_factory=list)
    trained: int = 0
    """Runs that processes of this launcher finished."""
    fit_seconds: float = 0.0
    """Seconds that these runs added to their records' wall_seconds."""
    run_seconds: float = 0.0
    """Seconds from the start of their processes to the end."""
    signum: int | None = None

    @property
    def exit_status(self) -> int:
        """0 if every run is finished, EXIT_STATUS if a signal ended the launcher, else 1."""
        if self.signum is not None:
            return EXIT_STATUS
        return int(bool(self.interrupted or self.failed))


@dataclass
class _Job:
    run: Run
    process: ForkProcess
    slot: int
    began: float


class LocalLauncher:
    """Starts runs in processes forked from this one, which has everything imported.

    The process that calls it must not have started threads or a device.

    Args:
        place: folder of the sweep's runs.
        jobs: how many runs at a time.
        devices: accelerators to share out over the jobs, as CUDA_VISIBLE_DEVICES names them.
        flops: training FLOPs of each run by hash, to estimate the time that is left.
        attempts: attempts at each run when it was chosen, by hash; see `work`.
    """

    def __init__(
        self, place: Place, jobs: int, devices: list[str], flops: dict[str, float], attempts: dict[str, int]
    ) -> None:
        self.place, self.jobs, self.devices = place, jobs, devices
        self.flops, self.attempts = flops, attempts
        self.threads = max(1, len(os.sched_getaffinity(0)) // jobs)

    def run(self, runs: list[Run]) -> Outcome:
        """Run all that are not finished, each at most once; return what became of them.

        Waits for runs that another launcher works on, and takes over what it leaves unfinished. On SIGTERM or
        SIGINT the runs under way save and stop, and no others are started.
        """
        self._began, self._flops_done = time.monotonic(), 0.0
        self._of, self._flops_left = len(runs), sum(self.flops[run.hash] for run in runs)
        outcome, waiting, jobs = Outcome(), list(runs), list[_Job]()
        passed_on = False

        def note(signum: int, frame: FrameType | None) -> None:
            outcome.signum = outcome.signum or signum

        before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            while jobs or (waiting or outcome.elsewhere) and outcome.signum is None:
                while waiting and len(jobs) < self.jobs and outcome.signum is None:
                    jobs.append(self._start(waiting.pop(0), jobs))
                wait([job.process.sentinel for job in jobs], timeout=POLL_SECONDS)
                if outcome.signum is not None and not passed_on:
                    # Only once: Ctrl-C also reaches the runs directly if they share the terminal.
                    passed_on = True
                    name = signal.Signals(outcome.signum).name
                    print(f"{name}: {len(jobs)} run(s) under way save and stop.")
                    for job in jobs:
                        job.process.terminate()
                for job in [job for job in jobs if not job.process.is_alive()]:
                    jobs.remove(job)
                    self._end(job, outcome)
                if outcome.signum is None:
                    self._look_elsewhere(outcome, waiting)
        finally:
            for job in jobs:
                job.process.terminate()
            for signum, handler in before.items():
                signal.signal(signum, handler)
        return outcome

    def _start(self, run: Run, jobs: list[_Job]) -> _Job:
        slot = min(set(range(self.jobs)) - {job.slot for job in jobs})
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=self._child, args=(run, slot), name=run.id)
        process.start()
        print(f"started   {self.place.name(run)}, log {self.place.log(run)}")
        return _Job(run, process, slot, time.monotonic())

    def _child(self, run: Run, slot: int) -> None:
        import torch

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        follow_parent()
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        torch.set_num_threads(self.threads)
        if self.devices:
            own = self.devices[slot :: self.jobs] or [self.devices[slot % len(self.devices)]]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        try:
            sys.exit(work(self.place, run, attempts=self.attempts.get(run.hash)))
        except OSError as error:
            # The log cannot be written either.
            print(f"error: {run.id} cannot be started: {error}", file=sys.stderr, flush=True)
            sys.exit(CANNOT_START)

    def _end(self, job: _Job, outcome: Outcome) -> None:
        seconds = time.monotonic() - job.began
        run, name = job.run, self.place.name(job.run)
        job.process.join()
        if job.process.exitcode == BUSY:
            print(f"elsewhere {name}: another launcher works on it")
            outcome.elsewhere.append(run)
            return
        if job.process.exitcode == CANNOT_START:
            self._flops_left -= self.flops[run.hash]
            outcome.failed.append(run)
            return
        if job.process.exitcode == -signal.SIGKILL:
            print(f"killed    {name} by SIGKILL: perhaps the machine ran out of memory")
        self._sort(run, outcome)
        end = self.place.attempts(run)[-1:]
        record = self.place.record(run)
        # Not where the process found the run finished by another launcher.
        if end and end[0].get("process") == job.process.pid and record is not None and record.finished:
            fit_seconds = end[0].get("fit_seconds", 0.0)
            outcome.trained += 1
            outcome.fit_seconds += fit_seconds
            outcome.run_seconds += seconds
            self._flops_done += self.flops[run.hash] * fit_seconds / (record.wall_seconds or 1.0)

    def _sort(self, run: Run, outcome: Outcome) -> None:
        """Note what became of a run that nobody works on any more."""
        status, name = self.place.status(run), self.place.name(run)
        self._flops_left -= self.flops[run.hash]
        if status.state is State.FINISHED:
            outcome.finished.append(run)
            loss = status.record.val_loss if status.record else None
            told = "" if loss is None else f", validation loss {loss:.4f}"
            left = ""
            if self._flops_done and self._flops_left > 0:
                seconds = time.monotonic() - self._began
                to_go = seconds * self._flops_left / self._flops_done
                left = f", about {duration(to_go)} to go"
            print(f"finished  {name}{told} ({len(outcome.finished)} of {self._of}{left})")
        elif status.state is State.FAILED:
            outcome.failed.append(run)
            print(f"failed    {name} (exit status {status.exit_status})")
            for line in self.place.last_lines(run):
                print(f"          | {line}")
        else:
            outcome.interrupted.append(run)
            print(f"stopped   {name}; it goes on from its last checkpoint when the sweep is run again")

    def _look_elsewhere(self, outcome: Outcome, waiting: list[Run]) -> None:
        for run in list(outcome.elsewhere):
            state = self.place.status(run).state
            if state is not State.RUNNING:
                outcome.elsewhere.remove(run)
            if state in (State.WAITING, State.INTERRUPTED):
                # The launcher that had it is gone.
                waiting.append(run)
            elif state is not State.RUNNING:
                self._sort(run, outcome)


def visible_devices() -> list[str]:
    """Accelerators that a process started from here would see, without initialising any of them."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(i) for i in range(torch.cuda.device_count())]
    return [name.strip() for name in given.split(",") if name.strip()]
