"""One run of a sweep: the command line that trains it, and an id that follows from what it trains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from looped_lm.common.errors import UserError
from looped_lm.sweeps.files import CONFIG, text

_SAVE_DIR = "--trainer.logger.init_args.save_dir"


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        sweep: name of its sweep.
        configs: absolute paths of its config files, in order.
        keys: values of configuration keys, which override the files.
        axes: its place in the grid: a value for every axis.
        named_by: axes whose values are in its id.
    """

    sweep: str
    configs: tuple[str, ...]
    keys: dict[str, Any]
    axes: dict[str, Any]
    named_by: tuple[str, ...] = ()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What it trains, by key, however it is written and whichever machine runs it.

        Raises:
            UserError: `fit` would refuse it; the message says which run and why.
        """
        from looped_lm.sweeps.identity import identity, resolve, values

        try:
            return identity(values(resolve(self.arguments())), self.axes)
        except UserError as error:
            raise UserError(f"The run with {told(self.axes)} is refused: {error}") from error

    @cached_property
    def hash(self) -> str:
        """Eight hexadecimal digits that follow from what is trained; `data.data_dir` counts as it is written."""
        content = json.dumps(self.identity, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:8]

    @cached_property
    def id(self) -> str:
        """A readable name that ends with the hash; it names the folder of the run."""
        names = [Path(str(self.axes[CONFIG])).stem] if CONFIG in self.axes else []
        for key in self.named_by:
            name = key.rpartition(".")[2]
            value = Path(text(self.axes[key]).replace("e+", "e")).name.rpartition("looped_lm.")[2]
            safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in value)
            names.append(f"{name}={safe[:40]}")
        return "-".join([*names, self.hash])

    def arguments(self) -> list[str]:
        """Arguments of the command line that trains it, without folder and name."""
        configs = [word for path in self.configs for word in ("--config", path)]
        return [*configs, *(f"--{key}={text(value)}" for key, value in self.keys.items())]

    def command(self, folder: Path) -> list[str]:
        """The words after `python -m looped_lm` that start it in a folder, or go on with it there."""
        root = str(folder.parent)
        # Quoted, since YAML would take a path with ": " for a mapping.
        save_dir = json.dumps(root, ensure_ascii=False) if ": " in root else root
        place = [f"{_SAVE_DIR}={save_dir}", f"--run_name={folder.name}", "--resume=auto"]
        return ["fit", *self.arguments(), *place]

    def label(self, keys: list[str]) -> list[str]:
        """Its values on some axes, as text."""
        return [text(self.axes.get(key, "")) for key in keys]


def varying(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Axes in which runs differ, and `config` if there is one; and their last words as headings."""
    axes = [
        key
        for key in dict.fromkeys(key for run in runs for key in run.axes)
        if key == CONFIG or len({tuple(run.label([key])) for run in runs}) > 1
    ]
    return axes, [axis.rpartition(".")[2] for axis in axes]


def told(point: dict[str, Any]) -> str:
    """Axes or a rule in words."""
    return ", ".join(f"{key}: {text(value)}" for key, value in point.items())


def arguments_of(command: Sequence[str]) -> list[str]:
    """The `Run.arguments` in what `Run.command` made; [] for any other command line."""
    place = next((i for i, word in enumerate(command) if word.startswith(f"{_SAVE_DIR}=")), 0)
    return list(command[1:place]) if "--resume=auto" in command else []
