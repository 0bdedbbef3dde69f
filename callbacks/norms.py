"""Norms of parameters, gradients and updates, for telemetry."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def parameters_by_role(optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Parameters that have a gradient, by the `role` of their group."""
    roles: dict[str, list[Tensor]] = {}
    for group in optimizer.param_groups:
        with_gradient = [p for p in group["params"] if p.grad is not None]
        if with_gradient:
            roles.setdefault(group["role"], []).extend(with_gradient)
    return roles


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all entries together, as a tensor () on their device; at least in fp32."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(tensors), 2, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(norms))
