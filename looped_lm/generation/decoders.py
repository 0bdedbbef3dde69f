"""Next-token logits for growing rows of tokens, with or without the cache.

B batch rows, V vocabulary. A row is a list of token ids; rows may differ in length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from looped_lm.common.errors import UserError
from looped_lm.generation.cache import ExitRule, KVCache
from looped_lm.model.transformer import LoopedTransformer


def check_ids(model: LoopedTransformer, ids: Sequence[int]) -> None:
    """Refuse, with a UserError, ids for which the model has no embedding."""
    if not 0 <= min(ids) <= max(ids) < model.vocab_size:
        raise UserError(
            f"A prompt has the ids {min(ids)} to {max(ids)}; the model knows 0 to {model.vocab_size - 1}. Use the "
            "tokenizer that the model was trained with."
        )


class Decoder(ABC):
    """Rows of tokens that grow by one token at a time.

    Args:
        model: predicts the next tokens.
        prompts: token ids of every row, at least one each.
        max_new_tokens: tokens by which each row may grow.
        num_recurrences: recurrences of every pass; None: the model's own count.

    Raises:
        UserError: there is no row, or an empty one; ids are unknown; or the model cannot run the count.
    """

    def __init__(
        self,
        model: LoopedTransformer,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        num_recurrences: int | None = None,
    ) -> None:
        if not prompts or not all(prompts):
            raise UserError("Every prompt needs at least one token (BOS, if the text is empty).")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        check_ids(model, [token for prompt in prompts for token in prompt])
        self.model = model
        self.num_recurrences = model.num_recurrences if num_recurrences is None else num_recurrences
        model.check_recurrences(self.num_recurrences)
        device = model.head.weight.device
        self.longest = max(map(len, prompts))
        self.capacity = self.longest + max_new_tokens
        #: Tokens so far (B,S), and the length of each row (B,).
        self.tokens = torch.zeros(len(prompts), self.capacity, dtype=torch.int64, device=device)
        self.lengths = torch.tensor([len(p) for p in prompts], device=device)
        for row, prompt in zip(self.tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt, device=device)
        self._rows = torch.arange(len(prompts), device=device)

    @property
    def recurrences(self) -> Tensor:
        """Recurrences (B,) that the last pass ran for each row's newest token."""
        return torch.full_like(self.lengths, self.num_recurrences)

    def append(self, tokens: Tensor) -> None:
        """Add one token (B,) to every row."""
        self.tokens[self._rows, self.lengths] = tokens
        self.lengths = self.lengths + 1
        self.longest += 1

    @abstractmethod
    def logits(self, live: Tensor | None = None) -> Tensor:
        """Logits (B,V) of the token after each row. Only the `live` rows (B,) matter; None: all."""


class UncachedDecoder(Decoder):
    """Runs the model over all of every row for each new token."""

    def logits(self, live: Tensor | None = None) -> Tensor:
        hidden = self.model.hidden(self.tokens[:, : self.longest], self.num_recurrences)
        return self.model.logits(hidden[self._rows, self.lengths - 1])


class CachedDecoder(Decoder):
    """Runs the model once over the prompts, then over one token of each row at a time.

    Args:
        budget: number of recurrences whose entries are kept; see `KVCache`.
        exit_rule: says when a token has had enough recurrences; None: never. Prompts get all.
    """

    def __init__(
        self,
        model: LoopedTransformer,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        num_recurrences: int | None = None,
        budget: int | None = None,
        exit_rule: ExitRule | None = None,
    ) -> None:
        super().__init__(model, prompts, max_new_tokens, num_recurrences)
        self.cache = KVCache(len(prompts), self.capacity, self.num_recurrences, budget, exit_rule)

    @property
    def recurrences(self) -> Tensor:
        exit = self.cache.exit
        return super().recurrences if exit is None else exit.used

    def logits(self, live: Tensor | None = None) -> Tensor:
        cache, last = self.cache, self.lengths - 1
        if cache.filled == 0:
            chunk = self.tokens[:, : self.longest]
            cache.begin(torch.arange(self.longest, device=chunk.device).expand_as(chunk), self.longest)
            hidden = self.model.hidden(chunk, self.num_recurrences, cache)[self._rows, last]
        else:
            cache.begin(last[:, None], self.longest, live)
            newest = self.tokens[self._rows, last][:, None]
            hidden = self.model.hidden(newest, self.num_recurrences, cache)[:, 0]
        return self.model.logits(hidden)
