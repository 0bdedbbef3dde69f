"""Every private part of Lightning that is touched does what it is touched for, and is touched in one file."""

from __future__ import annotations

import ast
import importlib
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import lightning as L
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

import looped_lm
from looped_lm import Steps
from looped_lm.runs import lightning_internals as internals
from tests.support.tiny import TinyData, tiny_lm, tiny_trainer

ROOT = Path(looped_lm.__file__).parent.parent
#: Private methods of LightningCLI that decide what this project must decide otherwise. A command line of another parser
#: would be the public way.
OF_THE_COMMAND_LINE = {"_parse_ckpt_path", "_set_seed"}
LOOPS = {"fit_loop", "epoch_loop", "val_loop", "optim_progress", "batch_progress", "scheduler_progress"}
#: Data modules import nothing of ours; this one asks how many batches were processed.
MAY_ASK_LOOPS = {"datamodules/token_data_module.py"}


class AtStep(L.Callback):
    """Calls something in the course of a fit."""

    def __init__(self, hook: str, call: Callable[[L.Trainer], Any]) -> None:
        self.answers: list[Any] = []
        setattr(self, hook, lambda trainer, *args, **kwargs: self.answers.append(call(trainer)))


def fit(folder: Path, *callbacks: Any, steps: int = 4, rows: int = 4, **options: Any) -> L.Trainer:
    trainer = tiny_trainer(folder, list(callbacks), **options)
    trainer.fit(tiny_lm(horizon=Steps(steps), val_every_steps=2), datamodule=TinyData(rows))
    return trainer


# ---- What the private parts do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TensorBoardLogger, CSVLogger])
def test_a_logger_is_sent_to_another_version(tmp_path: Path, kind: Any) -> None:
    assert internals.version_given(kind(tmp_path, "run")) is None
    logger = kind(tmp_path, "run", version=7)
    assert internals.version_given(logger) == 7
    internals.write_into(logger, "version_3")
    assert Path(logger.log_dir) == tmp_path / "run" / "version_3"


def test_a_writer_is_told_from_where_to_purge(tmp_path: Path) -> None:
    """What readers then leave out is seen in test_rows.py."""
    logger = TensorBoardLogger(tmp_path, "run", purge_step=3)
    assert logger._kwargs["purge_step"] == 3, "arguments of the writer are kept there"
    internals.purge_after(logger, 5)
    assert logger._kwargs["purge_step"] == 6
    internals.purge_after(CSVLogger(tmp_path, "rows"), 5)


def test_fit_ends_at_the_steps_that_were_set(tmp_path: Path) -> None:
    at = AtStep("on_train_start", lambda trainer: internals.set_max_steps(trainer, 2))
    trainer = fit(tmp_path, at)
    assert trainer.max_steps == trainer.global_step == 2


def test_a_fit_without_steps_comes_to_its_start(tmp_path: Path) -> None:
    """With the limit it has; without help it returns before that."""
    trainer = fit(tmp_path, steps=2)
    start = AtStep("on_train_start", lambda trainer: (trainer.global_step, trainer.max_steps))
    trainer.callbacks.append(start)
    trainer.fit_loop.run()
    assert start.answers == []
    internals.start_without_steps(trainer)
    assert trainer.max_steps == 3
    trainer.fit_loop.run()
    assert start.answers == [(2, 2)] and trainer.global_step == trainer.max_steps == 2
    trainer.fit_loop.run()
    assert start.answers == [(2, 2)], "once"


def test_batches_are_counted_from_the_beginning(tmp_path: Path) -> None:
    at = AtStep("on_train_batch_end", internals.batches_begun)
    fit(tmp_path, at, steps=3)
    assert at.answers == [1, 2, 3, 4, 5, 6]


def test_steps_go_back_and_batches_do_not(tmp_path: Path) -> None:
    path = tmp_path / "at_2.ckpt"
    save = AtStep("on_train_batch_end", lambda t: t.global_step == 2 and t.save_checkpoint(path))
    trainer = fit(tmp_path, save)
    saved = torch.load(path, weights_only=True)
    assert trainer.global_step == 4
    internals.take_steps_back(trainer, saved)
    assert trainer.global_step == 2 and internals.batches_begun(trainer) == 8
    counts = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    assert counts["processed"] == 5 and internals.count_batches_anew(saved, 2, 4) == 3
    assert counts["processed"] == 8 and counts["ready"] == 8


def test_validation_on_demand_counts_and_asks_for_its_data_again(tmp_path: Path) -> None:
    def validate(trainer: L.Trainer) -> None:
        internals.validate_now(trainer)
        assert trainer.training
        trainer.datamodule.full_validation = True
        internals.validate_now(trainer)
        internals.reload_validation_data(trainer)
        internals.validate_now(trainer)

    progress = AtStep("on_validation_batch_end", internals.validation_progress)
    fit(tmp_path, AtStep("on_train_start", validate), progress, steps=1)
    # The loader has no length.
    assert progress.answers == [(done, math.inf) for done in (1, 1, 1, 2, 3)]


def test_a_sigterm_is_taken_over(tmp_path: Path) -> None:
    def receive(trainer: L.Trainer) -> list[bool]:
        trainer._signal_connector.received_sigterm = True
        return [internals.take_sigterm(trainer), internals.take_sigterm(trainer), trainer.received_sigterm]

    at = AtStep("on_train_start", receive)
    fit(tmp_path, at, steps=1)
    assert at.answers == [[True, False, False]]


