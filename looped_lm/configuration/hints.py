"""Turns a parser's refusal into one that names what exists: keys, classes, or arguments of a class."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from typing import Any

from looped_lm.loop.component import import_class


def hint(message: str, parser: Any) -> str:
    """What exists in place of what a parser refused, or "" where there is nothing to add.

    Args:
        message: the parser's error message.
        parser: the `jsonargparse.ArgumentParser` that gave it.
    """
    for find in (_unknown_argument_of_class, _unknown_key, _unknown_class):
        found = find(message, parser)
        if found:
            return found
    return ""


def innermost(message: str) -> str:
    """The message of a refused value alone, where a parser wraps it in all the types it tried."""
    message = re.sub(r"\n *- Expected a <class 'NoneType'>", "", message)
    head, found, tried = message.partition("Does not validate against any of the Union subtypes")
    if not found:
        return message
    errors = re.findall(r"^ +- (.*(?:\n +(?!- |Given)[^\n]*)*)", tried, re.MULTILINE)
    told = [e.strip() for e in errors if not e.startswith("Not a valid subclass")]
    return head.strip() + ("\n" if head.strip() else "") + "\n".join(told) if told else message


def _closest(name: str, names: Iterable[str], what: str) -> str:
    names = sorted(set(names))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"Did you mean {close[0]!r}? " if close else "") + f"{what}: {', '.join(names)}."


def _keys(parser: Any) -> list[str]:
    return [
        a.dest
        for a in parser._actions
        if a.option_strings and a.dest != "help" and not a.dest.endswith(".help")
    ]


def _unknown_key(message: str, parser: Any) -> str:
    match = re.search(
        r"(?:unrecognized arguments: (?:--)?|does not accept option '|Option ')([\w.]+)", message
    )
    if not match:
        return ""
    name = match.group(1)
    if re.search(r"unrecognized arguments: \S+\.ya?ml", message):
        return "A configuration file is given as --config FILE."
    group = re.search(r"Group '([\w.]+)' does not accept", message)
    full = f"{group.group(1)}.{name}" if group else name
    keys = _keys(parser)
    prefix = full.rpartition(".")[0]
    inside = [key for key in keys if key.startswith(f"{prefix}.")] if prefix else []
    return _closest(
        full, inside or {key.split(".")[0] for key in keys}, f"Keys of {prefix}" if inside else "Keys"
    )


def _unknown_argument_of_class(message: str, parser: Any) -> str:
    match = re.search(r"Option '([\w.]+)' is not accepted.*class_path='([\w.]+)'", message, re.DOTALL)
    if not match:
        match = re.search(r"class_path '([\w.]+)'.*?(?:Option|option) '([\w.]+)'", message, re.DOTALL)
        if not match:
            return ""
        path, name = match.groups()
    else:
        name, path = match.groups()
    try:
        accepted = [
            n for n in inspect.signature(import_class(path)).parameters if n not in ("self", "args", "kwargs")
        ]
    except (ValueError, TypeError):
        return ""
    return _closest(name, accepted, f"Arguments of {path}")


def _unknown_class(message: str, parser: Any) -> str:
    match = re.search(r'Parser key "([\w.]+)"', message)
    action = next((a for a in parser._actions if match and a.dest == match.group(1)), None)
    wrong = re.search(
        r"(?:Given value: |Got value: |dot import path string: |class_path=')([\w.]+)", message
    ) or re.search(r"(?:has no attribute '|No module named ')([\w.]+)", message)
    typehint = getattr(action, "_typehint", None)
    if action is None or typehint is None or wrong is None:
        return ""
    from jsonargparse._typehints import get_all_subclass_paths

    classes = get_all_subclass_paths(typehint)
    if not classes:
        return ""
    package = classes[0].split(".")[0]
    name = wrong.group(1)
    return _closest(name if "." in name else f"{package}.{name}", classes, f"Classes for {action.dest}")
