"""Generating text token by token, and what shortcuts cost.

B batch rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from looped_lm.generation.decoders import Decoder
from looped_lm.generation.sampling import Sampling


@dataclass(frozen=True)
class Step:
    """What one step added to every row; entries of rows that have ended before are None."""

    #: The new token's id.
    tokens: list[int | None]
    #: Its log-probability in nats, before temperature, top-k and top-p.
    log_probs: list[float | None]
    #: Recurrences that predicted it.
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
        decoder: the rows.
        max_new_tokens: steps at most.
        sampling: how tokens are chosen; None: the most likely one.
        stop_token: ends a row, as its last token; None: rows end with the steps.
        vocab_size: ids below this alone are chosen, where a tokenizer has fewer than the model; None: all.
    """
    sampling = Sampling() if sampling is None else sampling
    live = torch.ones_like(decoder.lengths, dtype=torch.bool)
    generators = sampling.generators(len(live), live.device)
    # Compiled layers would be compiled again for every length of the cache.
    for _ in range(max_new_tokens):
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
    """New tokens of every row, each with its log-probability (nats) and recurrences."""

    tokens: list[list[int]]
    log_probs: list[list[float]]
    recurrences: list[list[int]]

    @classmethod
    def collect(cls, steps: Iterator[Step]) -> Generated:
        """All of a stream."""
        rows = [(s.tokens, s.log_probs, s.recurrences) for s in steps]
        columns = [
            [[x for x in row if x is not None] for row in zip(*c, strict=True)]
            for c in zip(*rows, strict=True)
        ]
        return cls(*columns)


@dataclass(frozen=True)
class Drift:
    """How far shortcuts (a small KV budget, early exit) moved the predictions from those of all recurrences."""

    #: Mean and largest |Δ log p| of the chosen tokens, in nats.
    mean: float
    largest: float
    #: Tokens looked at.
    tokens: int

    def __str__(self) -> str:
        return f"|Δ log p| mean {self.mean:.2e}, largest {self.largest:.2e} nats over {self.tokens:,} tokens"


@torch.inference_mode()
def drift(decoder: Decoder, generated: Generated, vocab_size: int | None = None) -> Drift:
    """Compare what was generated with one pass over each whole row, without cache and with all recurrences.

    Args:
        decoder: the decoder after it generated.
        generated: what it generated.
        vocab_size: as in `stream`.
    """
    differences: list[Tensor] = []
    for row, length, new, stored in zip(
        decoder.tokens, decoder.lengths, generated.tokens, generated.log_probs, strict=True
    ):
        # A row that ended early went on as padding of the batch.
        start = int(length) - max(map(len, generated.tokens))
        with torch.compiler.set_stance("force_eager"):
            hidden = decoder.model.hidden(row[None, : start + len(new) - 1], decoder.num_recurrences)
            logits = decoder.model.logits(hidden[0, start - 1 :])[:, :vocab_size]
        chosen = torch.tensor(new, device=row.device)[:, None]
        exact = logits.log_softmax(dim=-1).gather(-1, chosen)[:, 0]
        differences.append((exact - torch.tensor(stored, device=row.device, dtype=exact.dtype)).abs())
    every = torch.cat(differences)
    return Drift(float(every.mean()), float(every.max()), every.numel())
