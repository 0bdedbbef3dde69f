"""Whether the losses of a table compare: units that numbers betray, and what must be the same for all runs of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fitting.errors import FitError
from fitting.records import RecordError

SAME = ("vocab_size", "tokenizer", "data", "val_set", "seq_len")
"""Columns in which the runs of one fit may not differ where they are given: losses would not compare."""
FEWEST_TOKENS, MOST_TOKENS = 0.1, 1e6
"""Tokens per parameter outside of which tokens are taken to be in another unit."""
_FACTORS = {1e3: "thousands", 1e6: "millions", 1e9: "billions", 1e12: "trillions"}
_HIGHEST_LOSS = 13.0
"""Nats per token: a uniform guess among 440,000 tokens. Perplexities are higher."""
_LARGE, _LONG = 1e7, 1e8
"""Parameters and tokens from which on a published law says what a loss is about."""
_FAR_ABOVE = 2.0
"""Losses over that law's, from where on they are perplexities: other data and tokenizers move them by .7 to 1.2."""
_WIDE, _VERY_LARGE = 10.0, 3e8
_FLOOR_IN_BITS = (2.05, 3.2)
"""Fitted E of large models in bits; in nats it is 1.5 to 2."""


def refuse_other_units(rows: Sequence[Mapping[str, Any]], stated: bool) -> None:
    """Raise `RecordError` where numbers of a table can only be in other units; losses only if none was `stated`."""
    n = np.array([row["n_once"] + row["n_rec"] for row in rows], dtype=float)
    tokens = np.array([row["tokens"] for row in rows], dtype=float)
    loss = np.array([row["val_loss"] for row in rows], dtype=float)
    first = str(rows[0]["source"])
    ratio = float(np.median(tokens / n))
    if not FEWEST_TOKENS <= ratio <= MOST_TOKENS:
        fits = next(
            (name for factor, name in _FACTORS.items() if FEWEST_TOKENS <= ratio * factor <= MOST_TOKENS),
            None,
        )
        way_out = f"Write them out: they look like {fits}" if fits else "Correct them"
        raise RecordError(first, "tokens", f"the median is {ratio:.2g} tokens per parameter", way_out)
    if stated or not np.isfinite(loss).all():
        return
    perplexities = "They look like perplexities: give their natural logarithms"
    if np.median(loss) > _HIGHEST_LOSS:
        reason = f"the median is {np.median(loss):.4g}, more than any loss in nats"
        raise RecordError(first, "val_loss", reason, perplexities)
    large = (n >= _LARGE) & (tokens >= _LONG)
    if not large.any():
        return
    # Hoffmann et al. (arXiv 2203.15556), as refitted by Besiroglu et al. (arXiv 2404.10102).
    expected = 1.82 + 482.0 / n[large] ** 0.348 + 2085.4 / tokens[large] ** 0.366
    above = float(np.median(loss[large] / expected))
    if above > _FAR_ABOVE:
        reason = f"losses are {above:.1f} times what models of these sizes and tokens reach in nats"
        raise RecordError(first, "val_loss", reason, perplexities)


def refuse_bits(floor: float, largest: float, span: float) -> None:
    """Raise `FitError` where the E of a fit, for models of up to `largest` parameters, is one of losses in bits.

    `span` is the ratio of the largest training FLOPs to the smallest: over less than a decade, E says little.
    """
    if largest >= _VERY_LARGE and span >= _WIDE and _FLOOR_IN_BITS[0] <= floor <= _FLOOR_IN_BITS[1]:
        raise FitError(
            f"E is {floor:.2f}, and models of up to {largest:.2g} parameters have 1.5 to 2 nats per token: the losses "
            "look like bits. Give --loss-unit bits, or --loss-unit nats if they are not"
        )


def differences(columns: Mapping[str, np.ndarray], source: np.ndarray) -> list[tuple[str, str, str]]:
    """(column, what differs and where, first file) for every column of `SAME` that has several values.

    An empty cell says nothing.
    """
    found = []
    for name in SAME:
        where: dict[str, str] = {}
        for value, file in zip(columns.get(name, ()), source, strict=False):
            if value not in ("", None):
                where.setdefault(_shown(value), str(file))
        if len(where) > 1:
            told = ", ".join(f"{value} in {file}" for value, file in where.items())
            found.append((name, f"differs between runs ({told})", next(iter(where.values()))))
    return found


def _shown(value: Any) -> str:
    """A value as text; 1024, 1024.0 and "1024" are one."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)
