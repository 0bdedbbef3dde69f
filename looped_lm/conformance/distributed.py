"""Two processes against one."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from looped_lm.conformance.candidate import Candidate, ConformanceError, batch, expect, expect_close, move
from looped_lm.model.transformer import LoopedTransformer

WORLD = 2
TIMEOUT = timedelta(seconds=120)


def _two_steps(model: LoopedTransformer, forward: Any, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Gradients of a second step, after a plain descent step: parameters without gradient stop DDP at the second."""
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
                    p.grad = None
        forward(inputs, targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _build(architecture: Mapping[str, Any]) -> LoopedTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LoopedTransformer(**architecture).double()
    move(model)
    return model


def _worker(rank: int, folder: str, architectures: Sequence[Mapping[str, Any]]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    results: list[dict[str, Tensor] | str] = []
    inputs, targets = (t.chunk(WORLD)[rank] for t in batch())
    for architecture in architectures:
        model = _build(architecture)
        try:
            results.append(_two_steps(model, DistributedDataParallel(model), inputs, targets))
        except RuntimeError as error:
            results.append(str(error).splitlines()[0])
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


def ddp_equals_single(*candidates: Candidate) -> None:
    """Two gloo processes with half the rows each give the gradients of one process with all rows, at a second step.

    DDP looks for no unused parameters, as in training: one without a gradient stops it. One pair of processes serves
    all candidates.
    """
    problems = ddp_problems(*candidates)
    found = [
        f"{candidate}: {problem}" for candidate, problem in zip(candidates, problems, strict=True) if problem
    ]
    expect(not found, "\n".join(found))


def ddp_problems(*candidates: Candidate) -> list[str | None]:
    """What goes wrong with each candidate on two processes; None where nothing does."""
    # Plain data, as a checkpoint holds it: the other processes build the components by class path.
    architectures = [c.lm().model.architecture() for c in candidates]
    results = _on_two_processes(architectures)
    return [_problem(a, result) for a, result in zip(architectures, results, strict=True)]


def _on_two_processes(architectures: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor] | str]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_worker, args=(rank, folder, architectures)) for rank in range(WORLD)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        codes = [worker.exitcode for worker in workers]
        expect(
            codes == [0] * WORLD,
            f"A process of the pair failed (exit codes {codes}); its error is above.",
        )
        return torch.load(Path(folder) / "results.pt", weights_only=True)


def _problem(architecture: Mapping[str, Any], result: dict[str, Tensor] | str) -> str | None:
    if isinstance(result, str):
        return f"DDP stops: {result}"
    model = _build(architecture)
    try:
        for name, gradient in _two_steps(model, model, *batch()).items():
            expect(name in result, f"under DDP {name} gets no gradient.")
            expect_close(result[name], gradient, f"DDP changes the gradient of {name}")
    except ConformanceError as error:
        return str(error)
    return None
