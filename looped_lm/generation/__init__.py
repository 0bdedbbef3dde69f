"""Text from a trained model. A decoder (with the cache or without) gives logits; `stream` chooses tokens from them."""

from looped_lm.generation.cache import KVCache
from looped_lm.generation.decoders import CachedDecoder, Decoder, UncachedDecoder
from looped_lm.generation.early_exit import ExitRule, KLChange, RelativeChange
from looped_lm.generation.sampling import Sampling
from looped_lm.generation.stream import (
    Drift,
    Generated,
    Step,
    continuation,
    drift,
    known_ids,
    stream,
    with_bos,
)

__all__ = [
    "CachedDecoder",
    "Decoder",
    "Drift",
    "ExitRule",
    "Generated",
    "KLChange",
    "KVCache",
    "RelativeChange",
    "Sampling",
    "Step",
    "UncachedDecoder",
    "continuation",
    "drift",
    "known_ids",
    "stream",
    "with_bos",
]
