"""What must hold for a component in training, on one process and on two."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from looped_lm.common.errors import UserError
from looped_lm.conformance.candidate import Candidate, ConformanceError, batch, expect, expect_close, move
from looped_lm.model.transformer import LoopedTransformer
from looped_lm.training.lightning_module import LoopedLM

WORLD = 2
TIMEOUT = timedelta(seconds=120)


def _loss_and_gradients(lm: LoopedLM) -> tuple[Tensor, dict[str, Tensor]]:
    lm.zero_grad()
    loss = lm.loss(batch())
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in lm.model.named_parameters() if p.grad is not None}


def _expect_same(ours: LoopedLM, reference: LoopedLM, what: str, tolerance: float) -> None:
    (loss, gradients), (expected_loss, expected) = _loss_and_gradients(ours), _loss_and_gradients(reference)
    expect_close(loss, expected_loss, f"{what} changes the loss", tolerance)
    for name, gradient in expected.items():
        expect_close(gradients[name], gradient, f"{what} changes the gradient of {name}", tolerance)


def mixed_precision_agrees(candidate: Candidate) -> None:
    """Under bf16 autocast the loss stays within 2% of fp32 and the gradients are finite."""
    lm = candidate.lm(torch.float32)
    expected = float(lm.loss(batch()).detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = lm.loss(batch())
    loss.backward()
    near = abs(float(loss.detach()) - expected) <= 0.02 * expected
    expect(near, f"bf16 autocast: loss {loss}, in fp32 {expected}.")
    wrong = [n for n, p in lm.model.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    expect(not wrong, f"bf16 autocast: no finite gradient for {wrong}.")


def compiled_equals_eager(candidate: Candidate, backend: str = "aot_eager") -> None:
    """Compiled layers and injection give the same loss and gradients, under the same parameter names."""
    eager, compiled = candidate.lm(), candidate.lm()
    for module in (*compiled.model.layers(), compiled.model.injection):
        module.compile(backend=backend)
    _expect_same(compiled, eager, "Compilation", 1e-9)
    expect(list(compiled.state_dict()) == list(eager.state_dict()), "Compilation renames parameters.")


def few_graphs_serve_all_recurrences(candidate: Candidate) -> None:
    """A compiled layer needs no more graphs for twelve recurrences than for four; beyond a limit it runs uncompiled."""
    built = []
    for r in (4, 12):
        try:
            lm = candidate.lm(num_recurrences=r)
        except UserError:
            return  # A component may not go with that many, and says so.
        graphs = 0

        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
            nonlocal graphs
            graphs += 1
            return graph.forward

        torch._dynamo.reset()
        lm.model.layer.compile(backend=backend)
        lm.model.hidden(batch()[0])
        built.append(graphs)
    torch._dynamo.reset()
    name = type(lm.model.layer).__name__
    expect(
        built[0] == built[1],
        f"{name} makes the compiler build {built[0]} graphs for 4 recurrences and {built[1]} for 12: stack the "
        "parameters of all recurrences in one tensor and index it by i, and keep the memory's structure the same.",
    )


def recomputation_changes_nothing(candidate: Candidate) -> None:
    """Running each recurrence again in the backward pass gives the same loss and gradients."""
    _expect_same(candidate.lm(recompute=True), candidate.lm(), "Recomputation", 1e-12)


def a_checkpoint_alone_rebuilds_it(candidate: Candidate) -> None:
    """Loaded with weights_only, the model has the same components and the same loss."""
    lm = candidate.lm()
    content = {
        "state_dict": lm.state_dict(),
        "hyper_parameters": dict(lm.hparams),
        "pytorch-lightning_version": L.__version__,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "candidate.ckpt"
        torch.save(content, path)
        loaded = LoopedLM.load_from_checkpoint(path, map_location="cpu", weights_only=True).to(torch.float64)
    ours, theirs = lm.component_specs(), loaded.component_specs()
    expect(ours == theirs, f"The checkpoint rebuilds other components: {theirs} instead of {ours}.")
    with torch.no_grad():
        expect_close(
            loaded.loss(batch()),
            lm.loss(batch()),
            "The model that the checkpoint rebuilds gives another loss: something it computes with is neither a "
            "parameter, a buffer nor an argument of a constructor",
            1e-6,
        )


def a_few_steps_lower_the_loss(candidate: Candidate) -> None:
    """Eight steps of the model's own recipe on one batch end at a lower loss."""
    lm = candidate.lm(torch.float32, moved=False)
    configured = lm.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    losses = []
    for _ in range(lm.plan.steps + 1):
        optimizer.zero_grad()
        loss = lm.loss(batch())
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        scheduler.step()
    rounded = [round(x, 4) for x in losses]
    expect(losses[-1] < losses[0], f"Training on one batch does not lower its loss: {rounded}.")


def ddp_equals_single(*candidates: Candidate) -> None:
    """Two processes with half the rows each give the gradients of one with all rows, at a second step.

    As in training, a parameter without a gradient stops DDP. One pair of processes serves all candidates.
    """
    problems = zip(candidates, ddp_problems(*candidates), strict=True)
    found = [f"{candidate}: {problem}" for candidate, problem in problems if problem]
    expect(not found, "\n".join(found))


def ddp_problems(*candidates: Candidate) -> list[str | None]:
    """What goes wrong with each candidate on two processes; None where nothing does."""
    # The other processes build the components by class path.
    architectures = [c.lm().model.architecture() for c in candidates]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (folder, architectures), nprocs=WORLD)
        results = torch.load(Path(folder) / "results.pt", weights_only=True)
    return [_problem(a, result) for a, result in zip(architectures, results, strict=True)]


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


def _build(architecture: Mapping[str, Any]) -> LoopedTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LoopedTransformer(**architecture).double()
    move(model)
    return model


def _two_steps(model: LoopedTransformer, forward: Any, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Gradients of a second step: parameters without gradient stop DDP there."""
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
                    p.grad = None
        forward(inputs, targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
