"""The key/value cache of a looped model, in which every layer of the block has entries for several recurrences.

B batch rows, T tokens of one pass, S capacity in tokens, g key/value heads, c = head_dim, r recurrences, k slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.generation.early_exit import EarlyExit, ExitRule


class KVCache:
    """Keys and values of the tokens so far, for rows of different lengths.

    Every layer of the block keeps k of its r recurrences, and prelude and coda have one slot. Recurrence i reads and
    writes slot i mod k. With k = r, decoding computes what a pass over the whole text computes. With fewer slots, it
    sees earlier tokens at the last recurrence of the same slot; that saves memory, and results drift. Source: arXiv
    2502.05171, section on KV-cache sharing.

    Rows are padded on the right. A pass over the prompts then equals a pass of training, and the tokens decoded later
    overwrite the padding, one position per row. Injection, lanes and residuals must act on each token alone.

    Args:
        rows, capacity, num_recurrences: B, S and r of every pass.
        budget: slots k of the block's layers; None: r.
        exit_rule: says when the state of a row has settled, which skips its remaining recurrences; None: never.

    Raises:
        UserError: the budget is outside 1..r.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        num_recurrences: int,
        budget: int | None = None,
        exit_rule: ExitRule | None = None,
    ) -> None:
        if budget is not None and not 1 <= budget <= num_recurrences:
            raise UserError(
                f"The KV budget is {budget}; it is the number of recurrences to keep, from 1 to the {num_recurrences} "
                "that run. Leave it out to keep all."
            )
        self.rows, self.capacity = rows, capacity
        self.slots = num_recurrences if budget is None else budget
        self.once = KVSlot(self, 0, gated=False)
        self._exit_rule = exit_rule
        self.stored: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self.filled = 0
        #: Decides which recurrences this pass skips; None in the pass over the prompts, which runs all.
        self.exit: EarlyExit | None = None
        self.positions: Tensor
        #: None in the first pass, whose tokens see only each other: plain causal attention, since padding comes last.
        self.mask: Tensor | None = None

    def begin(self, positions: Tensor, end: int, live: Tensor | None = None) -> None:
        """Announce a pass over tokens at these positions, int64 (B,T), in the text of each row; the first starts at 0.

        `end` is one more than the largest. An early exit waits for the `live` rows only, bool (B,); None: for all.
        """
        if self.filled:
            keys = torch.arange(end, device=positions.device)
            self.mask = (keys <= positions[:, :, None])[:, None]
            if self._exit_rule is not None:
                live = torch.ones_like(positions[:, 0], dtype=torch.bool) if live is None else live
                self.exit = EarlyExit(self._exit_rule, live, self._fill)
        self.positions, self.filled = positions, end

    def recurrence(self, i: int) -> KVSlot:
        """The slot that the block's layers read and write at recurrence `i`."""
        return KVSlot(self, i % self.slots, gated=True)

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return sum(t.untyped_storage().nbytes() for pair in self.stored.values() for t in pair)

    def _fill(self, leaving: Tensor, i: int) -> None:
        """Copy the entries of recurrence `i` of rows that leave after it to the slots that they will not reach."""
        rows = leaving.nonzero()
        where = rows, self.positions[rows[:, 0]]
        for (layer, index), targets in self.stored.items():
            if index > i:
                for target, source in zip(targets, self.stored[layer, i], strict=True):
                    target[where] = source[where]


class KVSlot:
    """One slot of the cache, as layers receive it; a gated one takes nothing from rows that have left the loop."""

    def __init__(self, cache: KVCache, index: int, gated: bool) -> None:
        self.cache, self.index, self.gated = cache, index, gated

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store a layer's k and v (B,g,T,c); returns all keys and values (B,g,S',c) to attend to, and the mask.

        The mask (B,1,T,S') is None in the first pass, whose attention is causal over its own tokens.
        """
        cache, key = self.cache, (layer, self.index)
        if key not in cache.stored:
            shape = (cache.rows, cache.capacity, k.shape[1], k.shape[3])
            cache.stored[key] = k.new_zeros(shape), v.new_zeros(shape)
        keys, values = cache.stored[key]
        rows = torch.arange(cache.rows, device=k.device)
        if self.gated and cache.exit is not None and cache.exit.some_left:
            rows = rows[cache.exit.active]
        where = rows[:, None], cache.positions[rows]
        keys[where] = k[rows].transpose(1, 2)
        values[where] = v[rows].transpose(1, 2)
        if cache.mask is None:
            return k, v, None
        end = cache.mask.shape[-1]
        return keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2), cache.mask
