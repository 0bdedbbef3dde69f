"""The key/value cache of a looped model, and early exit from its loop.

B batch rows, T tokens of one pass, S capacity in tokens, g key/value heads, c = head_dim, d = d_model, V vocabulary,
r recurrences, k slots. Source: arXiv 2502.05171, sections on KV-cache sharing and zero-shot adaptive compute.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from looped_lm.common.errors import UserError
from looped_lm.loop.objective import Objective
from looped_lm.loop.variants.halting import Halting


class KVCache:
    """Keys and values of the tokens so far, for rows of different lengths.

    Prelude and coda have one slot, the block's layers have k: recurrence i reads and writes slot i mod k. With k = r,
    decoding computes what a pass over the whole text computes. With fewer slots, a recurrence sees earlier tokens as
    they were at the last recurrence that used its slot: this saves memory, and results drift.

    Rows are padded on the right, so that the pass over the prompts is the same as in training; later tokens overwrite
    the padding. Injection, lanes and residuals must act on each token alone.

    Args:
        rows, capacity, num_recurrences: B, S and r of every pass.
        budget: slots k of the block's layers; None: r.
        exit_rule: says when a row may skip its remaining recurrences; None: never.

    Raises:
        UserError: the budget is outside 1..r.
    """

    def __init__(
        self, rows: int, capacity: int, num_recurrences: int, budget: int | None, exit_rule: ExitRule | None
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
        #: None in the pass over the prompts, which runs all recurrences.
        self.exit: EarlyExit | None = None
        self.positions: Tensor
        #: None in that pass: since padding comes last, plain causal attention is enough within one document.
        self.mask: Tensor | None = None
        #: Which tokens so far begin a document, bool (B,S); None where rows are one.
        self._begins: Tensor | None = None

    def begin(self, positions: Tensor, end: int, live: Tensor | None = None) -> None:
        """Announce a pass over tokens at these positions of each row, int64 (B,T). The first starts at 0.

        `end` is the largest position + 1. An early exit waits for `live` rows, bool (B,); None: for all.
        """
        if self.filled:
            keys = torch.arange(end, device=positions.device)
            self.mask = (keys <= positions[:, :, None])[:, None]
            if self._exit_rule is not None:
                live = torch.ones_like(positions[:, 0], dtype=torch.bool) if live is None else live
                self.exit = EarlyExit(self._exit_rule, live, self._fill)
        self.positions, self.filled = positions, end

    def separate(self, begins: Tensor) -> None:
        """Keep attention of this pass within documents; bool (B,T): which of its tokens begin one."""
        if self._begins is None:
            self._begins = begins.new_zeros(self.rows, self.capacity)
        self._begins[torch.arange(self.rows, device=begins.device)[:, None], self.positions] = begins
        document = self._begins[:, : self.filled].cumsum(dim=1)
        same = document.gather(1, self.positions)[:, :, None] == document[:, None]
        before = torch.arange(self.filled, device=begins.device) <= self.positions[:, :, None]
        self.mask = (same & before)[:, None]

    def recurrence(self, i: int) -> KVSlot:
        """The slot that the block's layers read and write at recurrence `i`."""
        return KVSlot(self, i % self.slots, gated=True)

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return sum(t.untyped_storage().nbytes() for pair in self.stored.values() for t in pair)

    def _fill(self, leaving: Tensor, i: int) -> None:
        """Copy entries of rows that leave after recurrence `i` to the slots that they will not reach."""
        rows = leaving.nonzero()
        where = rows, self.positions[rows[:, 0]]
        for (layer, index), targets in self.stored.items():
            if index > i:
                # A layer need not store at every recurrence.
                last = max(at for its, at in self.stored if its is layer and at <= i)
                for target, source in zip(targets, self.stored[layer, last], strict=True):
                    target[where] = source[where]


class KVSlot:
    """One slot, as layers receive it; a gated one stores nothing from rows that have left the loop."""

    def __init__(self, cache: KVCache, index: int, gated: bool) -> None:
        self.cache, self.index, self.gated = cache, index, gated

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store k and v (B,g,T,c); returns all keys and values (B,g,S',c), and the mask (B,1,T,S').

        The mask is None in the first pass over single documents, whose attention is causal over its own tokens.
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


