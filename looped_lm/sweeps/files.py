"""Sweep files: where they are found, what they may hold, and how YAML and the command line write values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from looped_lm.common.errors import UserError
from looped_lm.common.text import did_you_mean
from looped_lm.configuration.config_files import SHIPPED, resolve_config

SHIPPED_SWEEPS = SHIPPED / "sweeps"
CONFIG = "config"
"""The axis of config files. Any other axis is a key of the configuration."""
BY = "by"
_MERGE = "tag:yaml.org,2002:merge"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class _Constructor(SafeConstructor):
    """YAML 1.2, in which 1e18 is a number and 12:00:00 is text.

    A date is text, too, since no key of a configuration takes one.
    """

    def flatten_mapping(self, node: Any) -> Any:
        """Merge what `<<` names, after a check for keys given twice, which ruamel omits beside a `<<`."""
        if getattr(node, "merge", None) is None:
            seen: list[Any] = []
            for key_node, _ in node.value:
                key = "<<" if key_node.tag == _MERGE else self.construct_object(key_node, deep=True)
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise UserError(f"line {line}: {key!r} is twice in one mapping")
                seen.append(key)
        return super().flatten_mapping(node)


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def read_yaml(path: Path) -> dict[str, Any]:
    """Content of a YAML file that holds a mapping.

    Raises:
        UserError: it holds something else, or a key twice; the message names the file and the line.
    """
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    try:
        content = reader.load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError, UserError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not map keys to values.")
    return content


def same(a: Any, b: Any) -> bool:
    """Whether two values of a key are the same; numbers are compared as numbers, and True is not a number."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def text(value: Any) -> str:
    """A value as one writes it on the command line."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value)


def refuse_unknown(given: Iterable[Any], known: Iterable[str], where: str) -> None:
    """Refuse names that do not exist.

    Raises:
        UserError: naming the first one, the name closest to it, and all there are.
    """
    known = list(known)
    for name in given:
        if name not in known:
            guess = did_you_mean(str(name), known)
            raise UserError(f"{where}: unknown key {name!r}.{guess} Keys: {', '.join(known)}.")


@dataclass(frozen=True)
class Shared:
    """Runs of another sweep that belong to the results of this one and are trained there."""

    sweep: Path
    only: list[dict[str, Any]] = field(default_factory=list)
    skip: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class SweepFile:
    """A sweep as its file gives it."""

    path: Path
    name: str
    """Names the folder of its runs."""
    grid: dict[str, Any]
    """Axes, from `config` or a configuration key to a value, a list, or `{by: AXIS, VALUE: value or list}`."""
    configs: list[str] = field(default_factory=list)
    """Config files for every run, after that of the axis `config`."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Values of configuration keys for every run."""
    only: list[dict[str, Any]] = field(default_factory=list)
    """Rules of which a run must meet one."""
    skip: list[dict[str, Any]] = field(default_factory=list)
    """Rules of which a run must meet none."""
    shared: list[Shared] = field(default_factory=list)
    slurm: dict[str, Any] = field(default_factory=dict)
    """Settings for SLURM; see `slurm.SETTINGS`."""


_TYPES: dict[str, type] = {
    "name": str, "configs": list, "keys": dict, "grid": dict, "only": list, "skip": list, "shared": list,
    "slurm": dict,
}  # fmt: skip
_NOT_FOR_SWEEPS = {
    "run_name": "a run is named after its id",
    "resume": "every run goes on by itself",
    "ckpt_path": "every run starts from its own weights, and goes on from them by itself",
    "trainer.fast_dev_run": "it leaves no record",
}
"""Keys of the configuration that only the sweep itself sets."""


def find(name: str, beside: Path | None = None) -> Path:
    """Path of a sweep file given by its path, or by the name of a shipped one or of one `beside` another sweep,
    which is looked up first, as for config files.

    Raises:
        UserError: there is none; the message lists the shipped ones.
    """
    path = Path(name)
    places = [path, SHIPPED_SWEEPS / path]
    for place in [beside.parent / path, *places] if beside else places:
        if place.is_file():
            return place
    shipped = sorted(p.name for p in SHIPPED_SWEEPS.glob("*.yaml"))
    raise UserError(
        f"Sweep {name!r} is neither a file here ({Path.cwd()}) nor a shipped one."
        f"{did_you_mean(path.name, shipped)} Shipped: {', '.join(shipped)}."
    )


def load(path: Path) -> SweepFile:
    """Read and check a sweep file.

    Raises:
        UserError: an unknown key or a value of the wrong kind; the message names the file.
    """
    content = read_yaml(path)
    _check_kinds(content, tuple(_TYPES), str(path))
    name, grid, keys = content.get("name", path.stem), content.get("grid"), content.get("keys", {})
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{path}: name {name!r} does not name a folder; use letters, digits, '-', '_' and '.'."
        )
    if not grid:
        raise UserError(f"{path}: there is no grid, so there are no runs.")
    for key in (*grid, *keys):
        if not isinstance(key, str):
            raise UserError(f"{path}: {key!r} does not name a key of a configuration, such as model.size.")
        for own, reason in _NOT_FOR_SWEEPS.items():
            if f"{key}.".startswith(f"{own}."):
                raise UserError(f"{path}: {key} cannot be set by a sweep: {reason}.")
        if key == CONFIG and CONFIG in keys:
            raise UserError(
                f"{path}: {key} is given under keys; config files for every run go under configs."
            )
        if key in keys and key in grid:
            raise UserError(f"{path}: {key} is given under keys and in the grid; leave one of them out.")
    configs = [str(config) for config in content.get("configs", [])]
    shared = [_shared(entry, path) for entry in content.get("shared", [])]
    return SweepFile(path, **{**content, "name": name, "configs": configs, "shared": shared})


def _check_kinds(content: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    refuse_unknown(content, known, where)
    for key, value in content.items():
        if not isinstance(value, _TYPES.get(key, object)):
            raise UserError(f"{where}: {key} is {value!r}; it must be a {_TYPES[key].__name__}.")
    for rule in [*content.get("only", []), *content.get("skip", [])]:
        if not isinstance(rule, dict) or not rule:
            example = "{config: r8.yaml, model.size: [6, 8]}"
            raise UserError(f"{where}: the rule {rule!r} does not map keys to values, as {example} does.")


def _shared(entry: Any, path: Path) -> Shared:
    if not isinstance(entry, dict) or "sweep" not in entry:
        example = "{sweep: iso_depth.yaml}"
        raise UserError(f"{path}: an entry of shared names a sweep, as in {example}; got {entry!r}.")
    _check_kinds(entry, ("sweep", "only", "skip"), f"{path}, shared")
    return Shared(**{**entry, "sweep": find(str(entry["sweep"]), beside=path)})


def config_path(name: str, sweep: Path) -> str:
    """Absolute path of a config file: beside the sweep file, in the working folder, or shipped.

    Raises:
        UserError: there is none, or it does not hold a YAML mapping.
    """
    beside = sweep.parent / name
    if not Path(name).is_absolute() and beside.is_file():
        name = str(beside)
    return str(Path(resolve_config(name)).resolve())
