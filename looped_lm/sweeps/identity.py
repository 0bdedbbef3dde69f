"""What a run trains: the keys that decide it, taken from the configuration as `fit` would resolve it.

Two ways to write the same run resolve to the same configuration, so they have the same identity.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from looped_lm.common.errors import UserError
from looped_lm.configuration.config_files import BASE, resolve_arguments
from looped_lm.configuration.parser import PlanCLI
from looped_lm.loop.component import class_path, import_class
from looped_lm.seams import before
from looped_lm.training.resume import BEFORE

IDENTITY = (
    "seed_everything", "model", "data", "trainer.precision", "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm", "trainer.max_steps", "trainer.max_time", "trainer.limit_train_batches",
    "trainer.limit_val_batches", "trainer.overfit_batches",
)  # fmt: skip
"""Keys that decide what is trained. Loggers, callbacks and devices do not."""
NOT_IDENTITY = (
    "model.val_every_steps", "model.compile_layers", "model.recompute", "data.batch_size", "data.val_batch_size",
    "data.val_rows", "data.num_workers",
)  # fmt: skip
"""Those among them that may change from one machine to the next. An axis of the sweep always counts."""
_NOT_PARSED_AGAIN = ("callbacks", "logger")
"""Settings of the Trainer that are in no identity and take most of the time of parsing."""


def values(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration as one mapping from dotted keys to values.

    A component's key has its class, always under the same name, and its arguments follow without `init_args`.
    Whole numbers are integers.
    """
    return dict(_leaves(config))


def identity(config_values: Mapping[str, Any], axes: Collection[str]) -> dict[str, Any]:
    """The part of a configuration's `values` that decides what is trained; axes of the sweep always count.

    A value that every run had before its key existed is left out, so that a new key changes no identity.
    """
    # An axis may be written with class_path and init_args in it, or add to a list.
    axes = {axis.replace(".init_args", "").removesuffix(".class_path").rstrip("+") for axis in axes}
    earlier = values({"model": {**BEFORE, **before()}})
    found = {}
    for key, value in config_values.items():
        counts = _within(key, axes) or (_within(key, IDENTITY) and key not in NOT_IDENTITY)
        as_before = key in earlier and earlier[key] == value
        if counts and not as_before:
            found[key] = value
    return found


def _within(key: str, keys: Collection[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def _leaves(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(content, Mapping) or not content:
        yield key, _plain(content)
        return
    for name, value in content.items():
        if name == "class_path":
            yield key, _one_name(value)
        elif name != "init_args":
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
        elif value:
            yield from _leaves(value, key)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [values(item) if isinstance(item, Mapping) else _plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@cache
def _one_name(path: str) -> str:
    try:
        found = import_class(path) if isinstance(path, str) else None
        return class_path(found) if hasattr(found, "__qualname__") else path
    except UserError:
        # The class is gone, or is defined inside a function.
        return path


class _ParsedOnly(PlanCLI):
    """Parses, and builds nothing."""

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None: ...

    def after_instantiate_classes(self) -> None: ...


def resolve(arguments: Sequence[str]) -> dict[str, Any]:
    """The configuration that `fit` would resolve from arguments, with every default written out.

    The Trainer's callbacks and loggers are null, unless an option names them.

    Args:
        arguments: first `--config FILE`, as two words each, then `--key=value`.

    Raises:
        UserError: `fit` would refuse them.
    """
    count = 2 * list(arguments).count("--config")
    files, options = arguments[:count], arguments[count:]
    with refusals_raised():
        contents = tuple(Path(file).read_bytes() for file in (str(BASE), *files[1::2]))
        parser, parsed = _parsed(tuple(files), contents)
        config = parsed.clone()
        for name in _NOT_PARSED_AGAIN:
            if not any(option.startswith(f"--trainer.{name}") for option in options):
                config.trainer[name] = None
        config = parser.parse_args(list(options), namespace=config)
        return _dumped(parser, config)


def resolve_again(config: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier version's resolved configuration, with keys that are new today at their defaults.

    Raises:
        UserError: it has keys or classes that no longer exist, or lacks a part.
    """
    known = {key: config[key] for key in ("seed_everything", "model", "data", "trainer") if key in config}
    if len(known) < 4:
        raise UserError(f"Of what decides a run, the configuration has only {', '.join(known) or 'nothing'}.")
    known["trainer"] = {k: v for k, v in known["trainer"].items() if k not in _NOT_PARSED_AGAIN}
    with refusals_raised():
        parser, _ = _parsed((), (BASE.read_bytes(),))
        return _dumped(parser, parser.parse_object(known))


@lru_cache(maxsize=64)
def _parsed(files: tuple[str, ...], contents: tuple[bytes, ...]) -> tuple[LightningArgumentParser, Namespace]:
    """A parser, and what it makes of config files, which are parsed again when their contents change."""
    cli = _ParsedOnly(resolve_arguments(list(files)))
    return cli.parser, cli.config


def _dumped(parser: LightningArgumentParser, config: Namespace) -> dict[str, Any]:
    return json.loads(parser.dump(config, format="json", skip_none=False, skip_validation=True))


@contextmanager
def refusals_raised() -> Iterator[None]:
    """Turn a parser's way of refusing, which is to print and exit, into an exception.

    Raises:
        UserError: what the parser printed.
    """
    told = StringIO()
    try:
        with redirect_stderr(told):
            yield
    except SystemExit:
        raise UserError(told.getvalue().strip().removeprefix("error: ")) from None
