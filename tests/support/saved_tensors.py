"""What a forward pass keeps for its backward pass, measured on real tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from looped_lm import LoopedTransformer


def held_bytes(model: LoopedTransformer, tokens: Tensor) -> int:
    """Bytes of the unique storages that everything but the head keeps, weights aside.

    Where recurrences are recomputed, the state between them is what stays: it is counted where it is handed on.
    """
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage().data_ptr()
        if key not in weights:
            # Holding the tensor keeps its storage, so that no later one takes its address.
            kept.setdefault(key, tensor)
        return tensor

    if model.recompute:
        model.observer = lambda i, state: [keep(leaf) for leaf in tree_leaves(state)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(tokens)
    model.observer = None
    return sum(t.untyped_storage().nbytes() for t in kept.values())
