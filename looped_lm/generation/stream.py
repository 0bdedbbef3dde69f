"""Text from a decoder, token by token, and what its shortcuts cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looped_lm.generation.decoders import Decoder
from looped_lm.generation.sampling import Sampling
from looped_lm.model.transformer import LoopedTransformer
from looped_lm.sharing.load import TextTokenizer

#: Tokens of a prompt that are decoded together with its continuation: a decoder may drop the space that begins a text.
_SEEN = 8


def with_bos(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of every text after BOS, which begins a document."""
    return [[tokenizer.bos_id, *map(int, ids)] for ids in tokenizer.encode(texts)]


def known_ids(model: LoopedTransformer, tokenizer: TextTokenizer) -> int:
    """The number of ids, from 0 on, that both the model and its tokenizer know. No others may be drawn."""
    return min(model.vocab_size, tokenizer.vocab_size)


def continuation(tokenizer: TextTokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Text of the `new` ids that follow those of a prompt. BOS begins a document and has no text."""
    seen = list(prompt[-_SEEN:])
    own = [token for token in new if token != tokenizer.bos_id]
    before, whole = tokenizer.decode(seen), tokenizer.decode([*seen, *own])
    # A prompt may end within a character.
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(own)


@dataclass(frozen=True)
class Step:
    """What one step added to every row; entries of rows that had ended before are None."""

    #: The new token's id.
    tokens: list[int | None]
    #: Its log-probability in nats, before temperature, top-k and top-p.
    log_probs: list[float | None]
    #: Number of recurrences that predicted it.
    recurrences: list[int | None]


@torch.inference_mode()
def stream(
    decoder: Decoder,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[Step]:
    """Yield a step per new token until every row has ended.

    Args:
        decoder: holds the rows and predicts their next tokens.
        max_new_tokens: largest number of steps.
        sampling: how tokens are chosen; None: always the most likely one.
        stop_token: ends a row and is its last token; None: rows end with the steps.
        vocab_size: only ids below this are chosen, for a tokenizer with fewer ids than the model; None: all.
    """
    sampling = Sampling() if sampling is None else sampling
    live = torch.ones_like(decoder.lengths, dtype=torch.bool)
    generators = sampling.generators(len(live), live.device)
    for _ in range(max_new_tokens):
        # Eager, since compiled layers would be compiled again for every length of the cache.
        with torch.compiler.set_stance("force_eager"):
            logits = decoder.logits(live)[:, :vocab_size]
        tokens = sampling.choose(logits, generators)
        log_probs = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
        columns = (tokens.tolist(), log_probs.tolist(), decoder.recurrences.tolist())
        alive = live.tolist()
        yield Step(*([x if a else None for x, a in zip(c, alive, strict=True)] for c in columns))
        decoder.append(tokens)
        if stop_token is not None:
            live = live & (tokens != stop_token)
            if not bool(live.any()):
                return


@dataclass(frozen=True)
class Generated:
    """The new tokens of every row, each with its log-probability (nats) and number of recurrences."""

    tokens: list[list[int]]
    log_probs: list[list[float]]
    recurrences: list[list[int]]

    @classmethod
    def collect(cls, steps: Iterator[Step]) -> Generated:
        """All steps of a stream, by row."""
        columns = zip(*((s.tokens, s.log_probs, s.recurrences) for s in steps), strict=True)
        by_row = (zip(*column, strict=True) for column in columns)
        return cls(*([[x for x in row if x is not None] for row in rows] for rows in by_row))


@dataclass(frozen=True)
class Drift:
    """How far shortcuts (a small KV budget, early exit) moved the predictions away from those of all recurrences."""

    #: Mean and largest |Δ log p| of the chosen tokens, in nats.
    mean: float
    largest: float
    #: Number of tokens compared.
    tokens: int

    def __str__(self) -> str:
        return f"|Δ log p| mean {self.mean:.2e}, largest {self.largest:.2e} nats over {self.tokens:,} tokens"


@torch.inference_mode()
def drift(decoder: Decoder, generated: Generated, vocab_size: int | None = None) -> Drift:
    """Compare what a decoder has generated with one pass over each whole row, without cache, with all recurrences.

    `vocab_size` is that of `stream`.
    """
    differences: list[Tensor] = []
    for row, length, new, stored in zip(
        decoder.tokens, decoder.lengths, generated.tokens, generated.log_probs, strict=True
    ):
        # All rows have grown by as many tokens as the longest continuation has, those that ended early, too.
        start = int(length) - max(map(len, generated.tokens))
        with torch.compiler.set_stance("force_eager"):
            hidden = decoder.model.hidden(row[None, : start + len(new) - 1], decoder.num_recurrences)
            logits = decoder.model.logits(hidden[0, start - 1 :])[:, :vocab_size]
        chosen = torch.tensor(new, device=row.device)[:, None]
        exact = logits.log_softmax(dim=-1).gather(-1, chosen)[:, 0]
        differences.append((exact - torch.tensor(stored, device=row.device, dtype=exact.dtype)).abs())
    every = torch.cat(differences)
    return Drift(float(every.mean()), float(every.max()), every.numel())
