"""One run of a sweep: the command line that trains it, and an id that follows from what it trains."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from looped_lm.configuration.config_files import BASE
from looped_lm.loop.component import import_class
from looped_lm.sweeps.files import CONFIG, read_yaml, text

IDENTITY = (
    "seed_everything", "model", "data", "trainer.precision", "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm", "trainer.max_steps", "trainer.max_time", "trainer.limit_train_batches",
    "trainer.limit_val_batches", "trainer.overfit_batches",
)  # fmt: skip
"""What decides what is trained. Loggers, callbacks and devices do not."""
_PACKAGES = ("looped_lm", "datamodules")
_CLASS = re.compile(r"(\w+\.)*[A-Z]\w*")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
NOT_IDENTITY = (
    "model.val_every_steps",
    "model.compile_layers",
    "model.recompute",
    "data.batch_size",
    "data.val_batch_size",
    "data.val_rows",
    "data.num_workers",
)
"""Of those: what may change from one machine to the next without making it another run. An axis always counts."""


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
    def hash(self) -> str:
        """Eight hexadecimal digits that follow from what is trained: the contents of the config files, base.yaml
        among them, and the keys. Names and places of config files, and how a machine runs it, do not count;
        `data.data_dir` counts as it is written."""
        values: dict[str, Any] = {}
        for path in (str(BASE), *self.configs):
            for key, value in _leaves_of_file(path, os.stat(path).st_mtime_ns):
                _set(values, key, value)
        for key, value in self.keys.items():
            for leaf, inner in _leaves({key: value}):
                _set(values, leaf, inner)
        axes = {_plain(key) for key in self.axes}
        kept = {k: _number(v) for k, v in values.items() if k in axes or _identifies(k)}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]

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


@lru_cache(maxsize=64)
def _leaves_of_file(path: str, modified: int) -> list[tuple[str, Any]]:
    """Leaves of a config file, a class before its arguments; hundreds of runs share a few files."""
    return sorted(_leaves(read_yaml(Path(path))), key=lambda leaf: leaf[0].count("."))


def _leaves(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict) and content:
        for key, value in content.items():
            name = str(key)
            if name == "init_args" and not value:
                continue  # A class without arguments.
            here = prefix if name in ("class_path", "init_args") else f"{prefix}.{name}" if prefix else name
            yield from _leaves(value, here)
    else:
        yield _plain(prefix), canonical(content)


def _plain(key: str) -> str:
    """A key without the words that say how a component is written."""
    return ".".join(part for part in key.split(".") if part not in ("class_path", "init_args"))


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    if key in values and values[key] != value:
        # Another class has arguments of its own.
        for old in [k for k in values if k.startswith(f"{key}.")]:
            del values[old]
    values[key] = value


def _identifies(key: str) -> bool:
    return any(key == k or key.startswith(f"{k}.") for k in IDENTITY) and key not in NOT_IDENTITY


def canonical(value: Any) -> Any:
    """A class by one name, that of the package which offers it: `LinearInjection`, `looped_lm.LinearInjection` and
    `looped_lm.loop.injection.LinearInjection` are one. Whatever names no class is left as it is.
    """
    if not isinstance(value, str) or not _CLASS.fullmatch(value):
        return value
    package, _, name = value.rpartition(".")
    if package in _PACKAGES:
        return value
    for offered in _PACKAGES:
        try:
            public = import_class(f"{offered}.{name}")
            if not package or import_class(value) is public:
                return f"{offered}.{name}"
        except ValueError:
            continue
    return value


def _number(value: Any) -> Any:
    """Numbers as one type: 1e18, 1000000000000000000 and its text make the same run."""
    if isinstance(value, list):
        return [_number(v) for v in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
