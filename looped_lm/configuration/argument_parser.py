"""The parser of a configuration: its refusals name what exists, and what a class raises arrives as it was raised.

The private parts of jsonargparse that this takes are used in this file alone.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from jsonargparse._typehints import get_all_subclass_paths
from lightning.pytorch.cli import LightningArgumentParser

from looped_lm.common.errors import UserError
from looped_lm.common.text import did_you_mean
from looped_lm.configuration import callback_settings
from looped_lm.loop.component import import_class


class Parser(LightningArgumentParser):
    """LightningCLI's parser, with refusals and exceptions for whoever reads them."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        for cause in _causes(ex):
            # A module that fails while it is imported is not a wrong value.
            if any(frame.name == "<module>" for frame in traceback.extract_tb(cause.__traceback__)):
                raise cause
        helpful = _hint(message, getattr(ex, "subcommand_parser", None) or self)
        message = _innermost(message)
        sys.stderr.write(f"error: {message}\n{helpful}\n" if helpful else f"error: {message}\n")
        sys.exit(2)

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        words = callback_settings.written_as_mapping(list(sys.argv[1:] if args is None else args))
        return super().parse_args(words, *rest, **kwargs)

    def dump(self, cfg: Any, **kwargs: Any) -> str:
        """What --print_config shows: the configuration that would run.

        Where the callbacks are not parsed (null), as for the identity of a sweep's run, their settings stay beside
        them.
        """
        trainer = cfg.get("trainer")
        listed = trainer is not None and trainer.callbacks is not None
        return super().dump(callback_settings.settle(cfg.clone(), self) if listed else cfg, **kwargs)

    def instantiate_classes(self, cfg: Any, **kwargs: Any) -> Any:
        """Build what a configuration describes.

        Its values have been checked, so an exception is a constructor's: an argument that it refuses, or a bug, which
        must keep its type and its line. The parser alone would take it for a value of a wrong type.
        """
        raised: list[Exception] = []

        def build(component: type, *args: Any, **settings: Any) -> Any:
            try:
                return component(*args, **settings)
            except Exception as error:
                raised.append(error)
                raise

        try:
            return self.instantiate(cfg, instantiators=[(build, object, True)], **kwargs)
        except Exception as error:
            cause = raised[-1] if raised else error
        raise cause


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _innermost(message: str) -> str:
    """The message of a refused value alone, where a parser wraps it in all the types it tried."""
    message = re.sub(r"\n *- Expected a <class 'NoneType'>", "", message)
    head, found, tried = message.partition("Does not validate against any of the Union subtypes")
    if not found:
        return message
    errors = re.findall(r"^ +- (.*(?:\n +(?!- |Given)[^\n]*)*)", tried, re.MULTILINE)
    told = [e.strip() for e in errors if not e.startswith("Not a valid subclass")]
    return head.strip() + ("\n" if head.strip() else "") + "\n".join(told) if told else message


def _hint(message: str, parser: LightningArgumentParser) -> str:
    """What exists in place of what a parser refused: keys, classes, or arguments of a class; "" where nothing helps."""
    for find in (_unknown_argument_of_class, _unknown_key, _unknown_class):
        found = find(message, parser)
        if found:
            return found
    return ""


def _closest(name: str, names: Iterable[str], what: str) -> str:
    names = sorted(set(names))
    return f"{did_you_mean(name, names, cutoff=0.5)} {what}: {', '.join(names)}.".strip()


def _unknown_key(message: str, parser: LightningArgumentParser) -> str:
    match = re.search(
        r"(?:unrecognized arguments: (?:--)?|does not accept option '|Option ')([\w.]+)", message
    )
    if not match:
        return ""
    if re.search(r"unrecognized arguments: \S+\.ya?ml", message):
        return "A configuration file is given as --config FILE."
    group = re.search(r"Group '([\w.]+)' does not accept", message)
    full = f"{group.group(1)}.{match.group(1)}" if group else match.group(1)
    keys = [
        a.dest
        for a in parser._actions
        if a.option_strings and a.dest != "help" and not a.dest.endswith(".help")
    ]
    prefix = full.rpartition(".")[0]
    inside = [key for key in keys if key.startswith(f"{prefix}.")] if prefix else []
    return _closest(
        full, inside or {key.split(".")[0] for key in keys}, f"Keys of {prefix}" if inside else "Keys"
    )


def _unknown_argument_of_class(message: str, parser: LightningArgumentParser) -> str:
    match = re.search(
        r"Option '(?P<name>[\w.]+)' is not accepted.*class_path='(?P<path>[\w.]+)'", message, re.DOTALL
    ) or re.search(r"class_path '(?P<path>[\w.]+)'.*?[Oo]ption '(?P<name>[\w.]+)'", message, re.DOTALL)
    if not match:
        return ""
    try:
        accepted = inspect.signature(import_class(match["path"])).parameters
    except (UserError, ValueError, TypeError):
        return ""
    return _closest(
        match["name"], set(accepted) - {"self", "args", "kwargs"}, f"Arguments of {match['path']}"
    )


def _unknown_class(message: str, parser: LightningArgumentParser) -> str:
    match = re.search(r'Parser key "([\w.]+)"', message)
    action = next((a for a in parser._actions if match and a.dest == match.group(1)), None)
    wrong = re.search(
        r"(?:Given value: |Got value: |dot import path string: |class_path=')([\w.]+)", message
    ) or re.search(r"(?:has no attribute '|No module named ')([\w.]+)", message)
    typehint = getattr(action, "_typehint", None)
    if action is None or typehint is None or wrong is None:
        return ""
    classes = get_all_subclass_paths(typehint)
    if not classes:
        return ""
    name, package = wrong.group(1), classes[0].split(".")[0]
    return _closest(name if "." in name else f"{package}.{name}", classes, f"Classes for {action.dest}")
