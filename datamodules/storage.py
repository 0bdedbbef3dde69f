"""Rows on disk, in litdata's chunk format: written shard by shard, read by row number.

The order is ours (position.py): litdata's depends on the number of workers, and it cannot resume across epochs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datamodules.errors import DataError
from fitting.records import write_bytes_atomically

if TYPE_CHECKING:
    import torch
    from litdata import StreamingDataset

CHUNK_BYTES = 16 * 2**20
"""Target size of a chunk: large enough for few requests to object storage, small enough for `verify` to say what is
damaged. A random row takes about 50 us whatever the size (measured)."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Two bytes per token where they suffice, else four."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn an OSError into a DataError that names the file, or else `place`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read or write {error.filename or place}: {error.strerror or error}. What was finished is "
            "kept; make room or get the right to write and run again, or choose another folder"
        ) from error


def write_rows(
    rows: Iterable[NDArray[Any]], row_length: int, folder: Path, prefix: str
) -> list[dict[str, Any]]:
    """Write rows of `row_length` tokens as litdata chunks `{prefix}-{i}.bin` into `folder`.

    What an interrupted run left is replaced. Returns filename, rows, bytes, sha256, and litdata's own index
    entry and config of each chunk.
    """
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    for leftover in folder.glob(f".{prefix}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = folder / f".{prefix}.{os.getpid()}"
    writer: BinaryWriter | None = None
    for index, row in enumerate(rows):
        if writer is None:
            # With TokensLoader, chunk_size counts tokens.
            chunk_size = max(1, CHUNK_BYTES // row.nbytes) * row_length
            writer = BinaryWriter(str(aside), chunk_size=chunk_size, item_loader=TokensLoader(row_length))
        writer.add_item(index, row)
    if writer is None:
        return []
    writer.done()
    (index_file,) = aside.glob("*.index.json")
    index_content = json.loads(index_file.read_text())
    chunks = []
    for i, entry in enumerate(index_content["chunks"]):
        written = aside / entry["filename"]
        final = folder / f"{prefix}-{i}.bin"
        entry["filename"] = final.name
        with written.open("rb") as file:
            os.fsync(file.fileno())
        chunks.append(
            {
                "filename": final.name,
                "rows": entry["chunk_size"],
                "bytes": entry["chunk_bytes"],
                "sha256": file_sha256(written),
                "index_entry": entry,
                "config": index_content["config"],
            }
        )
        os.replace(written, final)
    shutil.rmtree(aside)
    return chunks


def write_index(folder: Path, chunks: list[dict[str, Any]]) -> None:
    """Write litdata's index.json over the chunks of all shards, without a time stamp."""
    index = {"chunks": [chunk["index_entry"] for chunk in chunks], "config": chunks[0]["config"]}
    write_bytes_atomically(folder / "index.json", json.dumps(index, sort_keys=True).encode())


@dataclass(eq=False)
class Rows:
    """The rows of one split, by number (a map-style dataset). Files are opened when the first row is read."""

    folder: Path
    """That of the split, with index.json and the chunks."""
    row_length: int
    """Tokens per row, T + 1."""
    num_rows: int
    _dataset: StreamingDataset | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return self.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    def __getitem__(self, row: int) -> NDArray[Any]:
        """Tokens of one row, (T + 1,), in the stored type. DataError: its chunk is missing or damaged."""
        if self._dataset is None:
            from litdata import StreamingDataset, TokensLoader

            self._dataset = StreamingDataset(str(self.folder), item_loader=TokensLoader(self.row_length))
        try:
            return self._dataset[int(row)]
        except Exception as error:  # many types for a missing or short chunk
            raise DataError(
                f"cannot read row {row} of {self.folder}: {error}. A chunk is missing or damaged; "
                f"`python -m datamodules verify {self.folder.parent}` names it"
            ) from error

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        """Rows by number as one int64 tensor (B, T + 1): what a DataLoader asks for, once per batch."""
        import torch

        batch = np.empty((len(rows), self.row_length), dtype=np.int64)
        for i, row in enumerate(rows):
            batch[i] = self[row]
        return torch.from_numpy(batch)


def split_batch(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split tokens (B, T + 1) into inputs (B, T) and targets (B, T), which are one token ahead."""
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
