"""What a forward pass keeps for its backward pass, measured on real tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from looped_lm import LoopedTransformer


def held_bytes(model: LoopedTransformer, tokens: Tensor) -> int:
    """Bytes of the distinct storages that everything but the head keeps, without weights.

    If recurrences are recomputed, the states between them are kept instead, and these are counted.
    """
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage().data_ptr()
        if key not in weights:
            # Holding the tensor keeps its storage alive, so that no later storage gets the same address.
            kept.setdefault(key, tensor)
        return tensor

    if model.recompute:
        model.observer = lambda i, state: [keep(leaf) for leaf in tree_leaves(state)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(tokens)
    model.observer = None
    return sum(t.untyped_storage().nbytes() for t in kept.values())
