"""What decides prepared data, and the hashes that name it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datamodules.corpora import Corpus
from datamodules.errors import DataError, check_at_least
from datamodules.tokenizers import Tokenizer

FORMAT = 1
"""Version of the prepared folder. It goes up whenever the same input would give different rows."""


@dataclass(frozen=True)
class PrepareSettings:
    """What decides the rows, apart from the corpus and the tokenizer. DataError: a value is out of range.

    Args:
        seq_len: T, the tokens that a model sees at once; rows hold T + 1.
        val_fraction: expected share of documents held out, decided by each document's own hash.
        cut_documents: first cut documents into pieces of at most a row, each of which begins with BOS and is packed
            like a document.
        packing_buffer: documents that wait at once in best-fit packing.
        seed: seed of the document shuffle before packing. The split does not depend on it.
    """

    seq_len: int = 256
    val_fraction: float = 0.05
    cut_documents: bool = True
    packing_buffer: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, seq_len=self.seq_len, packing_buffer=self.packing_buffer)
        check_at_least(0, **{"the preparation seed": self.seed})
        if not 0.0 < self.val_fraction < 1.0:
            raise DataError(
                f"val_fraction is {self.val_fraction}; it is the share of documents held out for validation "
                "and must be greater than 0 and less than 1"
            )

    @property
    def row_length(self) -> int:
        """T + 1 tokens: the inputs and targets of one row together."""
        return self.seq_len + 1


def recipe(corpus: Corpus, tokenizer: Tokenizer, settings: PrepareSettings) -> dict[str, Any]:
    """All settings that decide the result, JSON-able, without the content of the sources."""
    return {
        "format": FORMAT,
        "corpus": corpus.settings(),
        "tokenizer": tokenizer.settings(),
        "settings": asdict(settings),
    }


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text, and tuples equal lists."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def sha256_of(value: Any) -> str:
    """SHA-256 (hex) of a JSON-able value's canonical text."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def default_cache_dir() -> Path:
    """$LOOPED_LM_CACHE if set, else `looped_lm` in the user's cache folder ($XDG_CACHE_HOME or ~/.cache)."""
    if own := os.environ.get("LOOPED_LM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "looped_lm"


def cache_name(corpus: Corpus, tokenizer: Tokenizer, settings: PrepareSettings) -> str:
    """A readable folder name that changes with every setting and with the sources."""
    key = sha256_of([recipe(corpus, tokenizer, settings), corpus.stamp()])[:12]
    return f"{corpus.name}-{tokenizer.name}-T{settings.seq_len}-{key}"


def differ(left: Any, right: Any) -> bool:
    """Whether two JSON-able values differ once they are written as JSON."""
    return canonical_json(left) != canonical_json(right)
