"""The folder of a run: which one it gets, who may write there, and where a run goes on.

A run writes into `<save_dir>/<run name>/version_<N>`. One process at a time holds it, by a lock that the operating
system lets go of with the process, however that ends.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from looped_lm.common.errors import UserError
from looped_lm.runs.checkpoint import Stored, newest_whole

CHECKPOINTS = "checkpoints"
LOCK_SECONDS = 10.0
"""How long a folder that is taken is waited for: workers of a killed process may outlive it by some seconds."""
_LOCK, _OWNER = ".lock", ".owner"
_VERSION = re.compile(r"version_(\d+)")


def versions(root: Path) -> list[Path]:
    """The version folders of a run, from the newest to the oldest."""
    numbered = [(int(m.group(1)), p) for p in root.glob("version_*") if (m := _VERSION.fullmatch(p.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def new_version(root: Path) -> Path:
    """A version folder that did not exist: of two processes that ask at the same time each gets its own.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        taken = versions(root)
        number = 1 + int(taken[0].name.removeprefix("version_")) if taken else 0
        while True:
            try:
                (root / f"version_{number}").mkdir()
                return root / f"version_{number}"
            except FileExistsError:
                number += 1
    except OSError as error:
        raise UserError(
            f"The run's folder cannot be made in {root}: {error.strerror} ({error.filename}). Choose another place "
            "with the logger's save_dir, or make room; nothing was changed."
        ) from error


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder.

    Raises:
        UserError: another process writes there; it is named.
        UserError: the folder cannot be written to.
    """
    owner = folder / _OWNER
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        by = owner.read_text(encoding="utf-8") if owner.is_file() else "another process"
        raise UserError(
            f"{folder} is being written by {by}: wait for it or stop it. A run of its own needs no --ckpt_path or "
            "--resume, or another --run_name."
        ) from None
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to: {error.strerror}. Choose another place with the logger's save_dir, or "
            "make room; nothing was changed."
        ) from error
    try:
        now = datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
        with suppress(OSError):  # The lock counts; whose it is only explains.
            owner.write_text(f"process {os.getpid()} on {platform.node()} since {now}", encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def clean(checkpoints: Path) -> None:
    """Remove what a killed process was writing."""
    for partial in checkpoints.glob("*.partial"):
        partial.unlink(missing_ok=True)


def set_aside(damaged: Iterable[Path]) -> None:
    """Rename damaged checkpoints, so that new ones of the same step can take their names."""
    for path in damaged:
        path.replace(path.with_name(f"{path.name}.damaged"))


def newest_of_run(root: Path) -> tuple[Stored | None, dict[Path, str]]:
    """The newest whole checkpoint of a run's newest folder that has any checkpoint, and the damaged ones there."""
    for folder in versions(root):
        found, damaged = newest_whole(folder / CHECKPOINTS)
        if found or damaged:
            return found, damaged
    return None, {}
