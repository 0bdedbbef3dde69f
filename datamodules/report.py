"""What a prepared folder holds, as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datamodules.errors import DataError
from datamodules.storage import Rows
from datamodules.tokenizers import load_tokenizer


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """Counts, fill, entropy and hash of a prepared folder, one line each."""
    settings, tokenizer = manifest["settings"], manifest["tokenizer"]
    cut = "cut to rows" if settings["cut_documents"] else "not cut"
    entropy = manifest["val_unigram_entropy"]
    lines = [
        f"{folder}",
        f"  hash       {manifest['hash']}",
        f"  tokenizer  {tokenizer['name']}, {tokenizer['vocab_size']} ids, BOS {tokenizer['bos_id']}",
        f"  rows       of {settings['seq_len']} + 1 tokens; documents {cut}, buffer "
        f"{settings['packing_buffer']}, seed {settings['seed']}",
        f"  entropy    {entropy:.4f} nats/token (unigram, validation targets; uniform "
        f"{math.log(tokenizer['vocab_size']):.4f})",
    ]
    for split, part in manifest["splits"].items():
        lines.append(
            f"  {split:<10} {part['documents']:,} documents, {part['tokens_in']:,} tokens -> "
            f"{part['rows']:,} rows, {part['tokens']:,} tokens ({part['fill']:.2%} kept, "
            f"{part['tokens_cropped']:,} cropped, {part['tokens_unfilled']:,} in a last unfilled row), "
            f"chunks: {len(part['chunks'])}"
        )
    if manifest["documents_empty"]:
        lines.append(f"  left out   {manifest['documents_empty']:,} documents without a token")
    return "\n".join(lines)


def shown_rows(folder: Path, manifest: dict[str, Any], split: str, start: int, count: int) -> Iterator[str]:
    """Rows as text, each under a heading with its number and its documents' beginnings.

    Raises:
        DataError: no such rows.
    """
    available = manifest["splits"][split]["rows"]
    if count < 0 or not 0 <= start < available:
        raise DataError(f"rows {start} to {start + count - 1} asked; {split} has rows 0 to {available - 1}")
    tokenizer = load_tokenizer(folder, manifest["tokenizer"]["settings"])
    rows = Rows(folder / split, manifest["settings"]["seq_len"] + 1, available)
    for number in range(start, min(start + count, available)):
        row = rows[number]
        begins = [i for i, token in enumerate(row) if token == tokenizer.bos_id]
        yield f"--- {split} row {number}: documents begin at {begins or 'none'}"
        yield tokenizer.decode(row.tolist())