def test_the_broadcast_of_signals_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning calls it at every micro-batch of two processes."""
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: pytest.fail("broadcast"))
    trainer = fit(tmp_path, steps=1)
    loop = trainer.fit_loop.epoch_loop
    assert "_broadcast_sigterm_tensor" in type(loop).advance.__code__.co_names
    internals.leave_signals_alone(trainer)
    loop._broadcast_sigterm_tensor()


def test_the_environment_is_the_one_that_handlers_ask(tmp_path: Path) -> None:
    environment = SLURMEnvironment(auto_requeue=True)
    trainer = tiny_trainer(tmp_path, plugins=[environment])
    assert internals.cluster_environment(trainer) is environment


def test_a_module_knows_whether_it_has_a_trainer(tmp_path: Path) -> None:
    lm = tiny_lm()
    assert not internals.is_attached(lm)
    lm.trainer = tiny_trainer(tmp_path)
    assert internals.is_attached(lm)


def test_a_callback_saves_at_once_and_once(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=100)
    none = ModelCheckpoint(tmp_path, filename="none-{step}", save_top_k=0)
    at = AtStep("on_train_batch_end", lambda t: [internals.save_now(s, t) for s in (saver, none)])
    fit(tmp_path, at, saver, none, steps=2, rows=8, enable_checkpointing=True)
    assert at.answers == [[str(tmp_path / f"step={step}.ckpt"), None] for step in (1, 2)]
    assert saver.best_model_path and sorted(p.name for p in tmp_path.glob("*.ckpt")) == [
        "step=1.ckpt",
        "step=2.ckpt",
    ]


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    class Newest(internals.NewestCheckpoints):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            internals.save_now(self, trainer)
            internals.save_now(self, trainer)

    newest = Newest(
        tmp_path, "{step}", monitor="step", mode="max", save_top_k=2, save_on_train_epoch_end=False
    )
    fit(tmp_path, newest, steps=5, rows=8, enable_checkpointing=True)
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == ["step=4.ckpt", "step=5.ckpt"]


def test_strategies_take_a_checkpoint_io_around_theirs(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    around = internals.WrappingCheckpointIO(trainer.strategy.checkpoint_io)
    trainer.strategy.checkpoint_io = around
    assert trainer.strategy.checkpoint_io is around and type(around.checkpoint_io) is TorchCheckpointIO


def test_the_table_of_peaks_is_there() -> None:
    assert internals.peak_flops_table()["h100 sxm"][torch.bfloat16] > 5e14


# ---- No other file touches them --------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def private_names(path: Path) -> frozenset[str]:
    """Private names that a module defines: functions, and attributes of `self`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return frozenset(filter(is_private, names))


@cache
def all_of_lightnings() -> frozenset[str]:
    folder = Path(lightning.__file__).parent
    files = [*(folder / "pytorch").rglob("*.py"), *(folder / "fabric").rglob("*.py")]
    return frozenset().union(*map(private_names, files))


def lightning_bases(module: str, name: str) -> list[Path]:
    """Files of Lightning's classes that a class of ours is derived from."""
    found = getattr(importlib.import_module(module), name, None)
    bases = [b.__module__ for b in getattr(found, "__mro__", ()) if b.__module__.startswith("lightning.")]
    return [Path(str(importlib.import_module(b).__file__)) for b in bases]


def touched(module: str, tree: ast.Module) -> Iterator[str]:
    """Private parts of Lightning that a file names: imported, of another object, or its own as a derived class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning"):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr in LOOPS or not of_self and node.attr in all_of_lightnings():
                yield node.attr
        elif isinstance(node, ast.Constant) and str(node.value).partition(".")[0] in LOOPS:
            # Keys of what a checkpoint holds of the loops.
            yield str(node.value)
        elif isinstance(node, ast.ClassDef):
            theirs = frozenset().union(*map(private_names, lightning_bases(module, node.name)))
            for inner in ast.walk(node):
                name = getattr(inner, "attr", None) or getattr(inner, "name", None)
                if isinstance(inner, ast.Attribute | ast.FunctionDef) and name in theirs:
                    yield str(name)


def test_no_other_file_touches_a_private_part() -> None:
    found: dict[str, set[str]] = {}
    for package in ("looped_lm", "callbacks", "datamodules"):
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT)
            module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
            source = path.read_text(encoding="utf-8")
            if "lightning" not in source.lower() and not any(name in source for name in LOOPS):
                continue
            names = set(touched(module, ast.parse(source))) - OF_THE_COMMAND_LINE
            if str(file) in MAY_ASK_LOOPS:
                names -= LOOPS
            if names:
                found[str(file)] = names
    here = found.pop("looped_lm/runs/lightning_internals.py")
    assert {
        "_version",
        "_combined_loader",
        "_save_topk_checkpoint",
        "_WrappingCheckpointIO",
        "fit_loop",
        "epoch_loop.batch_progress",
    } <= here
    assert not found


def test_what_is_looked_for_is_found() -> None:
    source = "from lightning.x import _y\nz._signal_connector\nz.fit_loop\nself._version\nz._ours\nz['epoch_loop.x']"
    found = {"_y", "_signal_connector", "fit_loop", "epoch_loop.x"}
    assert set(touched("looped_lm", ast.parse(source))) == found
