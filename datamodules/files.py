"""Which files a path, folder, glob or URL names, and how to read them.

URLs go through fsspec, which needs a package for each scheme: s3fs for s3://, gcsfs for gs://; none for hf://.
"""

from __future__ import annotations

import glob
import io
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from datamodules.errors import DataError, import_extra


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus."""

    name: str
    """Path relative to the folder that all files of the corpus share, so that it does not depend on the machine."""
    url: str
    """Path or URL to open."""
    size: int
    """Bytes."""
    stamp: str
    """Changes when the file changes (date or checksum, as the store gives it)."""


def find(patterns: Sequence[str], suffixes: tuple[str, ...] = ()) -> list[SourceFile]:
    """The files that paths, folders, globs and URLs of those name, sorted by name, each once.

    A folder gives all files below it, or those with one of the suffixes. DataError: a pattern matches nothing.
    """
    found: dict[str, tuple[int, str]] = {}
    for pattern in patterns:
        try:
            matches = _remote(pattern, suffixes) if "://" in pattern else _local(pattern, suffixes)
        except OSError as error:
            raise DataError(f"cannot list {pattern}: {error.strerror or error}") from error
        if not matches:
            wanted = f" ending in {' or '.join(suffixes)}" if suffixes else ""
            raise DataError(
                f"no file{wanted} at {pattern!r}: give a file, folder, glob or URL that matches something"
            )
        found.update(matches)
    # commonprefix works on any sequences: here on lists of folder names.
    common = len(os.path.commonprefix([url.split("/")[:-1] for url in found]))
    files = [SourceFile("/".join(url.split("/")[common:]), url, *found[url]) for url in found]
    return sorted(files, key=lambda file: file.name)


def _local(pattern: str, suffixes: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    pattern = os.path.expanduser(pattern)
    root = Path(pattern)
    if root.is_dir():
        paths = [path for path in root.rglob("*") if path.name.endswith(suffixes or ("",))]
    elif root.is_file():
        paths = [root]
    else:
        paths = [Path(path) for path in glob.glob(pattern, recursive=True)]
    found = {}
    for path in paths:
        if path.is_file():
            stat = path.stat()
            found[path.absolute().as_posix()] = (stat.st_size, str(stat.st_mtime_ns))
    return found


def _remote(pattern: str, suffixes: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    filesystem, path = _filesystem(pattern)
    try:
        if glob.has_magic(pattern):
            details = filesystem.glob(path, detail=True)
        elif filesystem.isdir(path):
            details = filesystem.find(path, detail=True)
            details = {name: info for name, info in details.items() if name.endswith(suffixes or ("",))}
        elif filesystem.exists(path):
            details = {path: filesystem.info(path)}
        else:
            details = {}
    except Exception as error:  # every store has its own exceptions
        raise DataError(f"cannot list {pattern}: {type(error).__name__}: {error}") from error
    return {
        filesystem.unstrip_protocol(name): (int(info["size"] or 0), _remote_stamp(info))
        for name, info in details.items()
        if info["type"] == "file"
    }


def _remote_stamp(info: dict[str, Any]) -> str:
    keys = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "mtime", "created")
    return next((str(info[key]) for key in keys if info.get(key)), "")


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"cannot open {url}: {error}. The schemes are those of fsspec, e.g. s3://, gs://, hf://"
        ) from error


def open_binary(url: str) -> IO[bytes]:
    """Open a path or URL for reading bytes. DataError: it cannot be opened."""
    try:
        if "://" not in url:
            return open(url, "rb")
        filesystem, path = _filesystem(url)
        return filesystem.open(path, "rb")
    except OSError as error:
        raise DataError(f"cannot read {url}: {error.strerror or error}") from error


def read_bytes(url: str) -> bytes:
    """All bytes behind a path or URL. DataError: it cannot be read."""
    try:
        with open_binary(url) as stream:
            return stream.read()
    except DataError:
        raise
    except Exception as error:  # every store has its own exceptions
        raise DataError(f"cannot read {url}: {type(error).__name__}: {error}") from error


def open_decompressed(url: str) -> IO[bytes]:
    """Open for reading, decompressing .gz and .zst. DataError: it cannot be opened, or zstandard is missing."""
    raw = open_binary(url)
    if url.endswith(".gz"):
        import gzip

        return gzip.open(raw)  # type: ignore[return-value]
    if url.endswith(".zst"):
        return io.BufferedReader(_Zstandard(raw, url, import_extra("zstandard", f"{url} needs")))
    return raw


class _Zstandard(io.RawIOBase):
    """Decompressed bytes of a stream. The library's own reader takes a truncated stream for a complete one."""

    def __init__(self, raw: IO[bytes], url: str, library: Any) -> None:
        self._raw = raw
        self._url = url
        self._library = library
        self._decompressor = library.ZstdDecompressor()
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            data = self._input or self._raw.read(2**17)
            self._input = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a zstandard frame: it is truncated")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                self._output = self._frame.decompress(data)
            except self._library.ZstdError as error:
                raise DataError(f"{self._url} is not zstandard data: {error}") from error
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        taken = self._output[: len(buffer)]
        buffer[: len(taken)] = taken
        self._output = self._output[len(taken) :]
        return len(taken)

    def close(self) -> None:
        self._raw.close()
        super().close()
