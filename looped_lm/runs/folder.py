"""The folder of a run: which one it gets, who may write there, and where the run goes on.

It is `<save_dir>/<run name>/version_<N>`. One process holds it, with a lock that ends with the process.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
from filelock import FileLock, Timeout
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from looped_lm.common.errors import UserError
from looped_lm.common.text import say
from looped_lm.common.writing import PARTIAL, failing_with, new_file
from looped_lm.runs.checkpoint import Stored, differences, in_folder, look, newest_whole
from looped_lm.runs.lightning_internals import purge_after, version_given, write_into

AUTO = "auto"
CHECKPOINTS = "checkpoints"
LOCK_SECONDS = 10.0
"""How long to wait for a folder that is taken: workers of a killed process may outlive it."""
_MAKE_ROOM = "Make room, or check who may write there, and give the same command again."
_ANOTHER_PLACE = "Choose another place with the logger's save_dir, or make room; nothing was changed."
_VERSION = re.compile(r"version_(\d+)")
#: Keys that may differ between the parts of one run; the module compares its own hyperparameters.
_NOT_COMPARED = ("config", "model.", "ckpt_path", "resume", "weights_only", "trainer.logger")


def versions(root: Path) -> list[Path]:
    """The version folders of a run, from the newest to the oldest."""
    numbered = [(int(m.group(1)), p) for p in root.glob("version_*") if (m := _VERSION.fullmatch(p.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def new_version(root: Path) -> Path:
    """A new version folder, a different one for each process; UserError if it cannot be made."""
    with failing_with(_ANOTHER_PLACE, root):
        root.mkdir(parents=True, exist_ok=True)
        taken = versions(root)
        number = 1 + int(taken[0].name.removeprefix("version_")) if taken else 0
        while True:
            with suppress(FileExistsError):
                (root / f"version_{number}").mkdir()
                return root / f"version_{number}"
            number += 1


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder.

    Raises:
        UserError: another process, which is named, writes there, or the folder cannot be made or written to.
    """
    owner, lock = folder / ".owner", FileLock(folder / ".lock")
    with failing_with(_ANOTHER_PLACE, folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            by = owner.read_text(encoding="utf-8") if owner.is_file() else "another process"
            raise UserError(
                f"{folder} is being written by {by}: wait for it or stop it. For a separate run, leave out --ckpt_path "
                "and --resume, or give another --run_name."
            ) from None
    try:
        now = datetime.datetime.now().isoformat(sep=" ", timespec="seconds")
        with suppress(OSError):  # Only the lock counts; the owner is for the message.
            owner.write_text(f"process {os.getpid()} on {platform.node()} since {now}", encoding="utf-8")
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def clean(folder: Path) -> None:
    """Remove the unfinished files of a killed process."""
    for partial in folder.glob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def newest_of_run(root: Path) -> tuple[Stored | None, dict[Path, str]]:
    """The newest whole checkpoint of a run's newest folder that has any, and the damaged ones there."""
    for folder in versions(root):
        found, damaged = newest_whole(folder / CHECKPOINTS)
        if found or damaged:
            return found, damaged
    return None, {}


def go_on_after(logger: Logger, step: int, writes: bool) -> None:
    """Make a logger that has not written yet keep the rows in its folder up to `step`.

    A killed run leaves later rows, which the resumed run writes again. `writes`: whether this process writes logs.
    """
    purge_after(logger, step)
    if not (isinstance(logger, CSVLogger) and writes):
        return
    # Lightning's writer deletes the file that it finds; after a kill the rows are in one of the two files.
    path = Path(logger.log_dir) / "metrics.csv"
    before = path.with_name("metrics.csv.before")
    if path.is_file():
        path.replace(before)
    writer = logger.experiment
    if not before.is_file():
        return
    whole, _, _ = before.read_text(encoding="utf-8").rpartition("\n")  # A kill may leave half a line.
    rows = csv.DictReader(whole.splitlines())
    names = list(rows.fieldnames or ["step"])
    with new_file(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        kept = csv.DictWriter(file, names)
        kept.writeheader()
        kept.writerows(row for row in rows if int(float(row["step"])) <= step)
    writer.metrics_keys = names
    before.unlink()


class RunFolder:
    """Finds a run's folder and the checkpoint that it goes on from, and holds it while the run writes.

    Every process looks at the same files; only rank zero makes, locks and cleans folders.

    Args:
        trainer: its loggers and checkpoint callbacks get the run's folder.
        run_name: the folder's name if no logger writes files; it is then in a logger's `save_dir`, if one has that.
        resume: None, "auto" (the newest whole checkpoint of the run, or a fresh start), or a run's folder.
        ckpt_path: a checkpoint to go on from.

    Raises:
        UserError: both `resume` and `ckpt_path`; a folder to resume that does not exist, is another run's, or has no
            whole checkpoint; results of another run or another process in the way; a folder that cannot be written to.
    """

    def __init__(self, trainer: L.Trainer, run_name: str, resume: str | None, ckpt_path: str | None) -> None:
        self._trainer = trainer
        self._loggers = [x for x in trainer.loggers if isinstance(x, TensorBoardLogger | CSVLogger)]
        saves = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        self._free = [c for c in saves if c.dirpath is None]
        # Two callbacks may share a folder.
        self._fixed = list(dict.fromkeys(Path(c.dirpath).resolve() for c in saves if c.dirpath is not None))
        # Loggers of a service (W&B and others) have one folder for all runs, if any.
        shared = next((x.save_dir for x in trainer.loggers if x.save_dir), trainer.default_root_dir)
        root = self._loggers[0].root_dir if self._loggers else str(Path(shared) / run_name)
        #: Object stores are left to Lightning: they have neither locks nor half-written files.
        self.local = "://" not in root
        self._root = Path(root)
        if resume and ckpt_path:
            told = "Both --resume and --ckpt_path are given: --resume finds the checkpoint itself. Leave one out."
            raise UserError(told)
        if resume and not self.local:
            raise UserError(f"--resume looks into local folders; {root} is not one: give --ckpt_path URL.")
        #: The run's folder; None until `hold` makes a new one, which only the process that writes knows.
        self.folder: Path | None = None
        #: The checkpoint to go on from; None for a fresh start.
        self.checkpoint: Stored | None = None
        #: Checkpoints that cannot be used, with the reason.
        self.damaged: dict[Path, str] = {}
        if resume == AUTO:
            found = newest_whole(self._fixed[0]) if self._fixed else newest_of_run(self._root)
            self.checkpoint, self.damaged = found
            self.folder = self._folder_of(self.checkpoint)
        elif resume:
            self._find_in(Path(resume))
        elif ckpt_path and self.local and "://" not in ckpt_path:
            self._go_on_from(look(ckpt_path))

    def _find_in(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint, self.damaged = newest_whole(folder / CHECKPOINTS)
        if self.checkpoint is None:
            why = "".join(f"\n  {reason}" for reason in self.damaged.values())
            raise UserError(
                f"resume {str(folder)!r} is not a run's folder with a whole checkpoint in its {CHECKPOINTS}/. Give "
                f"runs/NAME/version_N, or auto.{why}"
            )
        if folder.resolve().parent != self._root.resolve():
            run, place = folder.resolve().parent.name, folder.parent.parent
            raise UserError(
                f"resume {str(folder)!r} belongs to another run; this one writes into {self._root}: give --run_name "
                f"{run}, and {place} as the logger's save_dir."
            )

    def _go_on_from(self, given: Stored) -> None:
        self.checkpoint, self.folder = given, self._folder_of(given)
        later = [c for c in in_folder(given.path.parent)[0] if c.step > given.step] if self.folder else []
        if later:
            self.folder = None
            told = f"{given.path} is not the last checkpoint of its run ({later[0].path.name} is later)"
            say(self._trainer, f"{told}: the run goes on in a new folder.")

    def _folder_of(self, stored: Stored | None) -> Path | None:
        """The run folder that holds a checkpoint, if it is one of this run's folders."""
        if stored is None or stored.path.parent.name != CHECKPOINTS:
            return None
        folder = stored.path.parent.parent
        return folder if folder.parent.resolve() == self._root.resolve() else None

    def hold(self, stack: ExitStack) -> None:
        """Take the run's folder until `stack` closes; point loggers and checkpoint callbacks there."""
        if not self.local:
            return
        goes_on_there = self.folder is not None
        if self._trainer.is_global_zero:
            for fixed in self._fixed:
                self._take_fixed(fixed, stack)
            self.folder = self.folder or self._new()
            stack.enter_context(held(self.folder))
            with failing_with(_MAKE_ROOM, self.folder):
                for place in (self.folder, self.folder / CHECKPOINTS, *self._fixed):
                    clean(place)
                # New checkpoints of the same steps can then take their names.
                for path in self.damaged:
                    path.replace(path.with_name(f"{path.name}.damaged"))
        if self.folder is not None:
            for logger in self._loggers:
                write_into(logger, self.folder.name)
                if goes_on_there and self.checkpoint is not None:
                    with failing_with(_MAKE_ROOM, logger.log_dir):
                        go_on_after(logger, self.checkpoint.step, self._trainer.is_global_zero)
            for callback in self._free:
                callback.dirpath = str(self.folder / CHECKPOINTS)

    def _new(self) -> Path:
        given = version_given(self._loggers[0]) if self._loggers else None
        if given is None:
            return new_version(self._root)
        folder = self._root / (given if isinstance(given, str) else f"version_{given}")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(
                f"{folder} holds results already, and they are not overwritten: leave the logger's version out, or go "
                f"on from there with --resume {folder}."
            )
        return folder

    def _take_fixed(self, folder: Path, stack: ExitStack) -> None:
        stack.enter_context(held(folder))
        there = next(folder.glob("*.ckpt"), None)
        given = self.checkpoint
        if there and (given is None or given.path.parent.resolve() != folder.resolve()):
            raise UserError(
                f"{folder} (dirpath of the checkpoint callback) holds checkpoints of another run, such as "
                f"{there.name}: give another dirpath, leave it out, or go on with --resume auto."
            )

    def report(self, resume: str | None, config: dict[str, Any]) -> None:
        """Say where the run goes on, and how its configuration differs from that of the checkpoint.

        Raises:
            UserError: `resume="auto"` found a run with another seed.
        """
        found = self.checkpoint
        for reason in self.damaged.values():
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
                "run. Give another --run_name, or the same seed, or --resume FOLDER to go on with the run that is "
                "there regardless."
            )
        changed = [f"\n  {d}" for d in differences(recorded, config) if not d.key.startswith(_NOT_COMPARED)]
        if recorded and changed:
            told = "The configuration differs from the checkpoint's; the one given here is used:"
            say(self._trainer, told + "".join(changed))

    def finished(self, planned: int) -> bool:
        """Whether nothing is left to do for a run of `planned` optimizer steps."""
        found = self.checkpoint
        return found is not None and found.record.get("status") == "completed" and found.step >= planned
