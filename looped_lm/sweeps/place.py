"""Where the runs of a sweep are, who works on each, and how far it has come, read from the files.

`<out>/<sweep>/<run id>/` holds `attempts.jsonl`, `log.txt` and whatever `fit` writes;
`<out>/<sweep>/records/` holds the record of every finished run. A claim is a lock that the operating
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
"""Exit statuses of runs that were stopped: after saving on a signal, by Ctrl-C, by SIGTERM."""


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
    """The record in a file, or of the run in a folder: a completed one, else that of the latest step.

    Raises:
        RecordError: the path is a file that does not hold a record.
    """
    if path.is_file():
        return RunRecord.load(path)
    records = []
    for found in sorted(path.glob(f"*/checkpoints/*{RECORD_SUFFIX}")):
        # It may be written or removed at this moment; a damaged one does not count.
        with suppress(RecordError):
            records.append(RunRecord.load(found))
    return max(records, key=lambda record: (record.finished, record.steps), default=None)


@dataclass(frozen=True)
class Status:
    """A run with its state."""

    run: Run
    hash: str
    """The hash in the name of its folder."""
    state: State
    record: RunRecord | None
    """Its latest record."""
    attempts: int
    exit_status: int | None
    """Exit status of the last attempt that ended."""


class Place:
    """The folder of a sweep's runs.

    Args:
        out: folder of all sweeps.
        sweep: name of the sweep.
        records: where records of finished runs are kept; None: in the sweep's own folder. A record there makes
            its run count as finished, even if another machine trained it.
    """

    def __init__(self, out: Path, sweep: str, records: Path | None = None) -> None:
        self.root = out.resolve() / sweep
        self.records = (records or self.root / "records").resolve()
        self._names: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Path]:
        return {"root": self.root, "records": self.records}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Jobs queued by earlier versions hold more than this.
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
        """The hash in the names of a run's folder, claim and record."""
        return self.name(run)[-len(run.hash) :]

    def folder(self, run: Run) -> Path:
        """The folder of a run."""
        return self.root / self.name(run)

    def log(self, run: Run) -> Path:
        """The file with what a run printed in all its attempts."""
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
        """Collected records whose names end with a hash, whatever comes before it."""
        return sorted(self.records.glob(f"*{hash_}{RECORD_SUFFIX}"))

    def foreign(self, runs: Iterable[Run]) -> list[Path]:
        """Collected records that belong to none of these runs."""
        known = tuple(f"{self.hash(run)}{RECORD_SUFFIX}" for run in runs)
        return [path for path in self._collected("") if not path.name.endswith(known)]

    def finished(self, run: Run) -> bool:
        """Whether a run has a completed record."""
        return (record := self.record(run)) is not None and record.finished

    def status(self, run: Run) -> Status:
        """How far a run has come."""
        record = self.record(run)
        events = self.attempts(run)
        ends = [event["exit_status"] for event in events if "exit_status" in event]
        if record is not None and record.finished:
            state = State.FINISHED
        elif not events:
            state = State.WAITING
        elif "exit_status" not in events[-1]:
            # Checked only here, since to check a claim is to hold it for a moment.
            state = State.RUNNING if self._is_claimed(run) else State.INTERRUPTED
        else:
            state = State.INTERRUPTED if ends[-1] in INTERRUPTIONS else State.FAILED
        begun, last = len(events) - len(ends), ends[-1] if ends else None
        return Status(run, self.hash(run), state, record, begun, last)

    def keep_record(self, run: Run, record: RunRecord | None = None) -> Path | None:
        """Put a finished run's record among the collected ones; its path, or None if the run is unfinished.

        Args:
            run: the run.
            record: the record of a run that was trained elsewhere; None: the latest in this place.
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
        """Keep all other processes off a run; wait for it up to `timeout` seconds.

        Raises:
            Claimed: another process has it.
            OSError: the folder cannot be made or written to.
        """
        # By hash: two processes may name the same run differently.
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
        # In one write and on a new line, whatever a killed process left.
        with path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            clean = file.read(1) in (b"", b"\n")
            file.write((b"" if clean else b"\n") + json.dumps(about).encode() + b"\n")

    def last_lines(self, run: Run, count: int = 6) -> list[str]:
        """The last lines that a run printed; for a progress bar, what it showed last."""
        try:
            with self.log(run).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
        return [line for line in lines if line][-count:]
