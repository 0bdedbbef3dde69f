"""Where the runs of a sweep lie, who works on one, and how far each has come. All of it is read off the files.

`<out>/<sweep>/<run id>/` holds `attempts.jsonl`, `log.txt` and whatever `fit` writes (`version_0/...`);
`<out>/<sweep>/records/` the record of every finished run. A run is claimed by a lock that the operating system lets go
of with the process that holds it, however that ends.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from looped_lm.runs.preemption import EXIT_STATUS
from looped_lm.sweeps.runs import Run

INTERRUPTIONS = (EXIT_STATUS, 130, 143)
"""Exit statuses of runs that somebody stopped: saved on a signal, Ctrl-C, SIGTERM."""
LOG_LINES = 6


class State(Enum):
    """How far a run has come."""

    FINISHED = "finished"
    RUNNING = "running"
    QUEUED = "queued"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    WAITING = "waiting"


class Record(Protocol):
    """What is needed of a run record."""

    @property
    def run_name(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    @property
    def status(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def steps_planned(self) -> int: ...
    @property
    def val_loss(self) -> float | None: ...
    @property
    def wall_seconds(self) -> float: ...
    def save(self, path: str | os.PathLike[str]) -> Path: ...


LatestRecord = Callable[[Path], Record | None]
"""The record of a folder's run that says most, the completed one or that of the latest step; or that of a file.

Of a folder's records unreadable ones count for nothing; of a file it raises ValueError."""


class Claimed(Exception):
    """Another process works on the run."""


def _as_text(path: Path) -> str:
    """A path as the command line takes it for text, whatever YAML would make of it."""
    return json.dumps(str(path), ensure_ascii=False) if ": " in str(path) else str(path)


@dataclass(frozen=True)
class Status:
    """A run with its state.

    Args:
        run: the run.
        state: how far it is.
        record: the latest one there is.
        attempts: how often it was started.
        exit_status: of the last attempt that ended.
    """

    run: Run
    state: State
    record: Record | None
    attempts: int
    exit_status: int | None