class ExitRule(ABC):
    """Says when a row may leave the loop, from what it saw after each recurrence.

    Only decoding, which adds one token to a row at a time, exits early. No row depends on the others.

    Raises:
        UserError: a threshold that is not positive and finite.
    """

    def __init__(self, threshold: float) -> None:
        if not (math.isfinite(threshold) and threshold > 0):
            raise UserError(f"The exit threshold is {threshold}; it must be positive and finite.")
        self.threshold = threshold

    @abstractmethod
    def look(self, state: Tensor, logits: Callable[[Tensor], Tensor], before: Tensor | None) -> Tensor:
        """What the rule needs of the state (B,1,d) for the coda; `logits` runs coda and head on the state.

        `before` is what it saw after the recurrence before; None after the first.
        """

    @abstractmethod
    def leaves(self, before: Tensor | None, after: Tensor) -> Tensor:
        """Which rows (B,) leave, from what `look` gave after this recurrence and the one before (None: the first)."""


class Change(ExitRule):
    """A row leaves when the last change of what was seen is below the threshold."""

    @abstractmethod
    def change(self, before: Tensor, after: Tensor) -> Tensor:
        """Change (B,) between what `look` saw after two recurrences."""

    def leaves(self, before: Tensor | None, after: Tensor) -> Tensor:
        if before is None:
            return torch.zeros(len(after), dtype=torch.bool, device=after.device)
        return self.change(before, after) < self.threshold


class RelativeChange(Change):
    """‖s_i - s_{i-1}‖ / ‖s_i‖ of the state that the coda would read.

    The curve `loop/change_<i>` of a training run differs: it is relative to ‖s_{i-1}‖, over all lanes.
    """

    def look(self, state: Tensor, logits: Callable[[Tensor], Tensor], before: Tensor | None) -> Tensor:
        return state.flatten(1).float()

    def change(self, before: Tensor, after: Tensor) -> Tensor:
        return (after - before).norm(dim=-1) / after.norm(dim=-1).clamp_min(1e-10)


class KLChange(Change):
    """KL(p_i ‖ p_{i-1}) of the next-token distributions in nats; runs the coda after every recurrence."""

    def look(self, state: Tensor, logits: Callable[[Tensor], Tensor], before: Tensor | None) -> Tensor:
        return logits(state).flatten(1).log_softmax(dim=-1)

    def change(self, before: Tensor, after: Tensor) -> Tensor:
        return (after.exp() * (after - before)).sum(dim=-1)


class ExitProbability(ExitRule):
    """The probability that a model's own exit distribution has left by now reaches the threshold.

    Source: Ouro (arXiv 2510.25741).

    Args:
        threshold: in (0, 1].
        objective: what the model was trained with, which has the gate.

    Raises:
        UserError: a threshold outside (0, 1], or an objective without exits.
    """

    def __init__(self, threshold: float, objective: Objective) -> None:
        super().__init__(threshold)
        if not isinstance(objective, Halting):
            raise UserError(
                f"An exit probability needs a model that was trained with ExitDistribution or PonderCost; this one has "
                f"{type(objective).__name__}. Use --exit-change or --exit-kl."
            )
        if threshold > 1:
            raise UserError(f"The exit probability is {threshold}; it must be in (0, 1].")
        self.objective = objective

    def look(self, state: Tensor, logits: Callable[[Tensor], Tensor], before: Tensor | None) -> Tensor:
        """log of the probability (B,) of still being in the loop."""
        stays = self.objective.log_stay(state).flatten()
        return stays if before is None else before + stays

    def leaves(self, before: Tensor | None, after: Tensor) -> Tensor:
        return 1 - after.exp() >= self.threshold


class EarlyExit:
    """Which rows are still in the loop during a pass, and the states of those that have left.

    Args:
        rule: says when a row leaves.
        live: bool (B,); rows that are not live leave after the first recurrence.
        on_exit: called with the rows, bool (B,), that leave after recurrence `i`, and `i`.
    """

    def __init__(self, rule: ExitRule, live: Tensor, on_exit: Callable[[Tensor, int], None]) -> None:
        self.rule, self._live, self._on_exit = rule, live, on_exit
        #: Rows that still run, bool (B,), and the recurrences (B,) that each row has run.
        self.active = torch.ones_like(live)
        self.used = torch.zeros_like(live, dtype=torch.int64)
        self.some_left = False
        #: What the coda reads (B,1,d): the state with which each row left, or its newest one.
        self.output: Tensor
        self._before: Tensor | None = None

    def settled(self, i: int, state: Tensor, logits: Callable[[Tensor], Tensor]) -> bool:
        """Take in the state (B,1,d) after recurrence `i`; return whether all rows have left."""
        self.output = state if i == 0 else torch.where(self.active[:, None, None], state, self.output)
        self.used += self.active
        seen = self.rule.look(state, logits, self._before)
        leaving = self.active & (~self._live | self.rule.leaves(self._before, seen))
        self._before = seen
        if bool(leaving.any()):
            self._on_exit(leaving, i)
            self.active, self.some_left = self.active & ~leaving, True
        return not bool(self.active.any())
