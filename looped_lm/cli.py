"""`python -m looped_lm fit|validate|test|predict`: LightningCLI over LoopedLM and any data module."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info

from looped_lm.config_files import BASE, names_configuration, run_name
from looped_lm.hints import hint
from looped_lm.lightning_module import LoopedLM

#: Keys of the model whose change makes another model, so that a checkpoint's weights would mean something else.
RECIPE = ("horizon", "transfer", "schedule", "optimizer", "batch_tokens", "val_every_steps")


class Parser(LightningArgumentParser):
    """A parser that answers a mistyped key or class with what exists."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        helpful = hint(message, getattr(ex, "subcommand_parser", None) or self)
        sys.stderr.write(f"error: {message}\n{helpful}\n" if helpful else f"error: {message}\n")
        sys.exit(2)


class LoopedCLI(LightningCLI):
    """The command line. Components come from the configuration by class path; none is named here."""

    def __init__(self, run: bool = True) -> None:
        self.arguments = sys.argv[1:]
        super().__init__(
            LoopedLM,
            L.LightningDataModule,
            subclass_mode_data=True,
            parser_class=Parser,
            seed_everything_default=1,
            # LoopedLM stores plain hyperparameters itself: a checkpoint must load without a parser, too.
            load_from_checkpoint_support=False,
            auto_configure_optimizers=False,
            parser_kwargs={"description": __doc__},
            run=run,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # An abbreviated key is as often a mistyped one.
        return super().init_parser(**{"allow_abbrev": False, "prog": "python -m looped_lm", **kwargs})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_name",
            type=str | None,
            default=None,
            help="Name of the run; null takes the config files' names.",
        )
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")
        parser.link_arguments("data.seq_len", "model.seq_len", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            super().parse_arguments(parser, args)
        except SystemExit as stop:
            if not stop.code and {"-h", "--help"} & set(self.arguments):
                self._help_on_data(parser)
            raise

    def _help_on_data(self, parser: LightningArgumentParser) -> None:
        """The keys of the data module in base.yaml; a parser alone documents the name of its class and no more."""
        data_class = yaml.safe_load(BASE.read_text())["data"]["class_path"]
        subcommand = [word for word in self.arguments[:1] if not word.startswith("-")]
        print()
        parser.parse_args([*subcommand, "--data.help", data_class])

    # ---- Before anything is built ---------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        config.run_name = config.run_name or run_name(self.arguments)
        for logger in _as_list(config.trainer.logger):
            init_args = getattr(logger, "init_args", None)
            if init_args is not None and "name" in init_args and init_args.name is None:
                init_args.name = config.run_name

    def after_instantiate_classes(self) -> None:
        # The parser knows how to write a configuration as plain data; the run record keeps it.
        dump = yaml.safe_load(self.parser.dump(self.config, skip_none=False, skip_validation=True))
        config = dump if self.subcommand is None else dump[self.subcommand]
        self.model.provenance = {
            "run_name": config["run_name"],
            "seed": config["seed_everything"],
            "config": config,
        }

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def _parse_ckpt_path(self) -> None:
        """Compare a checkpoint with the configuration; Lightning would let the checkpoint win without a word."""
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if not path or path in ("last", "best", "hpc", "registry"):
            return
        if not Path(path).is_file():
            raise FileNotFoundError(f"ckpt_path {path!r} is not a file.")
        checkpoint = load_checkpoint(path)
        stored = checkpoint["hyper_parameters"]
        if subcommand != "fit" and not names_configuration(self.arguments[1:]):
            self._take_run_from(checkpoint)
        differences = model_differences(stored, self.config[subcommand].model.as_dict())
        if not differences:
            return
        listing = "\n".join(
            f"  {key}: {old!r} in the checkpoint, {new!r} here" for key, old, new in differences
        )
        model_keys = [key for key, _, _ in differences if key.split(".")[0] not in RECIPE]
        if model_keys:
            raise ValueError(
                f"The configuration describes another model than {path}:\n{listing}\n"
                "Give the configuration that the checkpoint was trained with (its run folder holds config.yaml)."
            )
        if subcommand == "fit":
            rank_zero_info(
                f"The recipe differs from the checkpoint's; the configuration given here is used:\n{listing}"
            )

    def _take_run_from(self, checkpoint: dict[str, Any]) -> None:
        """Model and data as the checkpoint's run had them, for commands that name no configuration of their own."""
        recorded = (checkpoint.get("run_record") or {}).get("config") or {}
        taken = {key: recorded[key] for key in ("run_name", "model", "data") if key in recorded}
        for key in ("vocab_size", "seq_len"):
            taken.get("model", {}).pop(key, None)
        if "model" not in taken:
            raise ValueError(
                "The checkpoint holds no configuration of its run (it was not trained from the command line): "
                "give the configuration it was trained with, by --config."
            )
        self.config = self.parser.parse_object({self.config.subcommand: taken}, self.config)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint as plain data and tensors, on the CPU.

    Raises:
        ValueError: the file is no whole checkpoint of a LoopedLM.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error})."
        ) from error
    missing = [
        k
        for k in ("state_dict", "hyper_parameters")
        if not isinstance(checkpoint, dict) or k not in checkpoint
    ]
    if missing:
        raise ValueError(f"{path} is no checkpoint of a LoopedLM: it has no {' and no '.join(missing)}.")
    return checkpoint


def model_differences(stored: dict[str, Any], config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value in the checkpoint, value in the configuration) wherever the model section differs."""
    old, new = _flat(stored), _flat(config)
    # Values that the data supplies, and arguments that only one side writes out as a default.
    keys = sorted(k for k in old.keys() & new.keys() if k.split(".")[0] not in ("vocab_size", "seq_len"))
    return [(k, old[k], new[k]) for k in keys if old[k] != new[k]]


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(values, dict):
        flat: dict[str, Any] = {}
        for key, value in values.items():
            flat.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
        return flat
    return {prefix: list(values) if isinstance(values, tuple) else values}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def quiet() -> None:
    """Leave out what is no message to a user of this command line."""
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda r: "litlogger" not in r.getMessage()
    )


def main() -> None:
    """Run the command in sys.argv."""
    quiet()
    LoopedCLI()
