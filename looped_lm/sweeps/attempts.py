"""The attempts at a run: their beginnings and ends, one line each, in `attempts.jsonl` in its folder."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from looped_lm.sweeps.runs import Run

_FILE = "attempts.jsonl"


def read(folder: Path) -> list[dict[str, Any]]:
    """Beginnings (with `command`) and ends (with `exit_status`) of the attempts at a folder's run, in order."""
    events = []
    with suppress(FileNotFoundError):
        for line in (folder / _FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            # The last line of a process that was killed may be half a line.
            with suppress(json.JSONDecodeError):
                events.append(json.loads(line))
    return [event for event in events if isinstance(event, dict)]


def note(folder: Path, **event: Any) -> None:
    """Append a beginning or an end of an attempt."""
    about = {"time": time.time(), "process": os.getpid(), "host": platform.node(), **event}
    folder.mkdir(parents=True, exist_ok=True)
    # In one write and on a line of its own, whatever a killed process left.
    with (folder / _FILE).open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if size := file.tell():
            file.seek(size - 1)
        clean = not size or file.read(1) == b"\n"
        file.write((b"" if clean else b"\n") + json.dumps(about).encode() + b"\n")


def command(run: Run, folder: Path) -> list[str]:
    """The command line of a run, after `python -m looped_lm`; it starts the run in a folder and goes on with it."""
    root = str(folder.parent)
    # As text, whatever YAML would make of a path with a colon.
    save_dir = json.dumps(root, ensure_ascii=False) if ": " in root else root
    return [
        "fit", *run.arguments(), f"--trainer.logger.init_args.save_dir={save_dir}",
        f"--run_name={folder.name}", "--resume=auto",
    ]  # fmt: skip


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of a run, and those for its machine, of a command line that `command` made and a launcher extended.

    Both are empty for any other command line.
    """
    place = [i for i, word in enumerate(words) if word.startswith("--trainer.logger.init_args.save_dir=")]
    if not place or "--resume=auto" not in words:
        return [], []
    return list(words[1 : place[0]]), list(words[words.index("--resume=auto") + 1 :])
