"""Prepared data behind a URL: each chunk is fetched when it is first read, then checked and kept.

Whole chunks are copied into a local folder, since litdata can stream only in its own order: with random access
its prefetching thread unmaps chunks that are being read (0.2.76 raises KeyError).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from datamodules.errors import DataError
from datamodules.files import read_bytes
from datamodules.manifest import MANIFEST, check_content
from datamodules.prepared import PreparedFolder
from datamodules.storage import Rows, writing
from fitting.records import write_bytes_atomically


def mirror(url: str, cache: Path) -> Path:
    """Copy all but the chunks of the prepared data at `url` into a folder of the cache, and return its path.

    The folder is named after the data's hash, so data that changes behind the URL gets another one.
    """
    url = url.rstrip("/")
    content = read_bytes(f"{url}/{MANIFEST}")
    manifest = check_content(content, f"{url}/{MANIFEST}")
    folder = cache / f"remote-{manifest['hash'][:16]}"
    if not (folder / MANIFEST).exists():
        names = [manifest["tokenizer"]["file"], *(f"{split}/index.json" for split in manifest["splits"])]
        files = {name: read_bytes(f"{url}/{name}") for name in names}
        with writing(folder):
            # The manifest comes last, so where it is, everything is.
            for name, data in {**files, MANIFEST: content}.items():
                write_bytes_atomically(folder / name, data)
    return folder


class RemoteRows(Rows):
    """Rows of the split at `url`; each chunk comes into the local `folder` when it is first read."""

    def __init__(self, url: str, folder: Path, row_length: int, chunks: list[dict[str, Any]]) -> None:
        self._ends = list(itertools.accumulate(chunk["rows"] for chunk in chunks))
        super().__init__(folder, row_length, self._ends[-1])
        self.url = url
        self._chunks = chunks
        self._here: set[int] = set()

    def __getitem__(self, row: int) -> NDArray[Any]:
        """Also raises DataError if the chunk cannot be fetched or is damaged."""
        index = bisect.bisect_right(self._ends, row)
        path = self.folder / self._chunks[index]["filename"]
        if index not in self._here and not path.exists():
            content = read_bytes(f"{self.url}/{path.name}")
            if hashlib.sha256(content).hexdigest() != self._chunks[index]["sha256"]:
                raise DataError(
                    f"{self.url}/{path.name} is damaged: its SHA-256 differs from the manifest's. Restore it, "
                    "or prepare the data again"
                )
            with writing(path):
                # Several processes may fetch one chunk at once: the file appears whole.
                write_bytes_atomically(path, content)
        self._here.add(index)
        return super().__getitem__(row)


class PreparedURL(PreparedFolder):
    """A prepared folder behind a URL. What is read from it is kept in a folder of the cache."""

    chunks_may_miss = True

    def __init__(self, url: str, cache: Path, *asked: Any) -> None:
        super().__init__(cache, *asked)
        self._url = url.rstrip("/")

    @cached_property
    def folder(self) -> Path:
        return mirror(self._url, self.place)

    def rows(self, manifest: dict[str, Any], split: str) -> Rows:
        row_length = manifest["settings"]["seq_len"] + 1
        chunks = manifest["splits"][split]["chunks"]
        return RemoteRows(f"{self._url}/{split}", self.folder / split, row_length, chunks)
