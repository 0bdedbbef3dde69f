"""Runs that were begun under another id are found again by what they train.

An id changes when a version computes it in another way, or when a class gets an argument that it did not have. The
run's folder, claim and record then keep the old id, so that nothing is trained again.
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
from looped_lm.sweeps import attempts
from looped_lm.sweeps.identity import counts, identity, plain_key, values
from looped_lm.sweeps.runs import Run

_ID = re.compile(r"(.*-)?[0-9a-f]{8}")
MARKER = "queued.json"
"""In a run's folder: the job that SLURM has for it."""


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
        from looped_lm.sweeps.resolving import resolve_again

        wanted = run.identity
        for name, (config, found) in self._found.items():
            if any(found.get(key, value) != value for key, value in wanted.items()):
                continue
            with suppress(UserError, KeyError):
                if wanted.keys() - found.keys():
                    # A key that did not exist then is at its default of today.
                    found = self._as_planned(name, resolve_again(config))
                if identity(found, run.axes) == wanted:
                    return name
        return None

    @cached_property
    def _found(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        """Resolved configurations by the names of folders and records that hold one, and their values."""
        found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        for path in sorted([*self.root.glob("*"), *self.records.glob(f"*{RECORD_SUFFIX}")]):
            name = path.name.removesuffix(RECORD_SUFFIX)
            # Claims are named by the hash that a name ends in; folders without one are not the sweep's.
            if name not in found and _ID.fullmatch(name):
                config = _of_folder(path) if path.is_dir() else _of_record(path)
                if config:
                    found[name] = (config, self._as_planned(name, config))
        return found

    def _as_planned(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        """The values of a configuration, without what an attempt's options for its machine made of them."""
        from looped_lm.sweeps.resolving import resolve

        found = values(config)
        for event in attempts.read(self.root / name):
            arguments, machine = attempts.split(event.get("command", []))
            changed = [key for word in machine if counts(key := plain_key(word[2:].partition("=")[0]))]
            with suppress(UserError, OSError):
                own = values(resolve(arguments)) if changed else {}
                found |= {key: own[key] for key in changed if key in own}
        return found


def _of_folder(folder: Path) -> dict[str, Any] | None:
    """The configuration of a folder's run, from whatever its latest attempt came to write."""
    from looped_lm.sweeps.resolving import resolve

    for path in sorted(folder.glob(f"*/checkpoints/*{RECORD_SUFFIX}")):
        if config := _of_record(path):
            return config
    for path in sorted(folder.glob("version_*/config.yaml")):
        with suppress(yaml.YAMLError, UnicodeDecodeError):
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(config, dict):
                return config
    with suppress(UserError, OSError):
        for event in attempts.read(folder):
            if arguments := attempts.split(event.get("command", []))[0]:
                return resolve(arguments)
        if (queued := _queued(folder)) is not None:
            return resolve(queued.arguments())
    return None


def _of_record(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        config = json.loads(path.read_text(encoding="utf-8")).get("config")
        return config if isinstance(config, dict) else None
    return None


def _queued(folder: Path) -> Run | None:
    """The run of a folder that holds no more than the number of its SLURM job: that of the call which waits there."""
    try:
        job = json.loads((folder / MARKER).read_text(encoding="utf-8"))["job"]
        _, run, *_ = pickle.loads((folder.parent / "slurm" / f"{job}_submitted.pkl").read_bytes()).args
    except Exception:
        # The job is done, or its files were written by another version of submitit.
        return None
    return run if isinstance(run, Run) else None
