"""Finds runs that were begun under another id by what they train.

An id changes when a version computes it in another way, or when a class gets a new argument. The run's folder, claim
and record then keep the old id, so that nothing is trained again.
"""

from __future__ import annotations

import json
import pickle
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fitting.records import RECORD_SUFFIX
from looped_lm.common.errors import UserError
from looped_lm.sweeps.runs import Run, arguments_of

ATTEMPTS = "attempts.jsonl"
"""File in a run's folder: beginnings and ends of its attempts, one line each."""
MARKER = "queued.json"
"""File in a run's folder: the job that SLURM has for the run."""
_ID = re.compile(r"(.*-)?[0-9a-f]{8}")


def attempts(folder: Path) -> list[dict[str, Any]]:
    """Beginnings (with `command`) and ends (with `exit_status`) of attempts, in order."""
    events = []
    with suppress(FileNotFoundError, NotADirectoryError):
        text = (folder / ATTEMPTS).read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            # A process that was killed may have left half a line at the end.
            with suppress(json.JSONDecodeError):
                events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict)]


class Earlier:
    """The configurations that a sweep's folders and collected records hold.

    Args:
        root: folder of the sweep's runs.
        records: folder of collected records.
    """

    def __init__(self, root: Path, records: Path) -> None:
        self.root, self.records = root, records

    def name(self, run: Run) -> str | None:
        """Name of the folder or record whose run trains the same, or None."""
        from looped_lm.sweeps.identity import identity, resolve_again, values

        wanted = run.identity
        for name, (config, found) in self._found.items():
            if any(found.get(key, value) != value for key, value in wanted.items()):
                continue
            with suppress(UserError):
                # A key that did not exist then has its default of today.
                if wanted.keys() - found.keys():
                    found = values(resolve_again(config))
                if identity(found, run.axes) == wanted:
                    return name
        return None

    @cached_property
    def _found(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        """Resolved configurations, and their values, by the names of folders and records."""
        from looped_lm.sweeps.identity import values

        found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        for path in sorted([*self.root.glob("*"), *self.records.glob(f"*{RECORD_SUFFIX}")]):
            name = path.name.removesuffix(RECORD_SUFFIX)
            # Folders whose names do not end in a hash are not the sweep's.
            if name not in found and _ID.fullmatch(name) and (config := _config(path)):
                found[name] = (config, values(config))
        return found


def _config(path: Path) -> dict[str, Any] | None:
    """The configuration in a record, or of the run in a folder, from whatever its attempts wrote."""
    from looped_lm.sweeps.identity import resolve

    records = sorted(path.glob(f"*/checkpoints/*{RECORD_SUFFIX}")) if path.is_dir() else [path]
    for record in records:
        with suppress(OSError, ValueError):
            config = json.loads(record.read_text(encoding="utf-8")).get("config")
            if isinstance(config, dict):
                return config
    for file in sorted(path.glob("version_*/config.yaml")):
        with suppress(yaml.YAMLError, UnicodeDecodeError):
            config = yaml.safe_load(file.read_text(encoding="utf-8"))
            if isinstance(config, dict):
                return config
    begun = [arguments_of(event.get("command", [])) for event in attempts(path)]
    with suppress(UserError, OSError):
        if arguments := next(filter(None, [*begun, _queued(path)]), None):
            return resolve(arguments)
    return None


def _queued(folder: Path) -> list[str] | None:
    """Arguments of a run that waits in SLURM's queue, from the call that submitit keeps."""
    try:
        job = json.loads((folder / MARKER).read_text(encoding="utf-8"))["job"]
        call = folder.parent / "slurm" / f"{job}_submitted.pkl"
        _, run, *_ = pickle.loads(call.read_bytes()).args
        return run.arguments()
    except Exception:
        # The job is done, or its files were written by another version of submitit.
        return None
