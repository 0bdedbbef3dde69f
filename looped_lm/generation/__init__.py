"""Text from a trained model: cache, early exit, sampling. See `stream` and the decoders."""

from looped_lm.generation.cache import KVCache
from looped_lm.generation.decoders import CachedDecoder, Decoder, UncachedDecoder
from looped_lm.generation.early_exit import ExitRule, KLChange, RelativeChange
from looped_lm.generation.sampling import Sampling
from looped_lm.generation.stream import Drift, Generated, Step, drift, stream
from looped_lm.generation.text import continuation, known_ids, with_bos

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
