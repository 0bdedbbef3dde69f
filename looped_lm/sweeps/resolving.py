"""What `fit` would make of a run's arguments: the parser's own answer, quick enough for hundreds of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from looped_lm.common.errors import UserError
from looped_lm.configuration.config_files import BASE, resolve_arguments
from looped_lm.configuration.parser import PlanCLI

_NOT_PARSED_AGAIN = ("callbacks", "logger")
"""Settings of the Trainer that no identity holds and that take most of the time of parsing."""


class _ParsedOnly(PlanCLI):
    """Parses and builds nothing."""

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None: ...

    def after_instantiate_classes(self) -> None: ...


def resolve(arguments: Sequence[str]) -> dict[str, Any]:
    """The configuration that `fit` would resolve from arguments, with every default written out.

    The Trainer's callbacks and loggers are null, unless an option names them.

    Args:
        arguments: `--config FILE` as two words each, and then `--key=value`.

    Raises:
        UserError: `fit` would refuse them.
    """
    split = next((i for i in range(0, len(arguments), 2) if arguments[i] != "--config"), len(arguments))
    files, options = arguments[:split], arguments[split:]
    with refusals_raised():
        contents = tuple(Path(file).read_bytes() for file in (str(BASE), *files[1::2]))
        parser, parsed = _parsed(tuple(files), contents)
        config = parsed.clone()
        for name in _NOT_PARSED_AGAIN:
            if not any(option.startswith(f"--trainer.{name}") for option in options):
                config.trainer[name] = None
        # Without defaults: those are in the files' configuration.
        return _dumped(parser, parser.parse_args(list(options), namespace=config, defaults=False))


def resolve_again(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration of an earlier version with the keys that did not exist then, at today's defaults.

    Raises:
        UserError: it has keys or classes that do not exist any more.
    """
    trainer = {k: v for k, v in config["trainer"].items() if k not in _NOT_PARSED_AGAIN}
    with refusals_raised():
        parser, _ = _parsed((), (BASE.read_bytes(),))
        known = {key: config[key] for key in ("seed_everything", "model", "data")}
        return _dumped(parser, parser.parse_object({**known, "trainer": trainer}))


@lru_cache(maxsize=64)
def _parsed(files: tuple[str, ...], contents: tuple[bytes, ...]) -> tuple[LightningArgumentParser, Namespace]:
    """A parser, and what it makes of config files; hundreds of runs share a few of them.

    The contents of the files are arguments so that a changed file is parsed anew.
    """
    cli = _ParsedOnly(resolve_arguments(list(files)))
    return cli.parser, cli.config


def _dumped(parser: LightningArgumentParser, config: Namespace) -> dict[str, Any]:
    dump = parser.dump(config, format="json", skip_none=False, skip_validation=True)
    return json.loads(dump)


@contextmanager
def refusals_raised() -> Iterator[None]:
    """A parser's way to refuse, which is to print and to leave, as an exception.

    Raises:
        UserError: what the parser printed.
    """
    told = StringIO()
    try:
        with redirect_stderr(told):
            yield
    except SystemExit:
        raise UserError(told.getvalue().strip().removeprefix("error: ")) from None
