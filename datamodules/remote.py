"""Prepared data that lies behind a URL: chunks are fetched when first read, checked, and kept.

litdata can stream remote chunks itself, but only in its own order: with random access its prefetching
thread unmaps chunks that are being read (litdata 0.2.76 raises KeyError). Here whole chunks are copied into a
local folder, which litdata then reads like any other.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.errors import DataError
from datamodules.files import open_binary
from datamodules.manifest import MANIFEST, check_content
from datamodules.storage import write_atomically


def read_remote(url: str) -> bytes:
    """All bytes of a file behind a URL.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with open_binary(url) as stream:
            return stream.read()
    except DataError:
        raise
    except Exception as error:  # every store has exceptions of its own
        raise DataError(f"cannot read {url}: {type(error).__name__}: {error}") from error


def mirror(url: str, cache: Path) -> Path:
    """A local folder for the prepared data at `url`, holding all but the chunks; returns it.

    It is named after the data's hash, so data that changes behind the URL gets another folder.

    Raises:
        DataError: there is no prepared data, or it cannot be read.
    """
    base = url.rstrip("/")
    content = read_remote(f"{base}/{MANIFEST}")
    manifest = check_content(content, f"{base}/{MANIFEST}")
    folder = cache / f"remote-{manifest['hash'][:16]}"
    if not (folder / MANIFEST).exists():
        names = [manifest["tokenizer"]["file"], *(f"{split}/index.json" for split in manifest["splits"])]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, read_remote(f"{base}/{name}"))
        write_atomically(folder / MANIFEST, content)
    return folder


class RemoteChunks:
    """Brings the chunk of a row into the local folder before it is read.

    Args:
        url: of the split's folder.
        folder: the local one.
        chunks: the split's chunks as in the manifest.
    """

    def __init__(self, url: str, folder: Path, chunks: Sequence[dict[str, Any]]) -> None:
        self.url = url
        self.folder = folder
        self._chunks = list(chunks)
        self._ends = list(itertools.accumulate(chunk["rows"] for chunk in self._chunks))
        self._here: set[int] = set()

    def ensure(self, row: int) -> None:
        """Fetch the chunk that holds `row` where it is not here yet.

        Several processes may fetch one chunk at once; each writes aside and renames, so all see a whole file.

        Raises:
            DataError: it cannot be read, or its content is not what the manifest says.
        """
        index = bisect.bisect_right(self._ends, row)
        if index in self._here:
            return
        chunk = self._chunks[index]
        path = self.folder / chunk["filename"]
        if not path.exists():
            content = read_remote(f"{self.url}/{chunk['filename']}")
            if hashlib.sha256(content).hexdigest() != chunk["sha256"]:
                raise DataError(
                    f"{self.url}/{chunk['filename']} is damaged: its SHA-256 differs from the manifest's. "
                    "Restore it, or prepare the data again"
                )
            write_atomically(path, content)
        self._here.add(index)