class Place:
    """The folder of a sweep's runs.

    Args:
        out: folder of all sweeps.
        sweep: name of the sweep.
        latest_record: reads records.
        records: where the records of finished runs are kept; None: in the sweep's own folder. A record there makes
            its run count as finished, also on another machine.
    """

    def __init__(
        self, out: Path, sweep: str, latest_record: LatestRecord, records: Path | None = None
    ) -> None:
        self.root = out.resolve() / sweep
        self.records = (records or self.root / "records").resolve()
        self.latest_record = latest_record
        self._names: dict[str, str] = {}

    def name(self, run: Run) -> str:
        """Name of a run's folder: its id, or the one it has from when the sweep named its runs otherwise."""
        if run.hash not in self._names:
            there = sorted(p.name for p in self.root.glob(f"*{run.hash}") if p.is_dir())
            self._names[run.hash] = there[0] if there else run.id
        return self._names[run.hash]

    def folder(self, run: Run) -> Path:
        """The folder of a run."""
        return self.root / self.name(run)

    def log(self, run: Run) -> Path:
        """What a run printed, over all its attempts."""
        return self.folder(run) / "log.txt"

    def command(self, run: Run) -> list[str]:
        """The command line of a run, after `python -m looped_lm`; it starts the run and goes on with it."""
        return [
            "fit", *run.arguments(), f"--trainer.logger.init_args.save_dir={_as_text(self.root)}",
            f"--run_name={self.name(run)}", "--resume=auto",
        ]  # fmt: skip

    # ---- State ----------------------------------------------------------------------------------------------------

    def record(self, run: Run) -> Record | None:
        """The latest record of a run, in its folder or among the records that were collected."""
        collected = self._collected(run)
        own = self.latest_record(self.folder(run))
        if collected is not None and (own is None or not own.finished):
            return self.latest_record(collected)
        return own

    def _collected(self, run: Run) -> Path | None:
        """Where the record of a run lies among those that were collected, by whatever name."""
        return next(iter(sorted(self.records.glob(f"*{run.hash}.run.json"))), None)

    def foreign(self, hashes: Iterable[str]) -> list[Path]:
        """Collected records of none of the runs with these hashes."""
        known = tuple(f"{h}.run.json" for h in hashes)
        return [path for path in sorted(self.records.glob("*.run.json")) if not path.name.endswith(known)]

    def finished(self, run: Run) -> bool:
        """Whether a run has a completed record."""
        record = self.record(run)
        return record is not None and record.finished

    def status(self, run: Run) -> Status:
        """How far a run is."""
        record = self.record(run)
        events = self.attempts(run)
        last = events[-1] if events else None
        exit_status = next((e["exit_status"] for e in reversed(events) if "exit_status" in e), None)
        if record is not None and record.finished:
            state = State.FINISHED
        elif last is None:
            state = State.WAITING
        elif "exit_status" not in last:
            # Asked only here: to ask for a claim is to hold it for a moment.
            state = State.RUNNING if self._is_claimed(run) else State.INTERRUPTED
        elif last["exit_status"] in INTERRUPTIONS:
            state = State.INTERRUPTED
        else:
            state = State.FAILED
        return Status(run, state, record, sum("exit_status" not in e for e in events), exit_status)

    def keep_record(self, run: Run, record: Record | None = None) -> Path | None:
        """Put the record of a finished run among the collected ones; its path, or None for an unfinished run.

        Args:
            run: the run.
            record: of a run that lies elsewhere; None: the latest in this place.
        """
        target = self.records / f"{self.name(run)}.run.json"
        record = record or self.record(run)
        if record is None or not record.finished:
            return None
        there = self._collected(run)
        # A damaged one is replaced: the run's own says the same, or `record` would have refused.
        with suppress(ValueError):
            if there is not None and (kept := self.latest_record(there)) is not None and kept.finished:
                return there
        return record.save(there or target)

    # ---- Claims and attempts --------------------------------------------------------------------------------------

    @contextmanager
    def claimed(self, run: Run, timeout: float = 0.0) -> Iterator[None]:
        """Keep all other processes off a run, asking for it for so many seconds.

        Raises:
            Claimed: one of them has it.
            OSError: the folder cannot be made or written to.
        """
        lock = self._lock(run)
        try:
            lock.acquire(timeout=timeout)
        except Timeout:
            raise Claimed(self.name(run)) from None
        try:
            yield
        finally:
            lock.release()

    def _lock(self, run: Run) -> FileLock:
        # Beside the folders, by hash: two processes that name a run differently still mean the same one.
        locks = self.root / ".claims"
        locks.mkdir(parents=True, exist_ok=True)
        return FileLock(locks / run.hash)

    def _is_claimed(self, run: Run) -> bool:
        if not (self.root / ".claims" / run.hash).exists():
            return False
        try:
            with self.claimed(run):
                return False
        except Claimed:
            return True

    def attempts(self, run: Run) -> list[dict[str, Any]]:
        """Beginnings and ends of a run's attempts, in order."""
        events = []
        with suppress(FileNotFoundError):
            path = self.folder(run) / "attempts.jsonl"
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                # The last line of a process that was killed may be half a line.
                with suppress(json.JSONDecodeError):
                    events.append(json.loads(line))
        return [event for event in events if isinstance(event, dict)]

    def note(self, run: Run, **event: Any) -> None:
        """Append a beginning, or an end (with exit_status), of an attempt."""
        about = {"time": time.time(), "process": os.getpid(), "host": platform.node(), **event}
        path = self.folder(run) / "attempts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        # In one write and on a line of its own, whatever a killed process left.
        with path.open("a+b") as file:
            file.seek(0, os.SEEK_END)
            if size := file.tell():
                file.seek(size - 1)
            clean = not size or file.read(1) == b"\n"
            file.write((b"" if clean else b"\n") + json.dumps(about).encode() + b"\n")

    def last_lines(self, run: Run, count: int = LOG_LINES) -> list[str]:
        """The last lines that a run printed; of a progress bar, what it showed last."""
        try:
            with self.log(run).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 20_000))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        lines = [re.split(r"\r", line.rstrip("\r"))[-1].rstrip() for line in text.split("\n")]
        return [line for line in lines if line][-count:]
