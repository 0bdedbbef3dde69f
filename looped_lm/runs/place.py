"""Where `fit` writes and where it goes on: a folder of its own, or that of the checkpoint it resumes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from looped_lm.common.errors import UserError
from looped_lm.common.text import say
from looped_lm.runs import folder as run_folder
from looped_lm.runs.checkpoint import Stored, differences, in_folder, look, newest_whole
from looped_lm.runs.rows import go_on_after

AUTO = "auto"
#: Keys of a configuration that may differ between the parts of one run without changing it. The module compares its
#: own hyperparameters.
_NOT_COMPARED = ("config", "model.", "ckpt_path", "resume", "weights_only", "trainer.logger")


@dataclass(frozen=True)
class Place:
    """What a run starts from and where it writes.

    Args:
        folder: of the run; None for a new one.
        checkpoint: to go on from; None for a fresh start.
        damaged: checkpoints that cannot be used, with the reason.
    """

    folder: Path | None
    checkpoint: Stored | None
    damaged: dict[Path, str]


class RunPlace:
    """Finds and holds the place of a run.

    Every process of a run finds the same checkpoint by looking at the same files; only the first one makes, locks
    and cleans folders.

    Args:
        trainer: its loggers and checkpoint callbacks get the run's folder.
        run_name: names the folder where no logger that writes files does, in the loggers' `save_dir` if one has that.
        resume: None, "auto" (the newest whole checkpoint of the run, or a fresh start), or a run's folder.
        ckpt_path: a checkpoint to go on from.

    Raises:
        UserError: both `resume` and `ckpt_path`; a folder to resume that is none, another run's, or has no whole
            checkpoint; results of another run in the way; another process that writes into the folder.
        UserError: the folder cannot be made or written to.
    """

    def __init__(self, trainer: L.Trainer, run_name: str, resume: str | None, ckpt_path: str | None) -> None:
        self._trainer = trainer
        self._loggers = [x for x in trainer.loggers if isinstance(x, TensorBoardLogger | CSVLogger)]
        saves = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        self._free = [c for c in saves if c.dirpath is None]
        # Two callbacks may share one.
        self._fixed = list(dict.fromkeys(Path(c.dirpath).resolve() for c in saves if c.dirpath is not None))
        # Loggers of a service (W&B and others) have a folder for all runs, if any.
        shared = next((x.save_dir for x in trainer.loggers if x.save_dir), trainer.default_root_dir)
        root = self._loggers[0].root_dir if self._loggers else str(Path(shared) / run_name)
        #: Folders behind URLs are left to Lightning: an object store has neither locks nor half-written files.
        self.local = "://" not in root
        self._root = Path(root)
        if resume and ckpt_path:
            raise UserError(
                "Both --resume and --ckpt_path are given: --resume finds the checkpoint itself. Leave one out."
            )
        if resume and not self.local:
            raise UserError(f"--resume looks into local folders, and {root} is none: give --ckpt_path URL.")
        self.place = self._find(resume, ckpt_path) if self.local else Place(None, None, {})
        #: Of the run, on the process that writes; others may not know a new one's.
        self.folder = self.place.folder

    def _find(self, resume: str | None, ckpt_path: str | None) -> Place:
        if resume == AUTO:
            found, damaged = (
                newest_whole(self._fixed[0]) if self._fixed else run_folder.newest_of_run(self._root)
            )
            return Place(self._folder_of(found), found, damaged)
        if resume:
            given_folder = Path(resume)
            if given_folder.is_dir() and given_folder.resolve().parent != self._root.resolve():
                run, place = given_folder.resolve().parent.name, given_folder.parent.parent
                raise UserError(
                    f"resume {resume!r} is a folder of another run than this one, which writes into {self._root}: give "
                    f"--run_name {run}, and {place} as the logger's save_dir."
                )
            found, damaged = newest_whole(given_folder / run_folder.CHECKPOINTS)
            if found is None:
                why = "".join(f"\n  {reason}" for reason in damaged.values())
                raise UserError(
                    f"resume {resume!r} is no folder of a run with a whole checkpoint in its "
                    f"{run_folder.CHECKPOINTS}/. Give runs/NAME/version_N, or auto.{why}"
                )
            return Place(given_folder, found, damaged)
        if ckpt_path and "://" not in ckpt_path:
            given = look(ckpt_path)
            folder = self._folder_of(given)
            later = [c for c in in_folder(given.path.parent)[0] if c.step > given.step] if folder else []
            if later:
                say(
                    self._trainer,
                    f"{given.path} is not the last checkpoint of its run ({later[0].path.name} is later): the run goes "
                    "on in a folder of its own.",
                )
            return Place(None if later else folder, given, {})
        return Place(None, None, {})

    def _folder_of(self, stored: Stored | None) -> Path | None:
        """The run folder that holds a checkpoint, if it is one of this run's."""
        if stored is None or stored.path.parent.name != run_folder.CHECKPOINTS:
            return None
        folder = stored.path.parent.parent
        return folder if folder.parent.resolve() == self._root.resolve() else None

    def hold(self, stack: ExitStack) -> None:
        """Make or take the run's folder, keep other processes out of it until `stack` closes, and point the trainer
        there."""
        if not self.local:
            return
        folder = self.folder
        if self._trainer.is_global_zero:
            for fixed in self._fixed:
                self._take_fixed(fixed, stack)
            folder = folder or self._new()
            stack.enter_context(run_folder.held(folder))
            for checkpoints in (folder / run_folder.CHECKPOINTS, *self._fixed):
                run_folder.clean(checkpoints)
            run_folder.set_aside(self.place.damaged)
            self.folder = folder
        if folder is not None:
            for logger in self._loggers:
                logger._version = folder.name
                if self.place.folder is not None and self.place.checkpoint is not None:
                    go_on_after(logger, self.place.checkpoint.step, self._trainer.is_global_zero)
            for callback in self._free:
                callback.dirpath = str(folder / run_folder.CHECKPOINTS)

    def _new(self) -> Path:
        given = self._loggers[0]._version if self._loggers else None
        if given is None:
            return run_folder.new_version(self._root)
        folder = self._root / (given if isinstance(given, str) else f"version_{given}")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(
                f"{folder} holds results already, and they are not overwritten: leave the logger's version out, or go "
                f"on from there with --resume {folder}."
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _take_fixed(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(run_folder.held(folder))
        there = next(folder.glob("*.ckpt"), None)
        given = self.place.checkpoint
        if there and (given is None or given.path.parent.resolve() != folder.resolve()):
            raise UserError(
                f"{folder} (dirpath of the checkpoint callback) holds checkpoints of another run, such as "
                f"{there.name}: give another dirpath, leave it out, or go on with --resume auto."
            )

    # ---- What is said of it ---------------------------------------------------------------------------------------

    def report(self, resume: str | None, config: dict[str, Any]) -> None:
        """Say where the run goes on and how its configuration differs from the one that wrote the checkpoint.

        Raises:
            UserError: `resume="auto"` found a run of another seed.
        """
        found = self.place.checkpoint
        for reason in self.place.damaged.values():
            say(self._trainer, f"{reason} It is set aside.")
        if found is None:
            if resume:
                say(self._trainer, f"No checkpoint of this run in {self._root}: it starts anew.")
            return
        say(self._trainer, f"Resuming from {found.path}, step {found.step}.")
        recorded = found.record.get("config") or {}
        seeds = recorded.get("seed_everything"), config["seed_everything"]
        if resume == AUTO and recorded and seeds[0] != seeds[1]:
            raise UserError(
                f"{found.path} was trained with seed_everything {seeds[0]}, and {seeds[1]} is given: that is another "
                "run. Give it another --run_name, or the same seed, or --resume FOLDER to go on with that one "
                "regardless."
            )
        changed = list(_changes(recorded, config)) if recorded else []
        if changed:
            say(
                self._trainer,
                "The configuration differs from the checkpoint's; the one given here is used:\n"
                + "\n".join(f"  {d}" for d in changed),
            )

    def finished(self, planned: int) -> bool:
        """Whether nothing is left to do for a run of `planned` optimizer steps."""
        found = self.place.checkpoint
        return found is not None and found.record.get("status") == "completed" and found.step >= planned


def _changes(recorded: dict[str, Any], config: dict[str, Any]) -> Iterator[Any]:
    for difference in differences(recorded, config):
        if not difference.key.startswith(_NOT_COMPARED):
            yield difference
