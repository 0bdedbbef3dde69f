"""Writes files and folders whole or not at all: first beside their place, then under their names.

`new_file` is for what is written piece by piece; a text in memory takes `fitting.records.write_text_atomically`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from looped_lm.common.errors import UserError

#: Ending of a file that is being written; one that a killed process left behind may be removed.
PARTIAL = ".partial"


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends. Makes the folder.

    If the process is killed or the block raises, the file that was there before stays. Two processes that write the
    same file at the same time do not mix their content.
    """
    aside = Path(f"{path}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        _flush(aside)
        aside.replace(path)
        _flush(aside.parent)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends; UserError if `path` exists."""
    if path.exists():
        raise UserError(f"{path} exists, and nothing is overwritten: name another folder, or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    aside.mkdir()
    try:
        yield aside
        for file in aside.iterdir():
            _flush(file)
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    """Force a file's content, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def failing_with(way_out: str, path: str | Path) -> Iterator[None]:
    """Turn a failure to write in the block into a message with the file, the system's reason and the way out.

    Raises:
        UserError: the block raised an OSError, or another exception because of one, as torch.save does.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or isinstance(error, UserError):
            raise
        raise UserError(f"{path} could not be written ({cause.strerror or cause}). {way_out}") from error
