"""The parser of a configuration: its refusals name what exists, and what a class raises keeps its type and line.

Only this file uses private parts of jsonargparse.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

from jsonargparse._typehints import get_all_subclass_paths
from lightning.pytorch.cli import LightningArgumentParser

from looped_lm.common.errors import UserError
from looped_lm.common.text import did_you_mean
from looped_lm.configuration import callback_settings


class Parser(LightningArgumentParser):
    """LightningCLI's parser, with refusals and exceptions that a user can act on."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        cause: BaseException | None = ex
        while cause is not None:
            # A module that fails while it is imported is not a wrong value.
            if any(frame.name == "<module>" for frame in traceback.extract_tb(cause.__traceback__)):
                raise cause
            cause = cause.__cause__ or cause.__context__
        parser = getattr(ex, "subcommand_parser", None) or self
        hint = _existing_keys(message, parser) or _existing_classes(message, parser)
        print(*filter(None, [f"error: {_innermost(message)}", hint]), sep="\n", file=sys.stderr)
        sys.exit(2)

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        words = callback_settings.written_as_mapping(list(sys.argv[1:] if args is None else args))
        return super().parse_args(words, *rest, **kwargs)

    def validate(self, namespace: Any, skip_unset: bool = True, *rest: Any, **kwargs: Any) -> None:
        try:
            # A parser takes null for "not given", whatever the type.
            super().validate(namespace, False, *rest, **kwargs)
        except TypeError:
            super().validate(namespace, skip_unset, *rest, **kwargs)
            raise

    def dump(self, cfg: Any, **kwargs: Any) -> str:
        """What --print_config shows: the configuration that would run.

        If callbacks are not parsed (null), as for the identity of a sweep's run, their settings stay in `callbacks`.
        """
        trainer = cfg.get("trainer")
        listed = trainer is not None and trainer.callbacks is not None
        return super().dump(callback_settings.settle(cfg.clone(), self) if listed else cfg, **kwargs)

    def instantiate_classes(self, cfg: Any, **kwargs: Any) -> Any:
        """Build what a configuration describes.

        Its values have been checked, so an exception comes from a constructor and keeps its type and line. Only a
        ValueError or ImportError of torch's and Lightning's classes becomes a UserError.
        """
        raised: list[Exception] = []

        def build(component: type, *args: Any, **settings: Any) -> Any:
            try:
                return component(*args, **settings)
            except Exception as error:
                raised.append(error)
                others = component.__module__.startswith(("torch.", "lightning."))
                if others and isinstance(error, ValueError | ImportError):
                    raised[-1] = UserError(f"{component.__name__}: {error}")
                    raise raised[-1] from error
                raise

        try:
            return self.instantiate(cfg, instantiators=[(build, object, True)], **kwargs)
        except Exception as error:
            cause = raised[-1] if raised else error
        raise cause


def _innermost(message: str) -> str:
    """The message about a refused value, without the types that the parser tried and lists around it."""
    message = re.sub(r"\n *- Expected a <class 'NoneType'>", "", message)
    head, _, tried = message.partition("Does not validate against any of the Union subtypes")
    errors = re.findall(r"^ +- (.*(?:\n +(?!- |Given)[^\n]*)*)", tried, re.MULTILINE)
    told = [error.strip() for error in errors if not error.startswith("Not a valid subclass")]
    return "\n".join([head.strip(), *told]).strip() if told else message


def _closest(name: str, names: Iterable[str], what: str) -> str:
    names = sorted(set(names))
    return f"{did_you_mean(name, names, cutoff=0.5)} {what}: {', '.join(names) or 'none'}.".strip()


def _existing_keys(message: str, parser: LightningArgumentParser) -> str:
    """The keys there are, if the message is about one that does not exist; else ""."""
    match = re.search(
        r"(?:unrecognized arguments: (?:--)?|(?:Group '([\w.]+)' )?.*does not accept option '|Option ')([\w.]+)",
        message,
    )
    if not match:
        return ""
    if re.search(r"unrecognized arguments: \S+\.ya?ml", message):
        return "A configuration file is given as --config FILE."
    full = ".".join(filter(None, match.groups()))
    keys = [a.dest for a in parser._actions if a.option_strings and not re.search(r"(^|\.)help$", a.dest)]
    prefix = full.rpartition(".")[0]
    inside = [key for key in keys if prefix and key.startswith(f"{prefix}.")]
    if inside:
        return _closest(full, inside, f"Keys of {prefix}")
    return _closest(full, (key.split(".")[0] for key in keys), "Keys")


def _existing_classes(message: str, parser: LightningArgumentParser) -> str:
    """The classes that a key can have, if the message refuses one for it; else ""."""
    match = re.search(r'Parser key "([\w.]+)"', message)
    wrong = re.search(r"(?:alue: |path string: |class_path[=': ]+')(?!Namespace)([\w.]+)", message)
    action = next((a for a in parser._actions if match and a.dest == match[1]), None)
    typehint: Any = getattr(action, "_typehint", None)
    classes = get_all_subclass_paths(typehint)
    if action is None or wrong is None or not classes:
        return ""
    name, package = wrong[1], classes[0].split(".")[0]
    return _closest(name if "." in name else f"{package}.{name}", classes, f"Classes for {action.dest}")
