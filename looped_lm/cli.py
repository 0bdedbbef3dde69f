"""`python -m looped_lm fit|validate|test|predict`: LightningCLI over LoopedLM and any data module."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from looped_lm.checkpoints import load_checkpoint
from looped_lm.config_files import BASE, run_name
from looped_lm.hints import hint, innermost
from looped_lm.lightning_module import LoopedLM
from looped_lm.trainer_settings import processes_of_torchrun

SECTIONS = ("model", "data", "trainer")


class RunConfig(SaveConfigCallback):
    """Saves the resolved configuration into the run's folder; without a logger a run has none."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


class Parser(LightningArgumentParser):
    """A parser that answers a mistyped key or class with what exists."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        helpful = hint(message, getattr(ex, "subcommand_parser", None) or self)
        message = innermost(message)
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
            save_config_callback=RunConfig,
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
            with tempfile.TemporaryDirectory() as folder:
                self.config = parser.parse_args(self._with_run_of_checkpoint(self.arguments, folder))
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
        path = self.config[self.subcommand].get("ckpt_path") if self.subcommand else None
        if self.subcommand not in (None, "fit") and not path:
            raise ValueError(
                f"{self.subcommand} needs --ckpt_path FILE: without one it would judge untrained weights."
            )
        if path and "://" not in path:
            if not Path(path).is_file():
                raise FileNotFoundError(f"ckpt_path {path!r} is not a file. Give the path of a checkpoint.")
            load_checkpoint(path)
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        trainer = config.trainer
        trainer.devices, trainer.num_nodes = processes_of_torchrun(
            trainer.devices, trainer.num_nodes, os.environ
        )
        config.run_name = config.run_name or run_name(self.arguments)
        if Path(config.run_name).name != config.run_name:
            raise ValueError(
                f"run_name {config.run_name!r} is a path; it names a folder inside the logger's save_dir."
            )
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
        """Not as Lightning does it: there the checkpoint's hyperparameters win over the configuration without a word.

        LoopedLM compares the two when the Trainer loads the checkpoint.
        """

    def _with_run_of_checkpoint(self, args: list[str], folder: str) -> list[str]:
        """Arguments of `validate`, `test` or `predict` with the run of the checkpoint underneath what the user gave."""
        path = option(args, "--ckpt_path")
        if args[:1] == ["fit"] or path is None or not Path(path).is_file():
            return args
        recorded = (load_checkpoint(path).get("run_record") or {}).get("config")
        if not isinstance(recorded, dict) or not all(isinstance(recorded.get(k), dict) for k in SECTIONS):
            return args
        taken = {key: recorded[key] for key in ("run_name", "model", "data") if key in recorded}
        taken["trainer"] = {"precision": recorded["trainer"].get("precision", "32-true")}
        for key in ("vocab_size", "seq_len"):
            taken.get("model", {}).pop(key, None)
        underneath = Path(folder) / "run_of_checkpoint.yaml"
        underneath.write_text(yaml.safe_dump(taken))
        # After the subcommand and `--config base.yaml`.
        return [*args[:3], "--config", str(underneath), *args[3:]]


def option(args: list[str], flag: str) -> str | None:
    """Last value of an option given as `flag value` or `flag=value`."""
    values = [b for a, b in zip(args, args[1:], strict=False) if a == flag]
    values += [arg.partition("=")[2] for arg in args if arg.startswith(f"{flag}=")]
    return values[-1] if values else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def quiet() -> None:
    """Leave out what is no message to a user of this command line."""
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    # LoopedLM logs sums over all processes.
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
    warnings.filterwarnings("ignore", message=r".*The dirpath has changed from.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda r: "litlogger" not in r.getMessage()
    )


def main() -> None:
    """Run the command in sys.argv."""
    quiet()
    LoopedCLI()
