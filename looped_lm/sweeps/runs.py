"""One run of a sweep: the command line that trains it, and an id that follows from what it trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from looped_lm.common.errors import UserError
from looped_lm.sweeps.files import CONFIG, text
from looped_lm.sweeps.identity import digest, identity, values


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        sweep: name of its sweep.
        configs: absolute paths of its config files, in order.
        keys: values of configuration keys on top of these.
        axes: its place in the grid.
        named_by: axes that its id tells.
    """

    sweep: str
    configs: tuple[str, ...]
    keys: dict[str, Any]
    axes: dict[str, Any]
    named_by: tuple[str, ...] = ()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What it trains, by key. How it is written and how a machine runs it do not count; `data.data_dir` counts as
        it is written.

        Raises:
            UserError: `fit` would refuse it; says which run and why.
        """
        from looped_lm.sweeps.resolving import resolve

        try:
            return identity(values(resolve(self.arguments())), self.axes)
        except UserError as error:
            raise UserError(f"The run with {told(self.axes)} is refused: {error}") from error

    @cached_property
    def hash(self) -> str:
        """Eight hexadecimal digits that follow from what is trained."""
        return digest(self.identity)

    @cached_property
    def id(self) -> str:
        """Readable name with the hash; names the folder of the run."""
        names = [Path(str(self.axes[CONFIG])).stem] if CONFIG in self.axes else []
        for key in self.named_by:
            name = key.rpartition(".")[2]
            value = Path(text(self.axes[key]).replace("e+", "e")).name.rpartition("looped_lm.")[2]
            names.append(f"{name}={''.join(c if c.isalnum() or c in '._-' else '_' for c in value)[:40]}")
        return "-".join([*names, self.hash])

    def arguments(self) -> list[str]:
        """Arguments of the command line that trains it, without place and name."""
        configs = [word for path in self.configs for word in ("--config", path)]
        return [*configs, *(f"--{key}={text(value)}" for key, value in self.keys.items())]

    def label(self, keys: list[str]) -> list[str]:
        """Its values of some axes, as text."""
        return [text(self.axes.get(key, "")) for key in keys]


def told(point: dict[str, Any]) -> str:
    """Axes or a rule in words."""
    return ", ".join(f"{key}: {value}" for key, value in point.items())
