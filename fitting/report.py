"""Write a report folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fitting.errors import FitError

FILES = ("fit.json", "report.md", "report.html")


def check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse, before the work, a folder whose report would be replaced. Raises `FitError`."""
    if folder.exists() and not folder.is_dir():
        raise FitError(f"--report {folder} is a file. Name a folder")
    taken = [name for name in FILES if (folder / name).exists()]
    if taken and not overwrite:
        raise FitError(
            f"{folder} holds a report already ({', '.join(taken)}). Name another folder or add --overwrite"
        )


def write_report(analysis: dict[str, Any], folder: Path, progress: Callable[[str], None]) -> list[Path]:
    raise FitError("later")
