"""`python -m looped_lm fit|validate|test|predict`: LightningCLI over LoopedLM and any data module."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from looped_lm.common.errors import UserError
from looped_lm.common.text import say
from looped_lm.common.writing import failing_with
from looped_lm.configuration import callback_settings
from looped_lm.configuration.argument_parser import Parser
from looped_lm.configuration.config_files import BASE, run_name
from looped_lm.runs.checkpoint import look, newest_whole, verify
from looped_lm.runs.folder import AUTO, RunFolder
from looped_lm.training.lightning_module import LoopedLM
from looped_lm.training.trainer_settings import processes_of_torchrun

SECTIONS = ("model", "data", "trainer")


class RunConfig(SaveConfigCallback):
    """Saves the resolved configuration into the run's folder; without a logger there is no such folder.

    Each part of a resumed run has its own file. Loggers of a service (W&B and others) share one folder among all runs:
    with them only a fit, which has its own folder, saves a file.
    """

    #: The checkpoint that the run goes on from, and, on the process that writes, the folder of the run in `fit`.
    resumes: str | None = None
    folder: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Every process looked for the checkpoint itself.
        first = trainer.strategy.broadcast(self.resumes)
        if first != self.resumes:
            raise UserError(
                f"Process {trainer.global_rank} would go on from {self.resumes}, process 0 from {first}: all processes "
                "must see the same files. Give --ckpt_path."
            )
        if not trainer.loggers:
            return
        files = isinstance(trainer.loggers[0], TensorBoardLogger | CSVLogger)
        folder = Path(str(trainer.log_dir)) if files else self.folder
        name, parts = Path(self.config_filename), 0
        while self.resumes and folder is not None and (folder / self.config_filename).exists():
            parts += 1
            self.config_filename = f"{name.stem}_resumed_{parts}{name.suffix}"
        way_out = "Make room, or name another folder by trainer.logger.save_dir."
        with failing_with(way_out, self.config_filename):
            if files:
                super().setup(trainer, pl_module, stage)
            elif folder is not None and trainer.is_global_zero and not self.already_saved:
                self.parser.save(self.config, folder / self.config_filename, skip_none=False)
                self.already_saved = True


class LoopedCLI(LightningCLI):
    """The command line. Components come from the configuration by class path; none is named here."""

    def __init__(self, arguments: Sequence[str] | None = None, run: bool = True) -> None:
        self.arguments = list(sys.argv[1:] if arguments is None else arguments)
        with ExitStack() as self.holding:
            super().__init__(
                LoopedLM,
                L.LightningDataModule,
                subclass_mode_data=True,
                parser_class=Parser,
                save_config_callback=RunConfig,
                seed_everything_default=1,
                # LoopedLM stores plain hyperparameters itself, since a checkpoint must also load without a parser.
                load_from_checkpoint_support=False,
                auto_configure_optimizers=False,
                parser_kwargs={"description": __doc__},
                run=run,
            )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # An abbreviated key is as likely a mistyped one.
        return super().init_parser(**{"allow_abbrev": False, "prog": "python -m looped_lm", **kwargs})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        name = "Name of the run; null takes the config files' names."
        resume = (
            "fit only. auto: go on from the newest whole checkpoint of the run, or start if there is none. "
            "A run's folder (runs/NAME/version_N): go on with that one."
        )
        parser.add_argument("--run_name", type=str | None, default=None, help=name)
        parser.add_argument("--resume", type=str | None, default=None, help=resume)
        parser.add_argument("--callbacks", **callback_settings.OPTION)
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")
        parser.link_arguments("data.seq_len", "model.seq_len", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                self.config = parser.parse_args(self._with_run_of_checkpoint(self.arguments, folder))
        except SystemExit as stop:
            if not stop.code and {"-h", "--help"} & set(self.arguments):
                # By itself the parser names the class of the data module but documents none of its keys.
                data_class = yaml.safe_load(BASE.read_text())["data"]["class_path"]
                subcommand = [word for word in self.arguments[:1] if not word.startswith("-")]
                print()
                parser.parse_args([*subcommand, "--data.help", data_class])
            raise
        name = self.config.get("subcommand")
        callback_settings.settle(self.config if name is None else self.config[name], parser)

    def before_instantiate_classes(self) -> None:
        command = self.subcommand
        config = self.config if command is None else self.config[command]
        path = config.get("ckpt_path")
        if command not in (None, "fit"):
            if config.get("resume"):
                raise UserError(f"resume is for fit; {command} takes a checkpoint, with --ckpt_path FILE.")
            if not path:
                raise UserError(
                    f"{command} needs --ckpt_path FILE: without one it would judge untrained weights."
                )
        if path and "://" not in path:
            if not Path(path).is_file():
                raise UserError(f"ckpt_path {path!r} is not a file. Give the path of a checkpoint.")
            _check_whole(Path(path))
        trainer = config.trainer
        trainer.devices, trainer.num_nodes = processes_of_torchrun(
            trainer.devices, trainer.num_nodes, os.environ
        )
        if config.run_name is None and config.get("resume") not in (None, AUTO):
            config.run_name = Path(config.resume).resolve().parent.name
        config.run_name = config.run_name or run_name(self.arguments)
        if Path(config.run_name).name != config.run_name:
            raise UserError(
                f"run_name {config.run_name!r} is a path; it names a folder inside the logger's save_dir."
            )
        for logger in trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]:
            init_args = getattr(logger, "init_args", None)
            if init_args is not None and "name" in init_args and init_args.name is None:
                init_args.name = config.run_name

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise UserError(f"seed_everything: {error}.") from error

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, RuntimeError, MisconfigurationException) as error:
            # Lightning says what is wrong in terms of its own code, and not what to do.
            message = str(error)
            twice = re.search(r"more than one stateful callback of type `(\w+)`", message)
            if twice:
                message = (
                    f"trainer.callbacks names {twice[1]} twice: leave one out. --callbacks.{twice[1]}.SETTING changes "
                    "the one that is there."
                )
            elif re.search(r"supported (gpu|cuda|tpu|mps) backend|accelerator", message, re.IGNORECASE):
                message += " Use --trainer.accelerator auto for what this machine has."
            raise UserError(message) from error

    def after_instantiate_classes(self) -> None:
        # The parser knows how to write a configuration as plain data; the run record keeps it.
        dump = yaml.safe_load(self.parser.dump(self.config, skip_none=False, skip_validation=True))
        config = dump if self.subcommand is None else dump[self.subcommand]
        seed = config["seed_everything"]
        self.model.provenance = {"run_name": config["run_name"], "seed": seed, "config": config}

    def before_fit(self) -> None:
        """Find the run's folder and what it goes on from."""
        config = self.config_init["fit"]
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not self.trainer.checkpoint_callbacks:
            say(self.trainer, "Without checkpoints this run leaves no run record either: fits do not see it.")
        run = RunFolder(self.trainer, self.config.fit.run_name, config.resume, config.ckpt_path)
        run.report(config.resume, self.model.provenance["config"])
        if config.resume and run.checkpoint is not None:
            if run.finished(self.model.plan.steps):
                for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                    # It may have been killed before it wrote what it keeps beside the last checkpoint.
                    if self.trainer.is_global_zero and hasattr(callback, "on_run_complete"):
                        callback.on_run_complete(run.checkpoint)
                steps = self.model.plan.steps
                say(self.trainer, f"The run is complete ({steps} steps): nothing is left to do.")
                raise SystemExit(0)
            config.ckpt_path = str(run.checkpoint.path)
        run.hold(self.holding)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunConfig):
                callback.resumes, callback.folder = config.ckpt_path, run.folder

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would silently let the checkpoint's hyperparameters override the configuration.

        LoopedLM compares the two when the Trainer loads the checkpoint.
        """

    def _with_run_of_checkpoint(self, args: list[str], folder: str) -> list[str]:
        """Arguments of `validate`, `test` or `predict`, with the checkpoint's configuration underneath."""
        values = [value for flag, value in zip(args, args[1:], strict=False) if flag == "--ckpt_path"]
        values += [arg.partition("=")[2] for arg in args if arg.startswith("--ckpt_path=")]
        path = values[-1] if values else None
        if args[:1] == ["fit"] or path is None or not Path(path).is_file():
            return args
        try:
            recorded = look(path).record.get("config")
        except UserError:  # _check_whole reports it, and names a whole one.
            return args
        if not isinstance(recorded, dict) or not all(isinstance(recorded.get(k), dict) for k in SECTIONS):
            return args
        taken = {key: recorded[key] for key in ("run_name", "model", "data") if key in recorded}
        taken["trainer"] = {"precision": recorded["trainer"].get("precision", "32-true")}
        for key in ("vocab_size", "seq_len"):
            taken["model"].pop(key, None)
        underneath = Path(folder) / "run_of_checkpoint.yaml"
        underneath.write_text(yaml.safe_dump(taken))
        # After the subcommand and `--config base.yaml`.
        return [*args[:3], "--config", str(underneath), *args[3:]]


