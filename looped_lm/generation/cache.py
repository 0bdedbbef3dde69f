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

    Every layer of the block keeps k of its r recurrences. Recurrence i reads and writes slot i mod k, so a slot ends up
    with the last recurrence that wrote it. With k = r, decoding computes what a pass over the whole text computes. With
    fewer slots, a token at recurrence i sees earlier tokens at the last recurrence of the same slot; that saves memory,
    and results drift. Source: arXiv 2502.05171, section on KV-cache sharing. Prelude and coda have one slot.

    Rows are padded on the right. A pass over the prompts then equals a pass of training, and the tokens decoded later
    overwrite the padding, one position per row. Injection, lanes and residuals must act on each token alone.

    Args:
        rows: B.
        capacity: tokens S that a row can hold.
        num_recurrences: r of every pass.
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
        self._exit = None if exit_rule is None else EarlyExit(exit_rule, self._fill)
        self._stored: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self._gated: set[nn.Module] = set()
        self.filled = 0
        #: Decides which recurrences this pass skips; None in the pass over the prompts, which runs all.
        self.exit: EarlyExit | None = None
        self.positions: Tensor
        self.mask: Tensor | None = None

    def begin(self, positions: Tensor, end: int, live: Tensor | None = None) -> None:
        """Announce a pass.

        Args:
            positions: int64 (B,T), the position of each row's tokens in its text. The first pass starts at 0.
            end: one more than the largest position.
            live: bool (B,), the rows whose output is wanted; an early exit does not wait for the others.
        """
        assert end <= self.capacity, (
            f"the cache holds {self.capacity} tokens per row, and this pass needs {end}"
        )
        if self.filled == 0:
            # Tokens of the first pass see only each other: plain causal attention, since padding comes last.
            self.mask, self.exit = None, None
        else:
            keys = torch.arange(end, device=positions.device)
            self.mask = (keys <= positions[:, :, None])[:, None]
            self.exit = self._exit
        self.positions, self.filled = positions, max(end, self.filled)
        if self.exit is not None:
            self.exit.begin(self.rows, positions.device, live)

    def recurrence(self, i: int) -> KVSlot:
        """The slot that the block's layers read and write at recurrence `i`."""
        return KVSlot(self, i % self.slots, gated=True)

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return sum(t.untyped_storage().nbytes() for pair in self._stored.values() for t in pair)

    def extend(
        self, layer: nn.Module, index: int, gated: bool, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store k and v (B,g,T,c) in a layer's slot; returns all keys and values (B,g,S',c) to attend to, and the mask.

        The mask (B,1,T,S') is None in the first pass, whose attention is causal over its own tokens.
        """
        if (layer, index) not in self._stored:
            shape = (self.rows, self.capacity, k.shape[1], k.shape[3])
            self._stored[layer, index] = k.new_zeros(shape), v.new_zeros(shape)
            if gated:
                self._gated.add(layer)
        keys, values = self._stored[layer, index]
        rows = torch.arange(self.rows, device=k.device)
        if gated and self.exit is not None and self.exit.some_left:
            rows = rows[self.exit.active]
        where = rows[:, None], self.positions[rows]
        keys[where] = k[rows].transpose(1, 2)
        values[where] = v[rows].transpose(1, 2)
        if self.mask is None:
            return k, v, None
        end = self.mask.shape[-1]
        return keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2), self.mask

    def _fill(self, leaving: Tensor, i: int) -> None:
        """Copy the entries of recurrence `i` of rows that leave after it to the slots that they will not reach."""
        rows = leaving.nonzero()
        where = rows, self.positions[rows[:, 0]]
        for layer in self._gated:
            for index in range(i + 1, self.slots):
                for target, source in zip(self._stored[layer, index], self._stored[layer, i], strict=True):
                    target[where] = source[where]


class KVSlot:
    """One slot of the cache, as layers receive it."""

    def __init__(self, cache: KVCache, index: int, gated: bool) -> None:
        self.cache, self.index, self.gated = cache, index, gated

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `KVCache.extend`."""
        return self.cache.extend(layer, self.index, self.gated, k, v)
