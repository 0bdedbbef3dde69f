"""Where the runs of a sweep are, who works on one, and how far each has come, read off the files.

`<out>/<sweep>/<run id>/` holds `attempts.jsonl`, `log.txt` and whatever `fit` writes;
`<out>/<sweep>/records/` the record of every finished run. A claim is a lock that the operating
system releases when the process that holds it ends, however that happens.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fitting.records import RECORD_SUFFIX, RecordError, RunRecord
from looped_lm.runs.preemption import EXIT_STATUS
from looped_lm.sweeps.earlier import ATTEMPTS, Earlier, attempts
from looped_lm.sweeps.runs import Run

INTERRUPTIONS = (EXIT_STATUS, 130, 143)
"""Exit statuses of runs that somebody stopped: saved on a signal, Ctrl-C, SIGTERM."""


class State(Enum):
    """How far a run has come."""

    FINISHED = "finished"
    RUNNING = "running"
    QUEUED = "queued"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    WAITING = "waiting"


class Claimed(Exception):
    """Another process works on the run."""


def latest_record(path: Path) -> RunRecord | None:
    """The record at a path, or of the run in a folder: a completed one, else that of the latest step.

    Raises:
        RecordError: the path is a file that holds none.
    """
    if path.is_file():
        return RunRecord.load(path)
    records = []
    for found in sorted(path.glob(f"*/checkpoints/*{RECORD_SUFFIX}")):
        # Being written or removed at this moment; or damaged, and then it counts for nothing.
        with suppress(RecordError):
            records.append(RunRecord.load(found))
    return max(records, key=lambda record: (record.finished, record.steps), default=None)


@dataclass(frozen=True)
class Status:
    """A run with its state."""

    run: Run
    hash: str
    """The one its folder is named by."""
    state: State
    record: RunRecord | None
    """The latest one."""
    attempts: int
    exit_status: int | None
    """Of the last attempt that ended."""


class Place:
    """The folder of a sweep's runs.

    Args:
        out: folder of all sweeps.
        sweep: name of the sweep.
        records: where records of finished runs are kept; None: in the sweep's own folder.
            A record there makes its run count as finished, also on another machine.
    """

    def __init__(self, out: Path, sweep: str, records: Path | None = None) -> None:
        self.root = out.resolve() / sweep
        self.records = (records or self.root / "records").resolve()
        self._names: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Path]:
        return {"root": self.root, "records": self.records}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Of earlier versions, which queued jobs hold, there is more.
        self.root, self.records, self._names = state["root"], state["records"], {}

    @cached_property
    def _earlier(self) -> Earlier:
        return Earlier(self.root, self.records)

    def name(self, run: Run) -> str:
        """Name of a run's folder: its id, or the one it was begun under."""
        if run.hash not in self._names:
            paths = [path for path in sorted(self.root.glob(f"*{run.hash}")) if path.is_dir()]
            paths += self._collected(run.hash)
            if paths:
                self._names[run.hash] = paths[0].name.removesuffix(RECORD_SUFFIX)
            else:
                self._names[run.hash] = self._earlier.name(run) or run.id
        return self._names[run.hash]

    def hash(self, run: Run) -> str:
        """The hash that a run's folder, claim and record are named by."""
        return self.name(run)[-len(run.hash) :]

    def folder(self, run: Run) -> Path:
        """The folder of a run."""
        return self.root / self.name(run)

    def log(self, run: Run) -> Path:
        """What a run printed, over all its attempts."""
        return self.folder(run) / "log.txt"

    def command(self, run: Run) -> list[str]:
        """The command line that starts a run in its folder; see `Run.command`."""
        return run.command(self.folder(run))

    def record(self, run: Run) -> RunRecord | None:
        """The latest record of a run, in its folder or among the collected ones."""
        collected = self._collected(self.hash(run))
        own = latest_record(self.folder(run))
        if collected and (own is None or not own.finished):
            return latest_record(collected[0])
        return own

    def _collected(self, hash_: str) -> list[Path]:
        """Where the record of a run is among those that were collected, by whatever name."""
        return sorted(self.records.glob(f"*{hash_}{RECORD_SUFFIX}"))

    def foreign(self, runs: Iterable[Run]) -> list[Path]:
        """Collected records of none of these runs."""
        known = tuple(f"{self.hash(run)}{RECORD_SUFFIX}" for run in runs)
        return [path for path in self._collected("") if not path.name.endswith(known)]

    def finished(self, run: Run) -> bool:
        """Whether a run has a completed record."""
        return (record := self.record(run)) is not None and record.finished

    def status(self, run: Run) -> Status:
        """How far a run is."""
        record = self.record(run)
        events = self.attempts(run)
        ends = [event["exit_status"] for event in events if "exit_status" in event]
        if record is not None and record.finished:
            state = State.FINISHED
        elif not events:
            state = State.WAITING
        elif "exit_status" not in events[-1]:
            # Asked only here: to ask for a claim is to hold it for a moment.
            state = State.RUNNING if self._is_claimed(run) else State.INTERRUPTED
        else:
            state = State.INTERRUPTED if ends[-1] in INTERRUPTIONS else State.FAILED
        begun, last = len(events) - len(ends), ends[-1] if ends else None
        return Status(run, self.hash(run), state, record, begun, last)

    def keep_record(self, run: Run, record: RunRecord | None = None) -> Path | None:
        """Put a finished run's record among the collected ones; its path, or None if unfinished.

        Args:
            run: the run.
            record: of a run that is elsewhere; None: the latest in this place.
        """
        record = record or self.record(run)
        if record is None or not record.finished:
            return None
        for there in self._collected(self.hash(run))[:1]:
            # A damaged one is replaced: the run's own says the same, or `record` would have refused.
            with suppress(RecordError):
                if RunRecord.load(there).finished:
                    return there
            return record.save(there)
        return record.save(self.records / f"{self.name(run)}{RECORD_SUFFIX}")

    @contextmanager
    def claimed(self, run: Run, timeout: float = 0.0) -> Iterator[None]:
        """Keep all other processes off a run, asking for it for so many seconds.

        Raises:
            Claimed: one of them has it.
            OSError: the folder cannot be made or written to.
        """
        # By hash: two processes that name a run differently still mean the same one.
        locks = self.root / ".claims"
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / self.hash(run))
        try:
            lock.acquire(timeout=timeout)
        except Timeout:
            raise Claimed(self.name(run)) from None
        try:
            yield
        finally:
            lock.release()

    def _is_claimed(self, run: Run) -> bool:
        if not (self.root / ".claims" / self.hash(run)).exists():
            return False
        try:
            with self.claimed(run):
                return False
        except Claimed:
            return True

    def attempts(self, run: Run) -> list[dict[str, Any]]:
        """Beginnings and ends of a run's attempts, in order."""
        return attempts(self.folder(run))

    def note(self, run: Run, **event: Any) -> None:
        """Append a beginning, or an end (with exit_status), of an attempt."""
        about = {"time": time.time(), "process": os.getpid(), "host": platform.node(), **event}
        path = self.folder(run) / ATTEMPTS
        path.parent.mkdir(parents=True, exist_ok=True)
        # In one write and on a line of its own, whatever a killed process left.
        with path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            clean = file.read(1) in (b"", b"\n")
            file.write((b"" if clean else b"\n") + json.dumps(about).encode() + b"\n")

    def last_lines(self, run: Run, count: int = 6) -> list[str]:
        """The last lines that a run printed; of a progress bar, what it showed last."""
        try:
            with self.log(run).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
        return [line for line in lines if line][-count:]
