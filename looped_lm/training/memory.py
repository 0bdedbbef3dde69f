"""Memory that a training run will need, measured on fake tensors: nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_

from looped_lm.model.accounting import count_roles
from looped_lm.model.transformer import LoopedTransformer
from looped_lm.training.optim import MuonH

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes that one process needs in fp32."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def saved_bytes(model: LoopedTransformer, rows: int, seq_len: int, num_recurrences: int | None = None) -> int:
    """Bytes that one micro-batch keeps for backward: distinct storages of saved tensors, without weights."""
    kept: dict[int, Tensor] = {}
    # Fake CPU tensors take the attention kernel of a real run; the meta device's keeps the whole matrix.
    with FakeTensorMode():
        state = {name: torch.empty(b.shape, dtype=b.dtype) for name, b in model.named_buffers()}
        for name, p in model.named_parameters():
            state[name] = torch.empty(p.shape, dtype=p.dtype, requires_grad=True)
        weights = {t.untyped_storage()._cdata for t in state.values()}

        def pack(tensor: Tensor) -> Tensor:
            key = tensor.untyped_storage()._cdata
            if key not in weights:
                # Held, so that no later storage gets the same address.
                kept.setdefault(key, tensor)
            return tensor

        if model.recompute:
            # The state between recurrences is kept, so that they can run again.
            model.observer = lambda _, state: tree_map_(pack, state)
        tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            functional_call(model, state, (tokens, tokens, num_recurrences))
        model.observer = None
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def state_floats(factory: Callable[[Any], Optimizer], role: str) -> float:
    """Floats of optimizer state per parameter of a role, counted after one step."""
    p = torch.nn.Parameter(torch.ones((4, 4) if role == "matrix" else (16,), device="cpu"))
    p.grad = torch.ones_like(p)
    optimizer = factory([{"params": [p], "role": role, "lr": 0.1}])
    optimizer.step()
    state = [v for v in optimizer.state[p].values() if isinstance(v, Tensor) and v.shape == p.shape]
    return sum(v.numel() for v in state) / p.numel()


def estimate(
    model: LoopedTransformer,
    rows: int,
    seq_len: int,
    optimizer: Callable[[Any], Optimizer] = MuonH,
    num_recurrences: int | None = None,
) -> Memory:
    """Memory of one process that trains on micro-batches of `rows` rows, at the largest count of recurrences."""
    roles = count_roles(model)
    weights = FLOAT_BYTES * sum(roles.values())
    state = FLOAT_BYTES * sum(int(n * state_floats(optimizer, role)) for role, n in roles.items())
    return Memory(weights, weights, state, saved_bytes(model, rows, seq_len, num_recurrences))
