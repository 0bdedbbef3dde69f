"""MuonH for matrices and AdamW for the rest, in one optimizer; under DDP every process computes the whole step.

MuonH: momentum, orthogonalisation by Polar Express (arXiv 2505.16932), and a step on the sphere of Frobenius radius
‖W_0‖ (arXiv 2603.28743). Groups carry `role`; the role `matrix` takes MuonH. Source: arXiv 2604.21106, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
NORM_FLOOR = 1e-10


def orthogonalisation_dtype(device: torch.device) -> torch.dtype:
    """bf16 where matrix units run it; fp32 on CPUs, where bf16 products can be about 90 times slower."""
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def orthogonalise(g: Tensor) -> Tensor:
    """Polar factor of each matrix of a stack (n,rows,cols), by five Polar Express iterations on the smaller side."""
    x = g.to(orthogonalisation_dtype(g.device))
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (1.02 * x.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(g.dtype)


class MuonH(Optimizer):
    """MuonH on groups of role `matrix`, AdamW without decay on all others.

    Args:
        params: parameter groups as dicts with `params` (named, for messages), `role` and `lr`.
        lr: learning rate of groups that bring none.
        momentum: decay of MuonH's momentum average.
        betas: AdamW's averages.
        eps: AdamW's epsilon.

    Raises:
        ValueError: a group without a role, a `matrix` parameter that is not two-dimensional, or one whose initial norm
            is zero (it could never leave the origin of its sphere).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.014,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.8, 0.95),
        eps: float = 1e-10,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum is {momentum}; it must lie in [0, 1).")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas are {tuple(betas)}; they must lie in [0, 1).")
        if not (eps > 0.0 and lr >= 0.0):
            raise ValueError(f"eps is {eps} and lr is {lr}; eps must be positive and lr not negative.")
        #: Radii of each stack on its device; a tensor made anew each step would wait for the device.
        self._radii: dict[tuple[float, ...], Tensor] = {}
        super().__init__(params, {"lr": lr, "momentum": momentum, "betas": tuple(betas), "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if "role" not in group:
            raise ValueError(
                "MuonH needs parameter groups that carry `role` (see LoopedLM.parameter_groups)."
            )
        if group["role"] != "matrix":
            return
        names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            if p.dim() != 2:
                raise ValueError(
                    f"{name} has shape {tuple(p.shape)}; MuonH takes two-dimensional matrices only."
                )
        # Floats, not tensors: load_state_dict would cast tensors to the parameter's dtype.
        group["initial_norms"] = [float(p.detach().float().norm()) for p in group["params"]]
        for name, norm in zip(names, group["initial_norms"], strict=True):
            if not norm > 0.0:
                raise ValueError(
                    f"{name} starts with norm {norm}: MuonH keeps every matrix at its initial norm, so this one could "
                    "never train. Initialise it to something else than zero, or give it the role 'norm' in its "
                    "component's parameter_roles()."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["role"] == "matrix":
                self._muonh(group)
            else:
                self._adamw(group)
        return loss

    def _muonh(self, group: dict[str, Any]) -> None:
        stacks: dict[tuple[int, ...], list[tuple[Tensor, float]]] = {}
        for p, norm in zip(group["params"], group["initial_norms"], strict=True):
            if p.grad is not None:
                stacks.setdefault(tuple(p.shape), []).append((p, norm))
        for stack in stacks.values():
            parameters, norms = [p for p, _ in stack], [norm for _, norm in stack]
            grads = [p.grad for p in parameters if p.grad is not None]
            buffers = [self._momentum_buffer(p) for p in parameters]
            torch._foreach_lerp_(buffers, grads, 1.0 - group["momentum"])
            updates = orthogonalise(torch.stack(torch._foreach_lerp(grads, buffers, group["momentum"])))
            radius = self._radius(tuple(norms), updates)
            weights = torch.stack(parameters)
            weights = weights - group["lr"] * _on_sphere(updates, radius).to(weights.dtype)
            torch._foreach_copy_(parameters, list(_on_sphere(weights, radius.to(weights.dtype)).unbind()))

    def _radius(self, norms: tuple[float, ...], like: Tensor) -> Tensor:
        """One norm per matrix, broadcast over its rows and columns."""
        radius = self._radii.get(norms)
        if radius is None or radius.device != like.device:
            radius = torch.tensor(norms, device=like.device, dtype=like.dtype).view(-1, 1, 1)
            self._radii[norms] = radius
        return radius

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
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
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


def _on_sphere(x: Tensor, radius: Tensor) -> Tensor:
    """Each matrix of the stack (n,rows,cols) scaled to its radius (n,1,1); a zero matrix stays zero."""
    return x * (radius / x.norm(dim=(-2, -1), keepdim=True).clamp_min(NORM_FLOOR))
