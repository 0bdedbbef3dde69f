"""The two stages of a preparation, as jobs that any process can do in any order.

1. `tokenize_unit` hashes and tokenizes the documents of a unit and stores them sorted by shuffle key.
2. `pack_shard` gathers the documents of one key range from all units and packs them into chunks of rows.

Keys and shards depend on content and seed alone. Each job leaves one marker file, written last and atomically,
and is then not done again.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.corpora import Corpus, Unit
from datamodules.errors import DataError
from datamodules.packing import pack
from datamodules.recipe import PrepareSettings
from datamodules.storage import token_dtype, write_rows, writing
from datamodules.tokenizers import Tokenizer
from fitting.records import write_bytes_atomically

SPLITS = ("train", "val")
Summary = dict[str, Any]
"""What a job reports: counts, hashes, chunks."""
_BATCH_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Job:
    """What every job of one preparation needs: the recipe and the folder to work in."""

    corpus: Corpus
    tokenizer: Tokenizer
    settings: PrepareSettings
    work: Path

    @property
    def dtype(self) -> np.dtype[Any]:
        return token_dtype(self.tokenizer.vocab_size)

    def unit_marker(self, unit: int) -> Path:
        return self.work / "units" / f"{unit:06d}.npz"

    def unit_tokens(self, unit: int) -> Path:
        return self.work / "units" / f"{unit:06d}.tokens"

    def shard_marker(self, split: str, shard: int) -> Path:
        return self.work / "shards" / f"{split}-{shard:05d}.npz"


def clean(text: str) -> str:
    """The text with lone surrogates replaced: JSON can hold them, UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def document_digest(text: str) -> bytes:
    """A hash of the document's content, 16 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def is_validation(digest: bytes, val_fraction: float) -> bool:
    """Whether the document is held out. Only its content decides, so all its copies are in one split."""
    return int.from_bytes(digest[:8], "big") < val_fraction * 2.0**64


def shuffle_key(digest: bytes, seed: int, unit: int, position: int) -> int:
    """64-bit key of the document's place in the seeded shuffle; copies get different keys."""
    place = b"%d/%d/%d/" % (seed, unit, position)
    return int.from_bytes(hashlib.blake2b(place + digest, digest_size=8).digest(), "big")


def tokenize_unit(job: Job, unit: Unit, index: int) -> Summary:
    """Stage 1 for one unit; returns its summary."""
    begin = time.perf_counter()
    in_tokenizer = 0.0
    keys: list[int] = []
    held_out: list[bool] = []
    tokens: list[NDArray[Any]] = []
    source = hashlib.sha256()
    empty = characters = 0
    for batch in _batches(job.corpus.documents(unit)):
        before = time.perf_counter()
        encoded = job.tokenizer.encode(batch)
        in_tokenizer += time.perf_counter() - before
        for text, ids in zip(batch, encoded, strict=True):
            content = text.encode()
            source.update(len(content).to_bytes(8, "big") + content)
            characters += len(text)
            if not len(ids):
                empty += 1
                continue
            if ids.min() < 0 or ids.max() >= job.tokenizer.vocab_size:
                wrong = ids.min() if ids.min() < 0 else ids.max()
                raise DataError(
                    f"{job.tokenizer.name} gave id {wrong} for a document of {unit.name}; its vocab_size is "
                    f"{job.tokenizer.vocab_size}: raise that, or give another tokenizer"
                )
            digest = document_digest(text)
            keys.append(shuffle_key(digest, job.settings.seed, index, len(keys)))
            held_out.append(is_validation(digest, job.settings.val_fraction))
            tokens.append(np.concatenate(([job.tokenizer.bos_id], ids)).astype(job.dtype))
    columns = {"keys": np.array(keys, np.uint64), "held_out": np.array(held_out, bool)}
    order = np.lexsort((columns["keys"], columns["held_out"]))
    lengths = np.array([len(t) for t in tokens], np.int64)[order]
    summary = {
        "name": unit.name,
        "documents": len(tokens),
        "empty": empty,
        "characters": characters,
        "tokens": int(lengths.sum()),
        "sha256": source.hexdigest(),
        "seconds": time.perf_counter() - begin,
        "seconds_in_tokenizer": in_tokenizer,
    }
    flat = np.concatenate([tokens[i] for i in order]) if tokens else np.empty(0, job.dtype)
    with writing(job.work):
        write_bytes_atomically(job.unit_tokens(index), flat.tobytes())
        columns = {name: column[order] for name, column in columns.items()}
        _write_marker(job.unit_marker(index), summary, **columns, lengths=lengths)
    return summary


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(clean(text))
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def pack_shard(job: Job, split: str, shard: int, num_shards: int, num_units: int) -> Summary:
    """Stage 2 for one shard; returns its summary."""
    flat, lengths = _gather(job, split, shard, num_shards, num_units)
    documents = len(lengths)
    row_length = job.settings.row_length
    if job.settings.cut_documents:
        flat, lengths = cut(flat, lengths, row_length, job.tokenizer.bos_id)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    cropped = 0
    counts = np.zeros(job.tokenizer.vocab_size, np.int64)

    def rows() -> Iterator[NDArray[Any]]:
        nonlocal cropped
        for segments in pack(lengths.tolist(), row_length, job.settings.packing_buffer):
            row = np.concatenate([flat[starts[i] : starts[i] + taken] for i, taken in segments])
            cropped += sum(int(lengths[i]) - taken for i, taken in segments)
            if split == "val":
                # Only targets count: the first token of a row is never predicted.
                np.add.at(counts, row[1:], 1)
            yield row

    chunks = write_rows(rows(), row_length, job.work / split, f"chunk-{shard:05d}")
    tokens_in, num_rows = int(lengths.sum()), sum(chunk["rows"] for chunk in chunks)
    summary = {
        "documents": documents,
        "pieces": len(lengths),
        "tokens_in": tokens_in,
        "rows": num_rows,
        "tokens_cropped": cropped,
        "tokens_unfilled": tokens_in - num_rows * row_length - cropped,
        "chunks": chunks,
    }
    _write_marker(job.shard_marker(split, shard), summary, target_counts=counts)
    return summary


