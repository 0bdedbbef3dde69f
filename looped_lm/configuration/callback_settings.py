"""The key `callbacks`: single settings of the callbacks in `trainer.callbacks`, by the name of their class.

`--callbacks.Checkpoints.every_n_steps 50` and `callbacks: {Checkpoints: {every_n_steps: 50}}` change one setting and
leave the rest of the list as it is; null instead of the settings leaves the callback out. Later files and options win,
setting by setting. The list with these settings in it is parsed, printed and saved, without the key `callbacks`.
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


class MergeSettings(argparse.Action):
    """Adds settings to those that came before, where argparse would replace them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.update(values, self.dest)


class Settings:
    """Reads settings from a file or the command line as a Namespace, which the parser merges key by key."""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            value = _content("callbacks", value)
        if not isinstance(value, Mapping):
            return value
        return Namespace({n: Namespace(v) if isinstance(v, Mapping) else v for n, v in value.items()})

    def __repr__(self) -> str:
        """How `--help` names the type."""
        return "names of classes, each with its settings or null"


#: Arguments of `add_argument` for the key.
OPTION: dict[str, Any] = {
    "action": MergeSettings,
    "type": Settings(),
    "help": "Settings of single callbacks of trainer.callbacks by class name: --callbacks.Checkpoints.every_n_steps "
    "50; null leaves one out: --callbacks.Samples null. --trainer.callbacks.help CLASS documents the settings of a "
    "class.",
}


def written_as_mapping(args: list[str]) -> list[str]:
    """Arguments with every `--callbacks.NAME.SETTING VALUE` as `--callbacks {NAME: {SETTING: VALUE}}`.

    Raises:
        UserError: a value is missing or not YAML, or an option would reach whichever callback comes last in the list.
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
            value = value if equals else next(rest, "")
            if not value or (value.startswith("--") and not equals):
                raise UserError(f"{flag} has no value: give one after it, or null, as in {flag} null.")
            name, _, setting = flag.removeprefix("--callbacks.").partition(".")
            # A number stays as it is written: the parser reads 1e-3, which YAML alone takes for text.
            content = _content(flag, value)
            settings = {name: {setting: content} if setting else content}
            # A date, which JSON lacks, is a text.
            words.append(f"--callbacks={json.dumps(settings, default=str)}")
        else:
            words.append(word)
    return words


def _content(option: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{option} is {value!r}, which is not YAML: {reason}") from error


def settle(config: Namespace, parser: Any) -> Namespace:
    """Apply `callbacks` to the list in `trainer.callbacks`, and drop those that the Trainer switches off.

    A command's configuration is changed in place; the parser that it comes from checks the changed settings.

    Raises:
        UserError: a name that no callback in the list has, or that several have; settings that are not a mapping.
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
            continue
        kept = entry.get("init_args") or Namespace()
        init_args = {**kept.as_dict(), **_mapping(f"callbacks.{name}", changes)}
        # A separate parser refuses settings as the main one refuses others: it names what exists.
        one = type(parser)(prog=parser.prog)
        one.add_class_arguments(import_class(entry.class_path), f"callbacks.{name}")
        entry.init_args = one.parse_object({"callbacks": {name: init_args}}).callbacks[name]
    base = yaml.safe_load(BASE.read_text(encoding="utf-8"))["trainer"]
    defaults = [callback["class_path"] for callback in base["callbacks"]]
    # Callbacks that Lightning refuses together with these settings of the Trainer.
    refused: list[type] = [object] if trainer.barebones else []
    refused += [ProgressBar] if trainer.enable_progress_bar is False else []
    refused += [Checkpoint] if trainer.enable_checkpointing is False else []
    trainer.callbacks = [
        entry
        for entry in entries
        if entry.class_path not in defaults or not issubclass(import_class(entry.class_path), tuple(refused))
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
    found = [e for e, n in zip(entries, names, strict=True) if n == name]
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
