"""Where configuration files are looked up, and the base under every run.

`base.yaml` always comes first on the command line: every other file and option changes a complete configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from looped_lm.common.errors import UserError
from looped_lm.common.text import did_you_mean

SHIPPED = Path(__file__).resolve().parents[2] / "configs"
BASE = SHIPPED / "base.yaml"
_FLAGS = ("--config", "-c")
#: What every architecture config states, with or without axes of `looped_lm.seams`.
LAYOUT = ("prelude_layers", "recurrent_layers", "coda_layers", "num_recurrences")


def resolve_config(name: str) -> str:
    """Path of a config file, given by its path, or by the bare name of a file here or else of a shipped one.

    Raises:
        UserError: there is no such file (the message lists the shipped ones), or it or its model or trainer is not a
            YAML mapping.
    """
    path = Path(name)
    if not path.is_file():
        if path.name == name and (SHIPPED / name).is_file():
            return str(SHIPPED / name)
        shipped = sorted(p.name for p in SHIPPED.glob("*.yaml"))
        raise UserError(
            f"Config {name!r} is neither a file here ({Path.cwd()}) nor a shipped config.{did_you_mean(name, shipped)} "
            f"Shipped: {', '.join(shipped)}."
        )
    # Checked here: a parser of several files would not name the one at fault.
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"Config {path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        what = "empty" if content is None else f"a {type(content).__name__}"
        raise UserError(
            f"Config {path} is {what}; a configuration maps keys such as model, data and trainer."
        )
    for key in ("model", "trainer"):
        if not isinstance(content.get(key, {}), dict | str):
            raise UserError(f"Config {path} has {content[key]!r} for {key}, which must map keys to values.")
    return name


def resolve_arguments(args: list[str]) -> list[str]:
    """Arguments of a command with config names resolved and `--config base.yaml` in front; idempotent.

    A launcher of several processes runs the command line again, so resolving twice must change nothing.

    Raises:
        UserError: a config does not exist; several describe an architecture, as base.yaml after one does; or one
            before an architecture sets an axis that the architecture does not state.
    """
    resolved: list[str] = []
    for before, arg in zip(["", *args], args, strict=False):
        flag, equals, value = arg.partition("=")
        if before in _FLAGS:
            arg = resolve_config(arg)
        elif flag in _FLAGS and equals:
            arg = f"{flag}={resolve_config(value)}"
        resolved.append(arg)
    base = ["--config", str(BASE)]
    resolved = resolved if resolved[:2] == base else base + resolved
    # Each states what it changes in base.yaml: a second would keep whatever only the first states.
    first: Path | None = None
    set_by: dict[str, Path] = {}
    for path in _config_files(resolved)[1:]:
        axes, architecture = _axes(path), is_architecture(path)
        if first and architecture:
            raise UserError(
                f"{first.name} and {path.name} each describe a whole architecture, and a run has one: what "
                f"{path.name} does not state would be left as {first.name} has it. Give one of them and change "
                "single keys (--model.KEY VALUE), or copy what you want of both into one file."
            )
        if architecture and (kept := sorted(set_by.keys() - axes)):
            before = set_by[kept[0]].name
            raise UserError(
                f"{path.name} states only what differs from base.yaml, so model.{kept[0]} would stay as {before} "
                f"sets it. Give {path.name} first, and {before} after it if that is what you want."
            )
        if path.resolve() == BASE:
            set_by.clear()
        else:
            set_by |= dict.fromkeys(axes, path)
            first = path if architecture else first
    return resolved


def is_architecture(path: Path) -> bool:
    """Whether a config file describes an architecture: the whole layout, with an axis of the loop or nothing else.

    Other files, which set a width, part of a layout or single axes, change the architecture before them.
    """
    content, model = _stated(path)
    if not set(LAYOUT) <= set(model):
        return False
    return bool(_axes(path)) or (set(content) == {"model"} and set(model) == set(LAYOUT))


def _axes(path: Path) -> set[str]:
    """The axes of the loop that a config file sets."""
    from looped_lm.seams import SEAMS

    return set(SEAMS) & set(_stated(path)[1])


def _stated(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a config file holds, and what it holds under `model`."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    model = content.get("model")
    return content, model if isinstance(model, dict) else {}


def _config_files(args: Sequence[str]) -> list[Path]:
    """The config files that arguments name, in order."""
    files = []
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        flag, _, value = arg.partition("=")
        if flag in _FLAGS and (value or following):
            files.append(Path(value or following))
    return files


def run_name(args: list[str]) -> str:
    """Name of a run from its config files: their stems joined, without the base."""
    return "-".join(path.stem for path in _config_files(args) if path != BASE) or BASE.stem