def _gather(
    job: Job, split: str, shard: int, num_shards: int, num_units: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """(tokens, lengths) of the split's documents in the shard's range of keys, in key order."""
    low, high = (shard * 2**64 // num_shards, (shard + 1) * 2**64 // num_shards)
    keys, lengths, pieces = [], [], []
    for unit in range(num_units):
        with np.load(job.unit_marker(unit)) as stored:
            mine = stored["held_out"] == (split == "val")
            # The upper end is included, since 2**64 does not fit into uint64.
            mine &= (stored["keys"] >= np.uint64(low)) & (stored["keys"] <= np.uint64(high - 1))
            ends = np.cumsum(stored["lengths"])[mine]
            keys.append(stored["keys"][mine])
            lengths.append(stored["lengths"][mine])
        if len(ends):
            # Documents of one split and key range are side by side in the unit's file.
            begin, end = int(ends[0] - lengths[-1][0]), int(ends[-1])
            tokens = np.fromfile(
                job.unit_tokens(unit), job.dtype, count=end - begin, offset=begin * job.dtype.itemsize
            )
            pieces.extend(np.split(tokens, np.cumsum(lengths[-1])[:-1]))
    order = np.argsort(np.concatenate(keys), kind="stable")
    flat = np.concatenate([pieces[i] for i in order]) if len(order) else np.empty(0, job.dtype)
    return flat, np.concatenate(lengths)[order]


def cut(
    flat: NDArray[Any], lengths: NDArray[np.int64], row_length: int, bos_id: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Cut documents longer than a row into pieces of at most a row, each beginning with BOS.

    `flat` has the tokens of all documents one after another, each beginning with BOS, and `lengths` how
    many each has. The result has the same form.
    """
    if not len(lengths):
        return flat, lengths
    bos = np.array([bos_id], flat.dtype)
    step = row_length - 1
    pieces: list[NDArray[Any]] = []
    for document in np.split(flat, np.cumsum(lengths)[:-1]):
        if len(document) <= row_length:
            pieces.append(document)
        else:
            begins = range(1, len(document), step)
            pieces += [np.concatenate((bos, document[begin : begin + step])) for begin in begins]
    return np.concatenate(pieces), np.array([len(piece) for piece in pieces], np.int64)


def _write_marker(path: Path, summary: Summary, **arrays: NDArray[Any]) -> None:
    content = io.BytesIO()
    packed = np.frombuffer(json.dumps(summary).encode(), np.uint8)
    np.savez(content, summary=packed, **arrays)  # type: ignore[arg-type]  # stub mistakes the arrays for allow_pickle
    write_bytes_atomically(path, content.getvalue())


def read_marker(path: Path) -> Summary | None:
    """The summary of a finished job, or None if the job is not finished."""
    if not path.exists():
        return None
    with np.load(path) as stored:
        return json.loads(stored["summary"].tobytes())


def read_counts(path: Path) -> NDArray[np.int64]:
    """How often each id is a target in the shard's rows; (vocab_size,)."""
    with np.load(path) as stored:
        return stored["target_counts"]
