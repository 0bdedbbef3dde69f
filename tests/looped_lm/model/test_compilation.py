"""Compiled layers: the same training, the same checkpoints, one compilation however often the block is looped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from looped_lm import LogNormalPoisson, LoopedLM, Steps
from looped_lm.model.compilation import compile_in_place, compiler_problem
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import TinyData, perturb, tiny_lm, tiny_model, tiny_trainer, tokens

CPU = torch.device("cpu")


def train(folder: Path, **overrides: Any) -> tuple[LoopedLM, list[float], Path]:
    """A module trained for ten steps, the losses of its steps and its checkpoint."""
    lm = tiny_lm(horizon=Steps(10), num_recurrences=3, recurrences=LogNormalPoisson, **overrides)
    perturb(lm.model)
    logger = RecordingLogger()
    trainer = tiny_trainer(folder, logger=logger)
    trainer.fit(lm, TinyData())
    path = folder / "last.ckpt"
    trainer.save_checkpoint(path)
    return lm, [m["train/loss"] for _, m in logger.rows if "train/loss" in m], path


def loss(lm: LoopedLM) -> float:
    with torch.no_grad():
        return float(lm.loss(tokens()))


def test_compiled_and_eager_train_alike_and_read_each_others_checkpoints(tmp_path: Path) -> None:
    problem = compiler_problem(CPU)
    if problem:
        pytest.skip(problem)
    eager, expected, eager_path = train(tmp_path / "eager")
    torch._dynamo.reset()
    counters.clear()
    compiled, losses, compiled_path = train(tmp_path / "compiled", compile_layers=True)
    assert len(compiled.drawn) > 2, "steps ran several counts of recurrences"
    # The trial of the compiler, and one graph for prelude, block (however often) and coda.
    assert counters["stats"]["unique_graphs"] == 2
    assert len(losses) == 10 and losses == pytest.approx(expected, rel=1e-4)

    stored = torch.load(compiled_path, weights_only=True)["state_dict"]
    assert list(stored) == list(eager.state_dict())
    for path, trained in ((compiled_path, compiled), (eager_path, eager)):
        loaded = LoopedLM.load_from_checkpoint(path, map_location="cpu", weights_only=True)
        assert loss(loaded) == pytest.approx(loss(trained), rel=1e-5)
    going_on = tiny_lm(horizon=Steps(12), num_recurrences=3, recurrences=LogNormalPoisson)
    trainer = tiny_trainer(tmp_path / "on")
    trainer.fit(going_on, TinyData(), ckpt_path=compiled_path, weights_only=True)
    assert trainer.global_step == 12


def test_every_layer_runs_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(prelude_layers=2, recurrent_layers=2, coda_layers=1)
    monkeypatch.setattr("looped_lm.model.compilation.compiler_problem", lambda device: None)
    assert compile_in_place(model, CPU) is None
    assert [layer._compiled_call_impl is not None for layer in model.layers()] == [True] * 5


@torch._dynamo.config.patch(optimize_ddp=True)
def test_a_layer_is_one_piece_under_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of DDP's buckets; all layers share it."""
    monkeypatch.setattr("looped_lm.model.compilation.compiler_problem", lambda device: None)
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(len(example_inputs))
        return module.forward

    torch._dynamo.reset()
    model = tiny_model(num_recurrences=3, size=6)
    compile_in_place(model, CPU)
    for layer in model.layers():
        layer.compile(backend=backend)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        DistributedDataParallel(model, bucket_cap_mb=1.0)(*tokens()).backward()
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
    assert len(graphs) == 1


def test_without_a_compiler_layers_run_uncompiled_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no working C++ compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    lm = tiny_lm(compile_layers=True)
    tiny_trainer(tmp_path).fit(lm, TinyData())
    out = capsys.readouterr().out
    assert "run uncompiled: RuntimeError: no working C++ compiler" in out and "long story" not in out
    assert all(layer._compiled_call_impl is None for layer in lm.model.layers())
