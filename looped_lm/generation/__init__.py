"""Text from a trained model: a decoder gives logits, and `stream` chooses tokens from them."""

from looped_lm.generation.cache import ExitProbability, ExitRule, KLChange, RelativeChange
from looped_lm.generation.decoders import CachedDecoder, Decoder, UncachedDecoder
from looped_lm.generation.stream import (
    Generated,
    Sampling,
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
    "ExitProbability",
    "ExitRule",
    "Generated",
    "KLChange",
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
