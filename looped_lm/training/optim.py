"""MuonH for matrices and AdamW for the rest, in one optimizer.

MuonH: momentum, orthogonalisation by Polar Express (arXiv 2505.16932), and a step on the sphere of Frobenius radius
‖W_0‖ (arXiv 2603.28743). Source: arXiv 2604.21106, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from looped_lm.common.errors import UserError
from looped_lm.training.orthogonalisation import orthogonalise
from looped_lm.training.sharding import Exchange, Layout, Stack, share_out, stacks_of

NORM_FLOOR = 1e-10


class MuonH(Optimizer):
    """MuonH on groups of role `matrix`, AdamW without decay on all others.

    Gradients must be equal on all processes, as DDP makes them. Every process then holds the whole state, which loads
    with any number of processes.

    Args:
        params: parameter groups as dicts with `params` (named, for messages), `role` and `lr`.
        lr: learning rate of groups without one.
        momentum: decay of MuonH's momentum average.
        betas: decays of AdamW's two averages.
        eps: AdamW's epsilon.
        shard: each of several processes orthogonalises a share of the matrices; if false, each orthogonalises all,
            which may be faster for small matrices on a slow network.

    Raises:
        UserError: a group without a role, or a `matrix` that is not two-dimensional or starts with norm zero.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.014,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.8, 0.95),
        eps: float = 1e-10,
        shard: bool = True,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise UserError(f"momentum is {momentum}; it must be in [0, 1).")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise UserError(f"betas are {tuple(betas)}; they must be in [0, 1).")
        if not (eps > 0.0 and lr >= 0.0):
            raise UserError(
                f"eps is {eps} and lr is {lr}; eps must be positive, and lr must not be negative."
            )
        self.shard = shard
        #: The number of processes and the stacks shared out among them.
        self._stacks: tuple[int, list[Stack]] | None = None
        super().__init__(params, {"lr": lr, "momentum": momentum, "betas": tuple(betas), "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._stacks = None
        group = self.param_groups[-1]
        if "role" not in group:
            raise UserError("MuonH needs parameter groups that carry `role` (see LoopedLM.parameter_groups).")
        if group["role"] != "matrix":
            return
        names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            if p.dim() != 2:
                raise UserError(f"{name} has shape {tuple(p.shape)}; MuonH takes two-dimensional matrices.")
        # Floats, not tensors: load_state_dict would cast tensors to the parameter's dtype.
        group["initial_norms"] = [float(p.detach().float().norm()) for p in group["params"]]
        for name, norm in zip(names, group["initial_norms"], strict=True):
            if not norm > 0.0:
                raise UserError(
                    f"{name} starts with norm {norm}: MuonH keeps every matrix at its initial norm, so this one could "
                    "never train. Initialise it to something other than zero, or give it the role 'norm' in its "
                    "component's parameter_roles()."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muonh()
        for group in self.param_groups:
            if group["role"] != "matrix":
                self._adamw(group)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "shard": self.shard}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The stacks refer to the groups from before loading.
        super().__setstate__({**state, "_stacks": None})

    def _muonh(self) -> None:
        """Update all stacks. Each begins before the previous one is finished: sending and computing overlap."""
        shared = self.shard and dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
        if self._stacks is None or self._stacks[0] != world_size:
            stacks = stacks_of([g for g in self.param_groups if g["role"] == "matrix"])
            share_out(stacks, world_size)
            self._stacks = world_size, stacks
        begun: tuple[Stack, Layout, Exchange] | None = None
        for stack in self._stacks[1]:
            layout = stack.layout()
            if world_size == 1 and not layout.order:
                continue
            exchange = Exchange(layout, stack.params[0], rank)
            self._orthogonalise(stack, layout.shares[rank], exchange.own)
            exchange.start()
            if begun is not None:
                _move(*begun)
            begun = stack, layout, exchange
        if begun is not None:
            _move(*begun)

    def _orthogonalise(self, stack: Stack, share: list[int], out: Tensor) -> None:
        """Update a whole stack's momentum, and write the directions of this process's share to `out`."""
        momentum = stack.group["momentum"]
        trained = [p for p in stack.params if p.grad is not None]
        if not trained:
            return
        buffers = [self._momentum_buffer(p) for p in trained]
        torch._foreach_lerp_(buffers, [p.grad for p in trained if p.grad is not None], 1.0 - momentum)
        if share:
            mine = [stack.params[i] for i in share]
            grads = [p.grad for p in mine if p.grad is not None]
            orthogonalise(torch._foreach_lerp(grads, [self._momentum_buffer(p) for p in mine], momentum), out)

    def _momentum_buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]

    def _adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                average, squares = torch.zeros_like(p), torch.zeros_like(p)
                step = torch.zeros((), dtype=torch.float32)
                self.state[p] = {"step": step, "exp_avg": average, "exp_avg_sq": squares}
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )


def _move(stack: Stack, layout: Layout, exchange: Exchange) -> None:
    """Step the weights along the directions, both scaled to their spheres."""
    updates = exchange.results()
    if not layout.order:
        return
    params = [stack.params[i] for i in layout.order]
    norms = torch.linalg.vector_norm(updates, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    scale = layout.radii.view_as(norms) / norms.clamp_min(NORM_FLOOR)
    updates = updates.to(params[0].dtype).mul_(scale)
    torch._foreach_sub_(params, [updates[slot] for slot in layout.slots], alpha=stack.group["lr"])
    weights = torch.stack(torch._foreach_norm(params, 2, dtype=layout.radii.dtype))
    ratio = layout.ordered_radii / weights.clamp_min(NORM_FLOOR)
    torch._foreach_mul_(params, list(ratio.unbind()))
