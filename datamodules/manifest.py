"""The manifest: what a prepared folder holds, where it came from, and the hash that names it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datamodules.errors import DataError
from datamodules.files import read_bytes
from datamodules.recipe import FORMAT, PrepareSettings, sha256_of
from datamodules.storage import file_sha256
from datamodules.tokenizers import Tokenizer
from fitting.records import write_text_atomically

MANIFEST = "manifest.json"


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Entropy, in nats per token, of the distribution that the counts give."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def write(
    folder: Path,
    corpus_settings: dict[str, Any],
    tokenizer: Tokenizer,
    settings: PrepareSettings,
    sources: list[dict[str, Any]],
    shards: dict[str, list[dict[str, Any]]],
    val_target_counts: NDArray[np.int64],
) -> None:
    """Put manifest.json together and write it atomically, in a form that people can read.

    `sources` and `shards` are the summaries of all units and shards, in order; the counts, (vocab_size,), say how
    often each id is a validation target. The corpus is not hashed, since it may hold paths of this machine.
    """
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
        "settings": asdict(settings),
        "tokenizer": {
            "name": tokenizer.name,
            "settings": tokenizer.settings(),
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "file": tokenizer.serialized()[0],
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
    write_text_atomically(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def manifest_hash(manifest: dict[str, Any]) -> str:
    """SHA-256 over everything that decides the rows, including the hash of every chunk."""
    return sha256_of({key: value for key, value in manifest.items() if key not in ("hash", "corpus")})


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder. DataError: it is missing or damaged."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise DataError(
            f"no prepared data at {folder}: it is not a folder. Prepare it with `python -m datamodules prepare`"
        )
    if not path.is_file():
        raise DataError(
            f"{folder} holds no {MANIFEST}: it was not written by `python -m datamodules prepare`, or that "
            "did not finish (run it again; it continues where it stopped)"
        )
    return check_content(read_bytes(str(path)), str(path))


def check_content(content: bytes, where: str) -> dict[str, Any]:
    """The manifest in these bytes, with format and hash checked. DataError names `where` and what is wrong."""
    try:
        manifest = json.loads(content)
        version, stated = manifest["format"], manifest["hash"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where} is damaged ({error!r}): prepare the data again into another folder"
        ) from error
    if version != FORMAT:
        raise DataError(f"{where} has format {version}, but this version reads {FORMAT}: prepare data anew")
    actual = manifest_hash(manifest)
    if actual != stated:
        raise DataError(
            f"{where} was changed after it was written: it states hash {stated[:16]}, but its content "
            f"has {actual[:16]}. Prepare the data again"
        )
    return manifest


def check_files(
    folder: Path, manifest: dict[str, Any], content: bool, chunks_may_miss: bool = False
) -> list[str]:
    """Faults of the data files, one line each, naming the file; empty if all is well.

    Args:
        content: compare every chunk's hash, which reads all data, and not only its size.
        chunks_may_miss: accept that chunks are missing (remote data is fetched when it is read).
    """
    faults: list[str | None] = []
    for split, part in manifest["splits"].items():
        for chunk in part["chunks"]:
            name = f"{split}/{chunk['filename']}"
            if not chunks_may_miss or (folder / name).exists():
                faults.append(_fault(folder, name, chunk["sha256"] if content else None, chunk["bytes"]))
        faults.append(_index_fault(folder, split, part["chunks"]))
    tokenizer = manifest["tokenizer"]
    faults.append(_fault(folder, tokenizer["file"], tokenizer["sha256"]))
    return [fault for fault in faults if fault]


def _fault(folder: Path, name: str, sha256: str | None, size: int | None = None) -> str | None:
    """What is wrong with a file; a hash or size that is None is not compared."""
    path = folder / name
    if not path.is_file():
        return f"{name}: missing"
    try:
        found = path.stat().st_size
        if size is not None and found != size:
            return f"{name}: {found} bytes, expected {size}"
        if sha256 is not None and file_sha256(path) != sha256:
            return f"{name}: content changed (SHA-256 differs from the manifest)"
    except OSError as error:
        return f"{name}: cannot be read ({error.strerror or error})"
    return None


def _index_fault(folder: Path, split: str, chunks: list[dict[str, Any]]) -> str | None:
    """What is wrong with an index, which is not hashed, since its keys vary with litdata's version."""
    path = folder / split / "index.json"
    try:
        entries = json.loads(path.read_text())["chunks"]
        listed = [(entry["filename"], entry["chunk_size"], entry["chunk_bytes"]) for entry in entries]
    except OSError:
        return f"{split}/index.json: missing"
    except (ValueError, KeyError, TypeError) as error:
        return f"{split}/index.json: damaged ({error!r})"
    expected = [(chunk["filename"], chunk["rows"], chunk["bytes"]) for chunk in chunks]
    return None if listed == expected else f"{split}/index.json: lists other chunks than the manifest"
