"""The manifest: what a prepared folder holds, where it came from, and the hash that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.errors import DataError
from datamodules.settings import FORMAT, PrepareSettings, canonical_json, sha256_of
from datamodules.storage import file_sha256, write_atomically
from datamodules.tokenizers import Tokenizer

MANIFEST = "manifest.json"


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in nats per token of the distribution given by counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def build(
    corpus_settings: dict[str, Any],
    tokenizer: Tokenizer,
    settings: PrepareSettings,
    sources: list[dict[str, Any]],
    shards: dict[str, list[dict[str, Any]]],
    val_target_counts: NDArray[np.int64],
) -> dict[str, Any]:
    """Put the manifest together; `hash` covers all other keys but `corpus`, which may hold machine-bound
    paths."""
    file_name, _ = tokenizer.serialized()
    splits: dict[str, Any] = {}
    for split, parts in shards.items():
        total = {key: sum(part[key] for part in parts) for key in parts[0] if key != "chunks"}
        total["tokens"] = total["rows"] * settings.row_length
        total["fill"] = total["tokens"] / total["tokens_in"] if total["tokens_in"] else 0.0
        total["chunks"] = [
            {key: chunk[key] for key in ("filename", "rows", "bytes", "sha256")}
            for part in parts
            for chunk in part["chunks"]
        ]
        splits[split] = total
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "settings": settings.as_dict(),
        "tokenizer": {
            "name": tokenizer.name,
            "settings": tokenizer.settings(),
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "file": file_name,
            "sha256": tokenizer.fingerprint(),
        },
        "sources": [
            {key: source[key] for key in ("name", "documents", "empty", "characters", "tokens", "sha256")}
            for source in sources
        ],
        "documents_empty": sum(source["empty"] for source in sources),
        "splits": splits,
        "val_unigram_entropy": unigram_entropy(val_target_counts),
        "corpus": corpus_settings,
    }
    manifest["hash"] = manifest_hash(manifest)
    return manifest


def manifest_hash(manifest: dict[str, Any]) -> str:
    """The overall hash: SHA-256 over everything that decides the rows, including the hash of every chunk."""
    return sha256_of({key: value for key, value in manifest.items() if key not in ("hash", "corpus")})


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json, readable and atomic."""
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder, its own hash checked.

    Raises:
        DataError: no folder, no manifest, not JSON, another format version, or changed since it was written.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise DataError(
            f"no prepared data at {folder}: it is not a folder. Prepare it by `python -m datamodules prepare`"
        )
    if not path.is_file():
        raise DataError(
            f"{folder} holds no {MANIFEST}: it was not written by `python -m datamodules prepare`, or that "
            "did not finish (run it again; it goes on where it stopped)"
        )
    return check_content(path.read_bytes(), str(path))


def check_content(content: bytes, where: str) -> dict[str, Any]:
    """The manifest in these bytes, its own hash checked; `where` is for messages.

    Raises:
        DataError: not JSON, another format version, or changed since it was written.
    """
    try:
        manifest = json.loads(content)
        version, stated = manifest["format"], manifest["hash"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where} is damaged ({error!r}): prepare the data again into another folder"
        ) from error
    if version != FORMAT:
        raise DataError(f"{where} has format {version}, this version reads {FORMAT}: prepare the data again")
    actual = manifest_hash(manifest)
    if actual != stated:
        raise DataError(
            f"{where} was changed after it was written: it states hash {stated[:16]}, its content has "
            f"{actual[:16]}. Prepare the data again"
        )
    return manifest


def size(manifest: dict[str, Any]) -> int:
    """Bytes of all chunks."""
    return sum(chunk["bytes"] for part in manifest["splits"].values() for chunk in part["chunks"])


def check_files(
    folder: Path, manifest: dict[str, Any], content: bool, chunks_may_miss: bool = False
) -> list[str]:
    """Faults of the data files, one line each, naming the file; empty when all is well.

    Args:
        content: compare every hash (reads all data); else presence and size only (fast).
        chunks_may_miss: a chunk that is not there is no fault (remote data, fetched when it is read).
    """
    faults = []
    for split, part in manifest["splits"].items():
        for chunk in part["chunks"]:
            path = folder / split / chunk["filename"]
            if not path.is_file():
                if not chunks_may_miss:
                    faults.append(f"{split}/{chunk['filename']}: missing")
            elif path.stat().st_size != chunk["bytes"]:
                faults.append(
                    f"{split}/{chunk['filename']}: {path.stat().st_size} bytes, expected {chunk['bytes']}"
                )
            elif content and file_sha256(path) != chunk["sha256"]:
                faults.append(
                    f"{split}/{chunk['filename']}: content changed (SHA-256 differs from the manifest)"
                )
        faults += _check_index(folder, split, part["chunks"])
    tokenizer = folder / manifest["tokenizer"]["file"]
    if not tokenizer.is_file():
        faults.append(f"{tokenizer.name}: missing")
    elif file_sha256(tokenizer) != manifest["tokenizer"]["sha256"]:
        faults.append(f"{tokenizer.name}: content changed (SHA-256 differs from the manifest)")
    return faults


def _check_index(folder: Path, split: str, chunks: list[dict[str, Any]]) -> list[str]:
    """The index is litdata's and not hashed (its keys vary with litdata's version): it must list what we
    list."""
    path = folder / split / "index.json"
    try:
        entries = json.loads(path.read_text())["chunks"]
        listed = [(entry["filename"], entry["chunk_size"], entry["chunk_bytes"]) for entry in entries]
    except OSError:
        return [f"{split}/index.json: missing"]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{split}/index.json: damaged ({error!r})"]
    expected = [(chunk["filename"], chunk["rows"], chunk["bytes"]) for chunk in chunks]
    return [] if listed == expected else [f"{split}/index.json: lists other chunks than the manifest"]


def same(left: Any, right: Any) -> bool:
    """Whether two JSON-able values are equal, tuples and lists alike."""
    return canonical_json(left) == canonical_json(right)