class PlanCLI(LoopedCLI):
    """Parses the same keys as `fit` and builds model and data on the meta device, but no trainer."""

    def __init__(self, arguments: Sequence[str] | None = None) -> None:
        super().__init__(arguments, run=False)

    def _set_seed(self) -> None:
        """Nothing random happens here."""

    def instantiate_classes(self) -> None:
        with torch.device("meta"):
            self.config_init = self.parser.instantiate_classes(self.config)
        self.model, self.datamodule = self.config_init.model, self.config_init.data


def processes(devices: Any, num_nodes: int) -> int:
    """Processes that `trainer.devices` and `trainer.num_nodes` name; "auto" and -1 (all there are) count as one."""
    if isinstance(devices, str) and "," in devices:
        devices = [d for d in devices.split(",") if d.strip()]
    if isinstance(devices, list | tuple):
        devices = len(devices)
    return max(int(devices) if str(devices).isdigit() else 1, 1) * num_nodes


def _check_whole(path: Path) -> None:
    """Refuse a file that is damaged or not a checkpoint, and name the newest whole one beside it."""
    try:
        look(path)
        verify(path)
    except UserError as error:
        whole, _ = newest_whole(path.parent)
        if whole is None:
            raise
        raise UserError(f"{error} The newest whole checkpoint beside it: --ckpt_path {whole.path}") from error


def main() -> None:
    """Run the command in sys.argv."""
    try:
        LoopedCLI()
    except MisconfigurationException as error:
        raise UserError(str(error)) from error
