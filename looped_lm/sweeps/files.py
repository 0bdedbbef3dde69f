"""Sweep files: where they are found, what may stand in one, and values as YAML and the command line write them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from looped_lm.common.errors import UserError
from looped_lm.configuration.config_files import SHIPPED, resolve_config

SHIPPED_SWEEPS = SHIPPED / "sweeps"
CONFIG = "config"
"""The axis of config files. Any other axis is a key of the configuration."""
BY = "by"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML in which 1e18 is a number, as on the command line, and a key that stands twice is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, since later on what `<<` merges stands among the keys.
        node = super().compose_mapping_node(anchor)
        seen: list[Any] = []
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise UserError(f"line {node.start_mark.line + 1}: {key!r} stands twice in one mapping")
            seen.append(key)
        return node

    def construct_date(self, node: yaml.ScalarNode) -> str:
        """The text: no key of a configuration is a date."""
        return str(node.value)

    def construct_clock(self, node: yaml.ScalarNode) -> Any:
        """A number, or the text of a time: YAML 1.1 would make 43200 of 12:00:00."""
        if ":" in node.value:
            return node.value
        return self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_clock)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_date)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Content of a YAML file that holds a mapping.

    Raises:
        UserError: it holds something else; the file is named.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no mapping of keys to values.")
    return content


def same(a: Any, b: Any) -> bool:
    """Whether two values of a key are the same; numbers are compared as numbers, and True is none."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def text(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value)


def refuse_unknown(given: Iterable[Any], known: Iterable[str], where: str) -> None:
    """Refuse names that do not exist.

    Raises:
        UserError: naming the first one, what is like it, and all there are.
    """
    known = list(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            raise UserError(f"{where}: unknown key {name!r}.{guess} Keys: {', '.join(known)}.")


@dataclass(frozen=True)
class Shared:
    """Runs of another sweep that belong to the results of this one and are trained there."""

    sweep: Path
    only: list[dict[str, Any]] = field(default_factory=list)
    skip: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class SweepFile:
    """A sweep as it is written.

    Args:
        path: of the file.
        name: of the folder of its runs.
        configs: config files on top of that of the axis `config`, for every run.
        keys: values of configuration keys, for every run.
        grid: axes, from `config` or a configuration key to a value, a list, or `{by: AXIS, VALUE: value or list}`.
        only: rules of which a run must meet one.
        skip: rules of which a run must meet none.
        shared: runs of other sweeps that the results need.
        slurm: how SLURM runs it.
    """

    path: Path
    name: str
    configs: list[str]
    keys: dict[str, Any]
    grid: dict[str, Any]
    only: list[dict[str, Any]]
    skip: list[dict[str, Any]]
    shared: list[Shared]
    slurm: dict[str, Any]


KEYS = ("name", "configs", "keys", "grid", "only", "skip", "shared", "slurm")
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
"""Keys of the configuration that are the sweep's own."""


def find(name: str, beside: Path | None = None) -> Path:
    """Path of a sweep file, given by path or by the bare name of a file beside another sweep (looked for first, as for
    config files) or a shipped one.

    Raises:
        UserError: there is none; the shipped ones are listed.
    """
    path = Path(name)
    places = [*([beside.parent / path] if beside else []), path, SHIPPED_SWEEPS / path]
    for place in places:
        if place.is_file():
            return place
    shipped = sorted(p.name for p in SHIPPED_SWEEPS.glob("*.yaml"))
    close = difflib.get_close_matches(path.name, shipped, n=1)
    guess = f" Did you mean {close[0]}?" if close else ""
    raise UserError(
        f"Sweep {name!r} is neither a file here ({Path.cwd()}) nor a shipped one.{guess} "
        f"Shipped: {', '.join(shipped)}."
    )


def load(path: Path) -> SweepFile:
    """Read and check a sweep file.

    Raises:
        UserError: an unknown key or a value of the wrong kind; the file is named.
    """
    content = read_yaml(path)
    refuse_unknown(content, KEYS, str(path))
    for key, value in content.items():
        if not isinstance(value, _TYPES[key]):
            raise UserError(f"{path}: {key} is {value!r}; it must be a {_TYPES[key].__name__}.")
    name = content.get("name", path.stem)
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{path}: name {name!r} does not name a folder; use letters, digits, '-', '_' and '.'."
        )
    grid = content.get("grid", {})
    if not grid:
        raise UserError(f"{path}: there is no grid, so there are no runs.")
    for key in (*grid, *content.get("keys", {})):
        if not isinstance(key, str):
            raise UserError(f"{path}: {key!r} is no key of a configuration, such as model.size.")
        reason = next(
            (why for own, why in _NOT_FOR_SWEEPS.items() if key == own or key.startswith(f"{own}.")), None
        )
        if reason:
            raise UserError(f"{path}: {key} cannot be set by a sweep: {reason}.")
    if CONFIG in content.get("keys", {}):
        raise UserError(f"{path}: {CONFIG} stands under keys; config files of every run stand under configs.")
    for key in content.get("keys", {}):
        if key in grid:
            raise UserError(f"{path}: {key} stands under keys and in the grid; leave one of them out.")
    for rule in [*content.get("only", []), *content.get("skip", [])]:
        _check_rule(rule, path)
    return SweepFile(
        path=path,
        name=name,
        configs=[str(c) for c in content.get("configs", [])],
        keys=content.get("keys", {}),
        grid=grid,
        only=content.get("only", []),
        skip=content.get("skip", []),
        shared=[_shared(entry, path) for entry in content.get("shared", [])],
        slurm=content.get("slurm", {}),
    )


def _check_rule(rule: Any, path: Path) -> None:
    if not isinstance(rule, dict) or not rule:
        raise UserError(
            f"{path}: the rule {rule!r} is no mapping such as {{config: r8.yaml, model.size: [6, 8]}}."
        )


def _shared(entry: Any, path: Path) -> Shared:
    if not isinstance(entry, dict) or "sweep" not in entry:
        raise UserError(
            f"{path}: an entry of shared names a sweep, as in {{sweep: iso_depth.yaml}}; got {entry!r}."
        )
    refuse_unknown(entry, ("sweep", "only", "skip"), f"{path}, shared")
    rules: dict[str, list[dict[str, Any]]] = {}
    for kind in ("only", "skip"):
        rules[kind] = entry.get(kind, [])
        if not isinstance(rules[kind], list):
            raise UserError(f"{path}, shared: {kind} is {rules[kind]!r}; it must be a list of rules.")
        for rule in rules[kind]:
            _check_rule(rule, path)
    return Shared(find(str(entry["sweep"]), beside=path), **rules)


def config_path(name: str, sweep: Path) -> str:
    """Absolute path of a config file: beside the sweep file, in the working folder, or shipped.

    Raises:
        UserError: there is none.
        UserError: it is no YAML mapping.
    """
    beside = sweep.parent / name
    if not Path(name).is_absolute() and beside.is_file():
        name = str(beside)
    return str(Path(resolve_config(name)).resolve())
