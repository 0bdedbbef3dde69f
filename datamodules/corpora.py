"""Where documents come from: the base class of corpora, and corpora of plain files."""

from __future__ import annotations

import io
import os
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.errors import DataError
from datamodules.files import SourceFile, find, read_bytes

_UNIT_BYTES = 1_000_000


@dataclass(frozen=True)
class Unit:
    """A part of a corpus: its name, and what the corpus needs to read it."""

    name: str
    content: tuple[Any, ...]


class Corpus(ABC):
    """Base of all corpora: subclass it and name your class by class_path.

    A corpus is cut into units, which are shared out over processes: it must be picklable and give the same units
    and documents each time. It should raise DataError for what the user can mend.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for folders and messages."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON-able identity: class_path and arguments."""

    @abstractmethod
    def units(self) -> list[Unit]:
        """The parts of the corpus, in a fixed order."""

    @abstractmethod
    def documents(self, unit: Unit) -> Iterator[str]:
        """The documents of one part, in a fixed order."""

    @abstractmethod
    def stamp(self) -> str:
        """Text that changes when the sources do, e.g. their sizes and dates; for the cache key."""


class FileCorpus(Corpus):
    """Base of corpora that are made of files."""

    @abstractmethod
    def files(self) -> list[SourceFile]:
        """All files, sorted by name."""

    def stamp(self) -> str:
        return " ".join(f"{file.name}:{file.size}:{file.stamp}" for file in self.files())


class _OnePerFile(FileCorpus):
    """One document per file; neighbouring small files are joined into one unit."""

    @abstractmethod
    def decode(self, name: str, data: bytes) -> str | None:
        """The text of a file, or None to leave it out."""

    def units(self) -> list[Unit]:
        groups: list[list[SourceFile]] = []
        filled = _UNIT_BYTES
        for file in self.files():
            if filled >= _UNIT_BYTES:
                groups.append([])
                filled = 0
            groups[-1].append(file)
            filled += file.size
        units = []
        for group in groups:
            rest = f" .. {group[-1].name} ({len(group)} files)" if len(group) > 1 else ""
            units.append(Unit(group[0].name + rest, tuple(group)))
        return units

    def documents(self, unit: Unit) -> Iterator[str]:
        for file in unit.content:
            text = self.decode(file.name, read_bytes(file.url))
            if text is not None:
                yield text


class StdlibCorpus(_OnePerFile):
    """The source code of Python's standard library, which every machine has: about 1,800 files, 31 MB.

    These are .py files sorted by path, without installed packages, decoded as Python does (PEP 263). The few
    that cannot be decoded are left out. The version of Python decides the content.
    """

    name = "stdlib"

    def settings(self) -> dict[str, Any]:
        return {"class_path": "datamodules.StdlibCorpus"}

    def files(self) -> list[SourceFile]:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = []
        for folder, below, names in os.walk(root):
            # Pruned here, since installed packages often have many more files than Python itself.
            below[:] = [name for name in below if name not in ("site-packages", "dist-packages")]
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                stat = path.stat()
                name = path.relative_to(root).as_posix()
                found.append(SourceFile(name, str(path), stat.st_size, str(stat.st_mtime_ns)))
        if not found:
            raise DataError(
                f"the standard library at {root} holds no .py files (some distributions ship it without "
                "source): give another corpus, e.g. datamodules.TextFiles"
            )
        return sorted(found, key=lambda file: file.name)

    def decode(self, name: str, data: bytes) -> str | None:
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            return data.decode(encoding)
        except (SyntaxError, UnicodeDecodeError):
            return None


class TextFiles(_OnePerFile):
    """UTF-8 text files, one document each.

    Args:
        paths: files, folders (all files below), globs such as `corpus/**/*.txt`, or URLs of those.
        skip_undecodable: leave out files that are not UTF-8 text instead of refusing them.

    Raises:
        DataError: `paths` is empty or not a list; on use, a path matches nothing or a file is not UTF-8 text.
    """

    name = "text"

    def __init__(self, paths: list[str], skip_undecodable: bool = False) -> None:
        self.paths = checked_paths(self, paths)
        self.skip_undecodable = skip_undecodable

    def settings(self) -> dict[str, Any]:
        return {
            "class_path": "datamodules.TextFiles",
            "paths": self.paths,
            "skip_undecodable": self.skip_undecodable,
        }

    def files(self) -> list[SourceFile]:
        return find(self.paths)

    def decode(self, name: str, data: bytes) -> str | None:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            reason = f"byte {data[error.start]:#04x} at offset {error.start}"
        else:
            if "\0" not in text:
                return text
            reason = "it contains NUL bytes"
        if self.skip_undecodable:
            return None
        raise DataError(
            f"{name} is not UTF-8 text ({reason}). Leave it out of the paths, or skip such files with "
            "skip_undecodable"
        )


def checked_paths(owner: Corpus, paths: Sequence[str]) -> list[str]:
    """The paths as a list of str. DataError: `paths` is empty or not a list."""
    if isinstance(paths, str) or not paths:
        raise DataError(
            f"{type(owner).__name__}(paths={paths!r}): give a list of at least one file, folder, glob or URL"
        )
    return [str(path) for path in paths]
