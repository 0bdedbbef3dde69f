"""Where configuration files are looked up, and the base that lies under every run.

A bare name is looked up in the working folder first, then among the shipped configs. `base.yaml` always comes first on
the command line, so that every other file and option changes a complete configuration.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import yaml

from looped_lm.common.errors import UserError

SHIPPED = Path(__file__).resolve().parents[2] / "configs"
BASE = SHIPPED / "base.yaml"
_FLAGS = ("--config", "-c")


def resolve_config(name: str) -> str:
    """Path of a config file given by path or bare name.

    Raises:
        UserError: no such file; the message lists the shipped ones.
        UserError: the file is no YAML mapping.
    """
    path = Path(name)
    if path.is_file():
        _check(path)
        return name
    if path.name == name and (SHIPPED / name).is_file():
        return str(SHIPPED / name)
    shipped = sorted(p.name for p in SHIPPED.glob("*.yaml"))
    close = difflib.get_close_matches(name, shipped, n=1)
    raise UserError(
        f"Config {name!r} is neither a file here ({Path.cwd()}) nor a shipped config."
        + (f" Did you mean {close[0]}?" if close else "")
        + f" Shipped: {', '.join(shipped)}."
    )


def _check(path: Path) -> None:
    """Refuse what is no configuration, by the name of the file; a parser of several files would not name it."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"Config {path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        what = "empty" if content is None else f"a {type(content).__name__}"
        raise UserError(
            f"Config {path} is {what}; a configuration maps keys such as model, data and trainer."
        )


def resolve_arguments(args: list[str]) -> list[str]:
    """Arguments of a command with config names resolved and `--config base.yaml` in front; idempotent.

    A launcher of several processes runs the command line again, so resolving twice must change nothing.
    """
    resolved: list[str] = []
    after_flag = False
    for arg in args:
        flag, equals, value = arg.partition("=")
        if after_flag:
            resolved.append(resolve_config(arg))
        elif flag in _FLAGS and equals:
            resolved.append(f"{flag}={resolve_config(value)}")
        else:
            resolved.append(arg)
        after_flag = arg in _FLAGS
    base = ["--config", str(BASE)]
    return resolved if resolved[:2] == base else base + resolved


def run_name(args: list[str]) -> str:
    """Name of a run from its config files: their stems joined, without the base."""
    names: list[str] = []
    for i, arg in enumerate(args):
        flag, _, value = arg.partition("=")
        if flag in _FLAGS:
            path = value or (args[i + 1] if i + 1 < len(args) else "")
            if path and Path(path) != BASE:
                names.append(Path(path).stem)
    return "-".join(names) or BASE.stem
