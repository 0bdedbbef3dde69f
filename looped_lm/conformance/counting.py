"""FLOPs of a component as torch counts them on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Measured:
    """FLOPs per token: of matrix products, and of all elementwise operations and sums at one FLOP per element."""

    products: float
    elementwise: float


class _ElementwiseCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        counted = {torch.Tag.pointwise: out, torch.Tag.reduction: args}
        for tag, tensors in counted.items():
            if tag in func.tags:
                self.total += sum(t.numel() for t in tree_leaves(tensors) if isinstance(t, Tensor))
        return out


def measure(run: Callable[[], Any], tokens: int) -> Measured:
    """FLOPs per token of `run`, which handles `tokens` tokens; on the meta device attention counts in full."""
    with FlopCounterMode(display=False) as products:
        run()
    with _ElementwiseCounter() as elementwise:
        run()
    return Measured(products.get_total_flops() / tokens, elementwise.total / tokens)
