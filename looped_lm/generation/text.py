"""Between texts and ids: how a prompt begins, which ids may be drawn, and what the new ones say."""

from __future__ import annotations

from collections.abc import Sequence

from looped_lm.model.transformer import LoopedTransformer
from looped_lm.sharing.load import TextTokenizer

_SEEN = 8
"""Tokens of a prompt that are decoded with what follows: a decoder may drop the space that begins a text."""


def with_bos(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of every text, as a document begins."""
    return [[tokenizer.bos_id, *map(int, ids)] for ids in tokenizer.encode(texts)]


def known_ids(model: LoopedTransformer, tokenizer: TextTokenizer) -> int:
    """How many ids, from 0 on, both the model and its tokenizer know: no other may be drawn."""
    return min(model.vocab_size, tokenizer.vocab_size)


def continuation(tokenizer: TextTokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Text of the ids that follow a prompt's. BOS among them begins a document and is no text of it."""
    seen = list(prompt[-_SEEN:])
    own = [token for token in new if token != tokenizer.bos_id]
    before, whole = tokenizer.decode(seen), tokenizer.decode([*seen, *own])
    # A prompt may end within a character.
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(own)
