"""MuonH and AdamW against independent implementations."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from looped_lm import LinearInjection, MuonH
from looped_lm.model.accounting import parameter_roles
from looped_lm.training.orthogonalisation import (
    orthogonalisation_dtype,
    orthogonalisation_flops,
    orthogonalise,
)
from looped_lm.training.sharding import share_out, stacks_of
from tests.support.reference import muonh as reference
from tests.support.tiny import tiny_lm, tiny_model

SHAPES = [(24, 24), (24, 24), (24, 96), (96, 24), (24, 48)]


def matrices(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def named(params: list[torch.nn.Parameter]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"w{i}", p) for i, p in enumerate(params)]


def test_twenty_steps_agree_with_the_formulas_in_float64() -> None:
    params = matrices()
    optimizer = MuonH([{"params": named(params), "role": "matrix", "lr": 0.02}])
    weights = [p.detach().double().numpy() for p in params]
    norms = [float(np.linalg.norm(w)) for w in weights]
    buffers = [np.zeros_like(w) for w in weights]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=generator)
            weights[i], buffers[i] = reference.muonh_step(
                weights[i], p.grad.double().numpy(), buffers[i], 0.02, norms[i]
            )
        optimizer.step()
    for p, weight, norm in zip(params, weights, norms, strict=True):
        got = p.detach().double().numpy()
        assert np.linalg.norm(got - weight) <= 1e-4 * np.linalg.norm(weight)
        assert np.linalg.norm(got) == pytest.approx(norm, rel=1e-5)


def test_orthogonalisation_equals_the_reference_for_wide_tall_and_square() -> None:
    for p in matrices():
        expected = reference.orthogonalise(p.detach().double().numpy())
        got = orthogonalise(p.detach().unsqueeze(0))[0]
        np.testing.assert_allclose(got.numpy(), expected, atol=2e-5)


def test_orthogonalisation_runs_in_fp32_on_cpus() -> None:
    """In bf16 their products can run about 90 times slower."""
    assert orthogonalisation_dtype(torch.device("cpu")) is torch.float32


def test_a_zero_gradient_moves_nothing() -> None:
    params = matrices()
    before = [p.detach().clone() for p in params]
    optimizer = MuonH([{"params": named(params), "role": "matrix", "lr": 0.02}])
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), old, rtol=1e-6, atol=1e-6)
        assert bool(torch.isfinite(p).all())


def test_a_zero_matrix_is_refused_by_name() -> None:
    """It could never leave the origin of its sphere."""
    lm = tiny_lm()
    with torch.no_grad():
        lm.model.block[0].attn.out.weight.zero_()
    with pytest.raises(ValueError, match="block.0.attn.out.weight starts with norm 0.0"):
        lm.configure_optimizers()


def test_a_vector_in_a_matrix_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bias has shape \(3,\)"):
        MuonH([{"params": [("bias", torch.nn.Parameter(torch.ones(3)))], "role": "matrix"}])


def test_groups_without_roles_are_refused() -> None:
    with pytest.raises(ValueError, match="carry `role`"):
        MuonH([{"params": matrices()}])


def test_the_adamw_part_equals_torchs() -> None:
    ours = [torch.nn.Parameter(torch.randn(5, 7)), torch.nn.Parameter(torch.randn(9))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = MuonH([{"params": ours, "role": "norm", "lr": 0.01}])
    expected = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        optimizer.step()
        expected.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_state_is_whole_and_keeps_the_initial_norms() -> None:
    """A loaded optimizer goes on as the saved one would have: momentum, averages and radii."""

    def train(lm: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for p in lm.model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

    one = tiny_lm()
    optimizer = one.configure_optimizers()["optimizer"]
    train(one, optimizer, range(3))
    # state_dict shares its tensors with the optimizer; a file would not.
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(one.state_dict())
    other = tiny_lm()
    other.load_state_dict(weights)
    resumed = other.configure_optimizers()["optimizer"]
    resumed.load_state_dict(saved)
    for group, loaded in zip(optimizer.param_groups, resumed.param_groups, strict=True):
        assert group.get("initial_norms") == loaded.get("initial_norms")
    train(one, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameters_without_gradient_are_left_alone() -> None:
    params = matrices()
    optimizer = MuonH([{"params": named(params), "role": "matrix", "lr": 0.1}])
    before = params[1].detach().clone()
    params[0].grad = torch.randn_like(params[0])
    optimizer.step()
    assert torch.equal(params[1], before)


def test_the_injection_matrix_is_muonhs() -> None:
    assert parameter_roles(tiny_model(injection=LinearInjection))["injection.proj.weight"] == "matrix"


def test_momentum_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum is 1.0"):
        MuonH([{"params": matrices(), "role": "matrix"}], momentum=1.0)


def test_large_stacks_run_in_batches_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.randn(7, 24, 40, generator=torch.Generator().manual_seed(0))
    whole = orthogonalise(g)
    for matrices in (4 * 4 * 2 * (24 * 40 + 24 * 24), 1):
        monkeypatch.setattr("looped_lm.training.orthogonalisation.CPU_WORKING_SET", matrices)
        out = torch.empty(7, 24, 40)
        assert orthogonalise(list(g), out) is out
        torch.testing.assert_close(out, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 24), (24, 96), (96, 24)])
def test_the_flops_that_shares_are_balanced_by_are_those_of_the_products(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalise(torch.randn(3, *shape))
    assert counter.get_total_flops() == 3 * orthogonalisation_flops(*shape)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_shares_are_balanced_and_whole(world_size: int) -> None:
    shapes = [(24, 24)] * 9 + [(24, 96)] * 4 + [(96, 24)] * 3 + [(24, 48)]
    stacks = stacks_of([{"params": [torch.ones(s) for s in shapes], "initial_norms": [1.0] * len(shapes)}])
    share_out(stacks, world_size)
    loads = [0] * world_size
    for stack in stacks:
        assert sorted(i for share in stack.shares for i in share) == list(range(len(stack.params)))
        for rank, share in enumerate(stack.shares):
            loads[rank] += len(share) * stack.flops
    # No process could take over a matrix of another's and the slower of the two be faster for it.
    assert max(loads) - min(loads) <= max(stack.flops for stack in stacks)


def test_matrices_of_other_dtypes_are_stacks_of_their_own() -> None:
    params = [torch.nn.Parameter(torch.randn(8, 8, dtype=d)) for d in (torch.float32, torch.bfloat16) * 2]
    optimizer = MuonH([{"params": named(params), "role": "matrix", "lr": 0.1}])
    norms = [float(p.detach().double().norm()) for p in params]
    before = [p.detach().clone() for p in params]
    for step in range(3):
        for p in params:
            p.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).to(p.dtype)
        optimizer.step()
    for p, old, norm in zip(params, before, norms, strict=True):
        assert p.dtype is old.dtype and optimizer.state[p]["momentum_buffer"].dtype is p.dtype
        assert not torch.equal(p, old)
        assert float(p.detach().double().norm()) == pytest.approx(
            norm, rel=1e-5 if p.dtype == torch.float32 else 4e-3
        )
    assert all(isinstance(n, float) for n in optimizer.param_groups[0]["initial_norms"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_trains_its_own_parameters_as_the_original_would(copied: Any) -> None:
    def step(optimizer: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    original = MuonH([{"params": named(matrices()), "role": "matrix", "lr": 0.1}], shard=False)
    step(original, 0)
    other = copied(original)
    assert other.shard is False
    step(original, 1)
    first = [p.detach().clone() for p in original.param_groups[0]["params"]]
    step(other, 1)
    for mine, theirs, before in zip(
        *(o.param_groups[0]["params"] for o in (original, other)), first, strict=True
    ):
        assert mine is not theirs and torch.equal(mine, before) and torch.equal(mine, theirs)


def test_a_step_evaluates_its_closure_with_gradients() -> None:
    (p,) = params = [torch.nn.Parameter(torch.eye(4))]
    optimizer = MuonH([{"params": params, "role": "matrix", "lr": 0.1}])

    def closure() -> Any:
        loss = (p**2 * torch.arange(16.0).view(4, 4)).sum()
        loss.backward()
        return loss

    loss: Any = optimizer.step(closure)
    assert loss.item() == pytest.approx(0.0 + 5 + 10 + 15)
    assert not torch.equal(p.detach(), torch.eye(4))


def test_the_radii_of_a_loaded_state_count() -> None:
    """Not those that the first steps before it were made with."""
    params = matrices()
    optimizer = MuonH([{"params": named(params), "role": "matrix", "lr": 0.1}])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["initial_norms"] = [3.0] * len(params)
    optimizer.load_state_dict(state)
    optimizer.step()
    assert [float(p.detach().norm()) for p in params] == pytest.approx([3.0] * len(params))


def test_a_step_of_the_matrices_reads_nothing_back_from_the_device() -> None:
    """Fake tensors have no values: whatever the host would wait for raises."""
    params = matrices()
    optimizer = MuonH([{"params": named(params), "role": "matrix", "lr": 0.1}])
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(p) for p in params]
        for p in fakes:
            p.grad = torch.empty_like(p)
        optimizer.param_groups[0]["params"] = fakes
        optimizer.step()
        with pytest.raises(DataDependentOutputException):
            fakes[0].sum().item()
    assert all(optimizer.state[p]["momentum_buffer"].shape == p.shape for p in fakes)
