"""Rows on disk, in litdata's chunk format: written shard by shard, read by row number.

litdata does the storage (chunks, index, remote caching); order and position are ours (position.py), because
its own order depends on the number of workers and its resume does not survive epochs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datamodules.errors import DataError

if TYPE_CHECKING:
    import torch
    from litdata import StreamingDataset

    from datamodules.remote import RemoteChunks

CHUNK_BYTES = 16 * 2**20
"""Target size of a chunk: a row costs about 50 us to read at random whatever the chunk size (measured), so
this is chosen for object storage (few requests) and for `verify`, which names the damaged chunk."""


ASIDE = ".tmp"
"""Ending of files that are being written."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Two bytes per token where they suffice, else four."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write aside, flush to disk, rename: a reader sees the old file or the new one, never half of one."""
    # Named after the process: a worker whose parent was killed may still be writing the same file.
    aside = path.with_name(f"{path.name}.{os.getpid()}{ASIDE}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        # On a full disk the half file would be in the way of everything else.
        aside.unlink(missing_ok=True)
        raise


def write_rows(
    rows: Iterable[NDArray[Any]], row_length: int, folder: Path, prefix: str
) -> list[dict[str, Any]]:
    """Write rows of `row_length` tokens as litdata chunks `{prefix}-{i}.bin` into `folder`.

    Returns one entry per chunk: filename, rows, bytes, sha256, and litdata's own index entry and config.
    Existing chunks of that prefix (left by an interrupted run) are replaced by identical ones.
    """
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    for leftover in folder.glob(f".{prefix}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = folder / f".{prefix}.{os.getpid()}"
    writer: BinaryWriter | None = None
    for index, row in enumerate(rows):
        if writer is None:
            rows_per_chunk = max(1, CHUNK_BYTES // row.nbytes)
            # With TokensLoader chunk_size counts tokens.
            writer = BinaryWriter(
                str(aside), chunk_size=rows_per_chunk * row_length, item_loader=TokensLoader(row_length)
            )
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
    """Write litdata's index.json over the chunks of all shards, in their order and without a time stamp."""
    index = {"chunks": [chunk["index_entry"] for chunk in chunks], "config": chunks[0]["config"]}
    write_atomically(folder / "index.json", json.dumps(index, sort_keys=True).encode())


class Rows:
    """The rows of one split by number (a map-style dataset), opened when the first is read.

    Args:
        folder: folder of the split, holding index.json and chunks.
        row_length: tokens per row, T + 1.
        num_rows: rows in the folder.
        remote: brings chunks into the folder before they are read; None where they are all there.
    """

    def __init__(
        self, folder: Path, row_length: int, num_rows: int, remote: RemoteChunks | None = None
    ) -> None:
        self.folder = folder
        self.row_length = row_length
        self.num_rows = num_rows
        self.remote = remote
        self._dataset: StreamingDataset | None = None

    def __len__(self) -> int:
        return self.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    def __getitem__(self, row: int) -> NDArray[Any]:
        """Tokens of one row, (T + 1,), in the stored type.

        Raises:
            DataError: the chunk that holds the row is missing or damaged.
        """
        if self.remote is not None:
            self.remote.ensure(int(row))
        dataset = self._opened()
        try:
            tokens = dataset[int(row)]
        except Exception as error:  # litdata, numpy and the OS raise many types for a missing or short chunk
            raise DataError(
                f"cannot read row {row} of {self.folder}: {error}. A chunk is missing or damaged; "
                f"`python -m datamodules verify {self.folder.parent}` names it"
            ) from error
        return tokens

    def __getitems__(self, rows: list[int]) -> torch.Tensor:
        """Rows by number as one int64 tensor (B, T + 1): what a DataLoader asks for per batch."""
        import torch

        batch = np.empty((len(rows), self.row_length), dtype=np.int64)
        for i, row in enumerate(rows):
            batch[i] = self[row]
        return torch.from_numpy(batch)

    def _opened(self) -> StreamingDataset:
        if self._dataset is None:
            from litdata import StreamingDataset, TokensLoader

            self._dataset = StreamingDataset(str(self.folder), item_loader=TokensLoader(self.row_length))
        return self._dataset


def split_batch(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T + 1) tokens to inputs (B, T) and targets (B, T), the targets one token ahead."""
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def iterate_rows(folder: Path, row_length: int, num_rows: int) -> Iterator[NDArray[Any]]:
    """All rows of a split in stored order, each (T + 1,)."""
    rows = Rows(folder, row_length, num_rows)
    for row in range(num_rows):
        yield rows[row]
