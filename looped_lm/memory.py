"""Estimate of a training run's memory, measured on the meta device: nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from looped_lm.accounting import count_roles
from looped_lm.transformer import LoopedTransformer

FLOAT_BYTES = 4
#: Optimizer state per parameter: one momentum for matrices, two averages for the rest.
STATE_FLOATS = {"matrix": 1}
DEFAULT_STATE_FLOATS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one process in fp32."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def saved_bytes(model: LoopedTransformer, rows: int, seq_len: int) -> int:
    """Bytes that one micro-batch keeps for the backward pass: unique storages of the saved tensors, weights aside."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in weights:
            # Holding the tensor keeps its storage alive, so that no later one takes its address.
            kept.setdefault(key, tensor)
        return tensor

    tokens = torch.zeros(rows, seq_len, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def estimate(model: LoopedTransformer, rows: int, seq_len: int) -> Memory:
    """Memory of one process training `rows` rows of `seq_len` tokens per micro-batch; the model is on the meta device."""
    roles = count_roles(model)
    parameters = sum(roles.values())
    state = sum(n * STATE_FLOATS.get(role, DEFAULT_STATE_FLOATS) for role, n in roles.items())
    return Memory(
        weights=FLOAT_BYTES * parameters,
        gradients=FLOAT_BYTES * parameters,
        optimizer=FLOAT_BYTES * state,
        activations=saved_bytes(model, rows, seq_len),
    )
