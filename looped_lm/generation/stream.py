"""How tokens are chosen from a decoder's logits (B,V), one by one, and what its shortcuts cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looped_lm.common.errors import UserError
from looped_lm.generation.decoders import Decoder
from looped_lm.model.transformer import LoopedTransformer
from looped_lm.sharing.load import TextTokenizer

#: Lowest temperature that counts: logits divided by it stay finite in fp32, and colder ones equal greedy.
_COLDEST = 1e-30
#: Tokens of a prompt to decode with its continuation: a decoder may drop the space that begins a text.
_SEEN = 8


def with_bos(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of every text after BOS, which begins a document."""
    return [[tokenizer.bos_id, *map(int, ids)] for ids in tokenizer.encode(texts)]


def known_ids(model: LoopedTransformer, tokenizer: TextTokenizer) -> int:
    """How many ids both the model and its tokenizer know. Only these may be drawn."""
    return min(model.vocab_size, tokenizer.vocab_size)


def continuation(tokenizer: TextTokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Text of the `new` ids that follow those of a prompt. BOS begins a document and has no text."""
    seen = list(prompt[-_SEEN:])
    own = [token for token in new if token != tokenizer.bos_id]
    before, whole = tokenizer.decode(seen), tokenizer.decode([*seen, *own])
    # A prompt may end within a character.
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(own)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature, then top-k, then top-p, in the customary order.

    Args:
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample among this many most likely tokens; None: all.
        top_p: sample among the fewest tokens that together have this probability; None: all.
        seed: seed of the draws. Every row has its own stream of random numbers, whatever the other rows are.

    Raises:
        UserError: a value is out of range, or top_k or top_p is given at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number.")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}; it must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}; it must be between 0 and 2^32 - 1.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise UserError(
                "top_k and top_p have no effect at temperature 0: give a temperature, such as 1, too."
            )

    def generators(self, rows: int, device: torch.device) -> list[torch.Generator]:
        """One generator per row."""
        return [torch.Generator(device).manual_seed(self.seed * 2**31 + row) for row in range(rows)]

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution (B,V) to draw from at a temperature above 0."""
        # Relative to the largest, so that a tiny temperature does not overflow.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(self.temperature, _COLDEST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kept = logits.topk(self.top_k, dim=-1)
            logits = torch.full_like(logits, -math.inf).scatter_(-1, kept.indices, kept.values)
        p = logits.softmax(dim=-1)
        if self.top_p is not None:
            ordered, order = p.sort(dim=-1, descending=True, stable=True)
            # A token stays if those before it do not reach top_p yet, so the first always stays.
            outside = ordered.cumsum(dim=-1) - ordered >= self.top_p
            p = p.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), 0.0)
            p = p / p.sum(dim=-1, keepdim=True)
        return p

    def choose(self, logits: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Token ids (B,) drawn from logits (B,V), which must be finite."""
        if not bool(logits.isfinite().all()):
            raise UserError(
                "The model's logits are not finite: its weights contain NaN or infinity, or lead to an overflow. Use a "
                "checkpoint from before its training diverged."
            )
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        p = self.probabilities(logits)
        drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(p, generators, strict=True)]
        return torch.cat(drawn)


@dataclass(frozen=True)
class Step:
    """What one step added to every row: a token, its log-probability and the recurrences that predicted it.

    Log-probabilities are in nats, before temperature, top-k and top-p. Rows that had already ended have None.
    """

    tokens: list[int | None]
    log_probs: list[float | None]
    recurrences: list[int | None]


@torch.inference_mode()
def stream(
    decoder: Decoder,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[Step]:
    """Yield one step per new token until every row has ended.

    Args:
        decoder: holds the rows and predicts their next tokens.
        max_new_tokens: largest number of steps.
        sampling: how tokens are chosen; None: always the most likely one.
        stop_token: ends a row and is its last token; None: rows end after `max_new_tokens`.
        vocab_size: only ids below this are chosen; None: all.
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
        alive = live.tolist()
        yield Step(_of_live(tokens, alive), _of_live(log_probs, alive), _of_live(decoder.recurrences, alive))
        decoder.append(tokens)
        if stop_token is not None:
            live = live & (tokens != stop_token)
            if not bool(live.any()):
                return


def _of_live(column: Tensor, alive: list[bool]) -> list[Any]:
    return [x if lives else None for x, lives in zip(column.tolist(), alive, strict=True)]


@dataclass(frozen=True)
class Generated:
    """All steps by row; see `Step`."""

    tokens: list[list[int]]
    log_probs: list[list[float]]
    recurrences: list[list[int]]

    @classmethod
    def collect(cls, steps: Iterator[Step]) -> Generated:
        """All steps of a stream."""
        every = list(steps)
        return cls(
            _by_row([step.tokens for step in every]),
            _by_row([step.log_probs for step in every]),
            _by_row([step.recurrences for step in every]),
        )


def _by_row(by_step: list[list[Any]]) -> list[list[Any]]:
    return [[x for x in row if x is not None] for row in zip(*by_step, strict=True)]


@dataclass(frozen=True)
class Drift:
    """Mean and largest |Δ log p| (nats) of the chosen `tokens`, caused by a KV budget or an early exit."""

    mean: float
    largest: float
    tokens: int

    def __str__(self) -> str:
        return f"|Δ log p| mean {self.mean:.2e}, largest {self.largest:.2e} nats over {self.tokens:,} tokens"


@torch.inference_mode()
def drift(decoder: Decoder, generated: Generated, vocab_size: int | None = None) -> Drift:
    """Compare what `decoder` generated with one pass over each whole row, without cache and with all recurrences.

    `vocab_size` is as in `stream`.
    """
    differences: list[Tensor] = []
    for row, length, new, stored in zip(
        decoder.tokens, decoder.lengths, generated.tokens, generated.log_probs, strict=True
    ):
        # Rows that ended early have also grown by as many tokens as the longest continuation has.
        start = int(length) - max(map(len, generated.tokens))
        with torch.compiler.set_stance("force_eager"):
            hidden = decoder.model.hidden(row[None, : start + len(new) - 1], decoder.num_recurrences)
            logits = decoder.model.logits(hidden[0, start - 1 :])[:, :vocab_size]
        chosen = torch.tensor(new, device=row.device)[:, None]
        exact = logits.log_softmax(dim=-1).gather(-1, chosen)[:, 0]
        differences.append((exact - torch.tensor(stored, device=row.device, dtype=exact.dtype)).abs())
    every = torch.cat(differences)
    return Drift(float(every.mean()), float(every.max()), every.numel())
