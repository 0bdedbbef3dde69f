"""Layer: one layer of prelude, block or coda, and what it may see of the loop around it.

B batch rows, T sequence length, d = d_model, g key/value heads, c = head_dim, r recurrences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from looped_lm.loop.component import PerRecurrence
from looped_lm.loop.residual import Residual


class KeyValueSlot(Protocol):
    """Where a layer stores its keys and values in generation, and finds those of earlier tokens."""

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add k and v (B,g,T,c); all keys and values so far, and the mask (None: plain causal attention)."""


@dataclass(frozen=True)
class LayerSizes:
    """What the model tells a layer about itself: the first argument of its constructor.

    `num_recurrences` is 1 for prelude and coda. `residual` makes what joins a branch to the layer's stream; a layer
    calls it once for every branch.
    """

    d_model: int
    head_dim: int
    n_kv_heads: int
    num_recurrences: int
    residual: Callable[[], Residual]


@dataclass(frozen=True)
class LoopContext:
    """What a layer may see besides its stream.

    A layer that reads neither `i` nor `memory` is compiled once for all recurrences.
    """

    #: Rotary tables (T,c/2) or (B,1,T,c/2).
    cos: Tensor
    sin: Tensor
    #: The recurrence, and how many this pass runs; 0 and 1 in prelude and coda.
    i: int = 0
    num_recurrences: int = 1
    #: Output of the prelude (B,T,d); None in prelude and coda.
    e: Tensor | None = None
    #: What this layer returned beside its output at the recurrence before; None at the first.
    memory: Any = None
    #: Which tokens a token attends to, bool (B,1,T,T), where rows hold several documents; None: all before it.
    mask: Tensor | None = None


class Layer(PerRecurrence, nn.Module, ABC):
    """One layer. A subclass takes `LayerSizes` first.

    Parameters in which recurrences differ are stacked along the first dimension and indexed by `i`: with a ModuleList
    indexed by `i` the compiler makes a graph for each recurrence, up to a limit beyond which it runs without.
    """

    #: Whether some parameters act in the first recurrence alone, and so never train if that keeps no gradients.
    first_recurrence_only: bool = False

    @abstractmethod
    def forward(
        self, x: Tensor, context: LoopContext, cache: KeyValueSlot | None = None
    ) -> Tensor | tuple[Tensor, Any]:
        """The stream x (B,T,d) after this layer, alone or with a memory for this layer at the next recurrence.

        A memory is tensors in any nesting of tuples, lists and dicts, of fixed sizes. It is replaced and never changed
        in place: recomputation in the backward pass would read the changed values. In generation x holds the newest
        tokens only; keys and values of earlier ones come from `cache`.
        """

    @abstractmethod
    def flops_per_token(self, seq_len: float = 0.0, i: int = 0) -> float:
        """Forward FLOPs per token at recurrence `i`, if each token attends to `seq_len` tokens."""

    def auxiliary(self, memory: Any) -> Mapping[str, Tensor]:
        """Scalars that the objective adds to its loss, by name, from the memory after the last recurrence.

        Layers of one name are summed. Only those of the block are asked.
        """
        return {}

    def active_parameters(self) -> int:
        """How many of its parameters one token uses: all, unless a token chooses among experts."""
        return sum(p.numel() for p in self.parameters())
