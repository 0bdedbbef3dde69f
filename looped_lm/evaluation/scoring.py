"""How a model scores a continuation: its log-probability, and whether greedy decoding gives it.

d = d_model, N tokens of all continuations of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from looped_lm.common.errors import UserError
from looped_lm.generation.decoders import check_ids
from looped_lm.model.loss import chunk_tokens
from looped_lm.model.transformer import LoopedTransformer
from looped_lm.sharing.load import TextTokenizer


@dataclass(frozen=True)
class Encoded:
    """Token ids of a prompt, BOS first, and of its continuation; `cut`: whether the prompt lost tokens.

    If there is an `end`, greedy decoding must go on with it: it must not say more than the continuation.
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    cut: bool = False
    end: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids, in order."""
        return (*self.prompt, *self.continuation, *self.end)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.continuation) + len(self.end)


@dataclass(frozen=True)
class Score:
    """-log p (nats) of a continuation of `tokens` tokens; whether greedy decoding gives it and its end."""

    nats: float
    tokens: int
    greedy: bool


class Encoder:
    """Turns text into ids. `context` is the most tokens that prompt and continuation may have, at least 2."""

    def __init__(self, tokenizer: TextTokenizer, context: int) -> None:
        if context < 2:
            raise UserError(f"The context is {context} tokens; it must be at least 2, for BOS and one more.")
        self.tokenizer, self.context = tokenizer, context

    def ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text, without BOS."""
        return tuple(map(int, self.tokenizer.encode([text])[0]))

    def pair(self, prompt: str, continuation: str, end: str = "") -> Encoded:
        """Ids of both as one text, divided where the prompt ends, and the first id of `end`; nothing is cut.

        If the tokenizer merges the two across the border, each is encoded by itself.
        """
        text = prompt + continuation
        first, both = self.ids(prompt), self.ids(text)
        last = self._rest(both, self.ids(text + end), end)[:1] if end else ()
        return Encoded((self.tokenizer.bos_id, *first), self._rest(first, both, continuation), end=last)

    def _rest(self, before: tuple[int, ...], whole: tuple[int, ...], text: str) -> tuple[int, ...]:
        """Ids of `text`: what `whole` has after `before`, if it begins with `before`."""
        joined = whole[: len(before)] != before or len(whole) == len(before)
        return self.ids(text) if joined else whole[len(before) :]

    def cut(self, encoded: Encoded, room: int = 0) -> Encoded:
        """What fits and leaves `room` tokens free. The prompt loses tokens on its left, after BOS.

        Raises:
            UserError: the continuation alone is too long.
        """
        kept = self.context - (len(encoded) - len(encoded.prompt)) - room
        if kept < 1:
            raise UserError(
                f"A continuation of {self.context - kept} tokens does not fit into a context of {self.context}: raise "
                "--context."
            )
        if kept >= len(encoded.prompt):
            return encoded
        left = encoded.prompt[len(encoded.prompt) - kept + 1 :] if kept > 1 else ()
        return replace(encoded, prompt=(encoded.prompt[0], *left), cut=True)


class Scorer:
    """Scores continuations, in batches of rows of similar length.

    Args:
        model: stays on its device and in its mode.
        batch_size: rows of one pass.
        forward_context: the context of every pass, such as autocast.

    Raises:
        UserError: the batch size is below 1.
    """

    def __init__(
        self,
        model: LoopedTransformer,
        batch_size: int = 32,
        forward_context: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"The batch size is {batch_size}; it must be at least 1.")
        self.model, self.batch_size, self.forward_context = model, batch_size, forward_context

    def score(
        self, rows: Sequence[Encoded], num_recurrences: int | None = None, title: str | None = None
    ) -> list[Score]:
        """Scores of the rows, in their order, from one forward pass over each.

        `title` is that of the progress bar; None: no bar.

        Raises:
            UserError: the model does not know an id, or it cannot run the number of recurrences.
        """
        if not rows:
            return []
        check_ids(self.model, [i for row in rows for i in row.ids])
        # The longest rows come first, so that a lack of memory shows at once.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]), reverse=True)
        scores: dict[int, Score] = {}
        with tqdm(total=len(rows), desc=title, disable=title is None, leave=False) as bar:
            for start in range(0, len(order), self.batch_size):
                chosen = order[start : start + self.batch_size]
                found = self._batch([rows[i] for i in chosen], num_recurrences)
                scores.update(zip(chosen, found, strict=True))
                bar.update(len(chosen))
        return [scores[i] for i in range(len(rows))]

    @torch.inference_mode()
    def _batch(self, rows: Sequence[Encoded], num_recurrences: int | None) -> Iterator[Score]:
        device = self.model.head.weight.device
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for line, row in zip(tokens, rows, strict=True):
            line[: len(row)] = torch.tensor(row.ids)
        lengths = [len(row) - len(row.prompt) for row in rows]
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
        where = torch.cat([torch.arange(len(row.prompt), len(row)) for row in rows])
        gold = tokens[owner, where].to(device)
        # Earlier tokens do not see the padding. Eager: layers would be compiled again for every length.
        with self.forward_context(), torch.compiler.set_stance("force_eager"):
            hidden = self.model.hidden(tokens.to(device), num_recurrences)
            hidden = hidden[owner.to(device), where.to(device) - 1]
            # In parts, since the logits of whole texts would not fit into memory.
            size = chunk_tokens(self.model.vocab_size)
            parts = [self._judge(h, g) for h, g in zip(hidden.split(size), gold.split(size), strict=True)]
        nats, hits = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        return (
            Score(float(n[: len(row.continuation)].double().sum()), len(row.continuation), bool(h.all()))
            for row, n, h in zip(rows, nats.split(lengths), hits.split(lengths), strict=True)
        )

    def _judge(self, hidden: Tensor, gold: Tensor) -> tuple[Tensor, Tensor]:
        """-log p of the gold tokens (N,), and whether each is the most likely, from states (N,d)."""
        logits = self.model.logits(hidden)
        nats = -logits.log_softmax(dim=-1).gather(-1, gold[:, None])[:, 0]
        return nats, logits.argmax(dim=-1) == gold
