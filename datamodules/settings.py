"""The settings of a preparation, checked once, and the canonical JSON that every hash is taken of."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from datamodules.errors import DataError

FORMAT = 1
"""Version of the prepared folder; it goes up whenever the same input would give other rows."""


@dataclass(frozen=True)
class PrepareSettings:
    """What decides the rows, beside the corpus and the tokenizer.

    Args:
        seq_len: T, tokens a model sees at once; rows hold T + 1.
        val_fraction: expected share of documents held out, decided by each document's own hash.
        cut_documents: cut documents into pieces of a row's length before packing. Every piece begins with
            BOS: it is packed as a document of its own, so no piece may follow another document without a
                separator.
        packing_buffer: documents that wait at once in best-fit packing.
        seed: of the document shuffle before packing. The split does not depend on it.

    Raises:
        DataError: a value out of range.
    """

    seq_len: int = 256
    val_fraction: float = 0.05
    cut_documents: bool = True
    packing_buffer: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise DataError(f"seq_len is {self.seq_len}; it counts tokens per row and must be at least 1")
        if not 0.0 < self.val_fraction < 1.0:
            raise DataError(
                f"val_fraction is {self.val_fraction}; it is the share of documents held out for validation "
                "and must lie strictly between 0 and 1"
            )
        if self.packing_buffer < 1:
            raise DataError(
                f"packing_buffer is {self.packing_buffer}; it counts documents and must be at least 1"
            )
        if self.seed < 0:
            raise DataError(f"the preparation seed is {self.seed}; it must not be negative")

    @property
    def row_length(self) -> int:
        """T + 1 tokens, inputs and targets of one row together."""
        return self.seq_len + 1

    def as_dict(self) -> dict[str, Any]:
        """Every setting by its name, in plain JSON types."""
        return asdict(self)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def sha256_of(value: Any) -> str:
    """SHA-256 (hex) of a JSON-able value's canonical text."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
