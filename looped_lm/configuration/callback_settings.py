"""The key `callbacks`: single settings of the callbacks in `trainer.callbacks`, by the name of their class.

`--callbacks.Checkpoints.every_n_steps 50` and `callbacks: {Checkpoints: {every_n_steps: 50}}` change one setting and
leave the rest of the list as it is; null in place of the settings leaves the callback out. Later files and options win,
setting by setting. What is parsed, printed and saved is the list with these settings in it, and no key `callbacks`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Checkpoint, ProgressBar

from looped_lm.common.errors import UserError
from looped_lm.common.text import did_you_mean
from looped_lm.configuration.config_files import BASE
from looped_lm.loop.component import import_class

HELP = (
    "Settings of single callbacks of trainer.callbacks by class name: --callbacks.Checkpoints.every_n_steps 50; null "
    "leaves one out: --callbacks.Samples null. A class documents its settings by --trainer.callbacks.help CLASS."
)


class MergeSettings(argparse.Action):
    """Adds settings to those that came before, where argparse would replace them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.update(values, self.dest)


class Settings:
    """Reads settings of a file or the command line as a Namespace: the parser merges those key by key."""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            value = yaml.safe_load(value)
        if not isinstance(value, Mapping):
            return value
        return Namespace({n: Namespace(v) if isinstance(v, Mapping) else v for n, v in value.items()})

    def __repr__(self) -> str:
        """As `--help` names the type."""
        return "names of classes, each with its settings or null"


def written_as_mapping(args: list[str]) -> list[str]:
    """Arguments with every `--callbacks.NAME.SETTING VALUE` as `--callbacks {NAME: {SETTING: VALUE}}`.

    Raises:
        UserError: an option that would reach whichever callback comes last in trainer.callbacks.
    """
    words, rest, listed = [], iter(args), False
    for word in rest:
        flag, equals, value = word.partition("=")
        listed = listed or flag in ("--trainer.callbacks", "--trainer.callbacks+")
        if flag.startswith("--trainer.callbacks.") and not listed and flag != "--trainer.callbacks.help":
            setting = flag.removeprefix("--trainer.callbacks.").removeprefix("init_args.")
            named = setting if setting[:1].isupper() else f"Checkpoints.{setting}"
            raise UserError(
                f"{flag} would reach whichever callback comes last. Name the one that you mean, as in "
                f"--callbacks.{named}."
            )
        if flag.startswith("--callbacks."):
            value = value if equals else next(rest, "null")
            name, _, setting = flag.removeprefix("--callbacks.").partition(".")
            # A number stays as it is written: the parser reads 1e-3, which YAML alone takes for a text.
            content = yaml.safe_load(value)
            words.append(f"--callbacks={json.dumps({name: {setting: content} if setting else content})}")
        else:
            words.append(word)
    return words


def settle(config: Namespace, parser: Any) -> Namespace:
    """The configuration with `callbacks` brought into `trainer.callbacks`, less those that its Trainer switches off.

    Args:
        config: of one command; changed in place.
        parser: that it comes from, which checks the changed settings.

    Raises:
        UserError: a name that no callback of the list has, or that several have; settings that are no mapping.
    """
    given = config.pop("callbacks", None)
    trainer = config.get("trainer")
    if trainer is None:
        return config
    listed = trainer.callbacks if isinstance(trainer.callbacks, list) else [trainer.callbacks]
    entries = [entry for entry in listed if entry is not None]
    for name, changes in _mapping("callbacks", given).items():
        entry = _named(name, entries)
        if changes is None:
            entries.remove(entry)
        else:
            changes = _mapping(f"callbacks.{name}", changes)
            kept = entry.get("init_args") or Namespace()
            entry.init_args = _checked(name, entry.class_path, {**kept.as_dict(), **changes}, parser)
    base = yaml.safe_load(BASE.read_text(encoding="utf-8"))["trainer"]
    defaults = [callback["class_path"] for callback in base["callbacks"]]
    trainer.callbacks = [
        e for e in entries if e.class_path not in defaults or not _in_the_way(e.class_path, trainer)
    ]
    if trainer.barebones:
        if getattr(trainer.logger, "class_path", None) == base["logger"]["class_path"]:
            trainer.logger = False
        if trainer.log_every_n_steps == base["log_every_n_steps"]:
            trainer.log_every_n_steps = None
    return config


def _mapping(key: str, given: Any) -> dict[str, Any]:
    if isinstance(given, Namespace | None):
        return {} if given is None else vars(given)
    raise UserError(
        f"{key} is {given!r}; callbacks maps names of classes to settings, or to null: Checkpoints: {{keep: 3}}"
    )


def _named(name: str, entries: list[Namespace]) -> Namespace:
    names = [entry.class_path.rpartition(".")[2] for entry in entries]
    found = [e for e, n in zip(entries, names, strict=True) if name in (n, e.class_path)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"callbacks.{name}: trainer.callbacks names {name} {len(found)} times: give their settings there."
        )
    raise UserError(
        f"callbacks.{name}: trainer.callbacks has no {name}.{did_you_mean(name, names)} It has {', '.join(names)}. "
        "A configuration that sets `trainer.callbacks+` adds one."
    )


def _checked(name: str, class_path: str, init_args: dict[str, Any], parser: Any) -> Namespace:
    """Settings of a class, refused as the parser refuses others: with what exists."""
    one = type(parser)(prog=parser.prog)
    one.add_class_arguments(import_class(class_path), f"callbacks.{name}")
    return one.parse_object({"callbacks": {name: init_args}}).callbacks[name]


def _in_the_way(class_path: str, trainer: Namespace) -> bool:
    """Whether a callback is one that Lightning refuses beside the settings of the Trainer."""
    kind = import_class(class_path)
    return bool(
        trainer.barebones
        or (trainer.enable_progress_bar is False and issubclass(kind, ProgressBar))
        or (trainer.enable_checkpointing is False and issubclass(kind, Checkpoint))
    )
