"""How runs are named: the word `published` on the command line, and paths as seen from a report's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from fitting.published import GRID

PUBLISHED = "published"


def named(paths: Iterable[str]) -> list[str]:
    """Paths of runs; the word `published` stands for the shipped grid, unless a file has that name."""
    return [str(GRID) if path == PUBLISHED and not Path(path).exists() else path for path in paths]


def naming(folder: Path | None) -> Callable[[str], str]:
    """How a report in `folder` names files: relative to it, so that report and runs can move together.

    The shipped grid is `published`. Without a folder, names stay as they are.
    """

    def name(path: str) -> str:
        if path.startswith(str(GRID)):
            return PUBLISHED + path[len(str(GRID)) :]
        if folder is None:
            return path
        try:
            return Path(os.path.relpath(Path(path).resolve(), folder.resolve())).as_posix()
        except ValueError:
            # On Windows, no relative path leads from one drive to another.
            return Path(path).resolve().as_posix()

    return name


def located(names: Iterable[str], folder: Path) -> list[str]:
    """Paths of the runs that a report in `folder` names."""
    return [
        str(GRID) if name == PUBLISHED and not (folder / name).exists() else str((folder / name).resolve())
        for name in names
    ]
