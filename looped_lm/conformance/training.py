"""What holds for a component in training: precision, compilation, recomputation, checkpoints, a falling loss."""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from looped_lm.conformance.candidate import Candidate, batch, expect, expect_close
from looped_lm.training.lightning_module import LoopedLM


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
    expect(
        abs(float(loss.detach()) - expected) <= 0.02 * expected,
        f"bf16 autocast: loss {loss}, in fp32 {expected}.",
    )
    wrong = [n for n, p in lm.model.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    expect(not wrong, f"bf16 autocast: no finite gradient for {wrong}.")


def compiled_equals_eager(candidate: Candidate, backend: str = "aot_eager") -> None:
    """Layers and injection compiled in place give the same loss and gradients, under the same parameter names."""
    eager, compiled = candidate.lm(), candidate.lm()
    for module in (
        *compiled.model.prelude,
        *compiled.model.block,
        *compiled.model.coda,
        compiled.model.injection,
    ):
        module.compile(backend=backend)
    _expect_same(compiled, eager, "Compilation", 1e-9)
    expect(list(compiled.state_dict()) == list(eager.state_dict()), "Compilation renames parameters.")


def recomputation_changes_nothing(candidate: Candidate) -> None:
    """Running each recurrence again in the backward pass gives the same loss and gradients."""
    _expect_same(candidate.lm(recompute=True), candidate.lm(), "Recomputation", 1e-12)


def a_checkpoint_alone_rebuilds_it(candidate: Candidate) -> None:
    """Saved and loaded with weights_only, the model is built from the same components and gives the same loss."""
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
    """Eight steps of the model's own recipe on one batch, from its initial weights, end at a lower loss."""
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
    expect(
        losses[-1] < losses[0],
        f"Training on one batch does not lower its loss: {[round(x, 4) for x in losses]}.",
    )
