"""Text from a trained model. A decoder (with the cache or without) gives logits; `stream` chooses tokens from them."""

from looped_lm.generation.decoders import CachedDecoder, Decoder, UncachedDecoder
from looped_lm.generation.early_exit import ExitRule, KLChange, RelativeChange
from looped_lm.generation.sampling import Sampling
from looped_lm.generation.stream import Generated, Step, continuation, drift, known_ids, stream, with_bos

__all__ = [
    "CachedDecoder",
    "Decoder",
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
