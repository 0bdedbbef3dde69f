"""Corpora: where documents come from.

A corpus is cut into units, small parts with a fixed order that do not depend on how many processes read them.
A unit is the grain of parallel work and of a restart, and what makes the result independent of the number of
workers.
"""

from __future__ import annotations

import io
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.errors import DataError

_UNIT_BYTES = 1_000_000


@dataclass(frozen=True)
class Unit:
    """A part of a corpus: its name for messages and the manifest, and what the corpus needs to read it."""

    name: str
    content: tuple[Any, ...]


class Corpus(ABC):
    """Base of all corpora: subclass it and name your class by class_path.

    A subclass must be picklable and must give the same units and documents each time.
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
        """The parts of the corpus, in a fixed order.

        Raises:
            DataError: there is nothing to read.
        """

    @abstractmethod
    def documents(self, unit: Unit) -> Iterator[str]:
        """The documents of one part, in a fixed order."""

    @abstractmethod
    def stamp(self) -> str:
        """Changes when the sources change, cheaply (sizes and dates, not content): part of the cache key."""


class _LocalFiles(Corpus):
    """One document per file, neighbouring small files joined into one unit."""

    def _files(self) -> list[tuple[str, Path]]:
        """(name that does not depend on the machine, path), sorted by name."""
        raise NotImplementedError

    def _decode(self, name: str, data: bytes) -> str | None:
        raise NotImplementedError

    def units(self) -> list[Unit]:
        groups: list[list[tuple[str, Path]]] = []
        filled = _UNIT_BYTES
        for name, path in self._files():
            if filled >= _UNIT_BYTES:
                groups.append([])
                filled = 0
            groups[-1].append((name, path))
            filled += path.stat().st_size
        return [Unit(_span([name for name, _ in group]), tuple(group)) for group in groups]

    def documents(self, unit: Unit) -> Iterator[str]:
        for name, path in unit.content:
            try:
                data = path.read_bytes()
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}") from error
            text = self._decode(name, data)
            if text is not None:
                yield text

    def stamp(self) -> str:
        entries = ((name, path.stat()) for name, path in self._files())
        return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in entries)


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} files)"


class StdlibCorpus(_LocalFiles):
    """The Python standard library's own source code, which every machine has: about 1,800 files, 31 MB.

    All .py files under the running interpreter's standard library except installed packages, sorted by path,
    each decoded as Python itself would (PEP 263). The few files that are undecodable on purpose (they test
    exactly that) are left out. The content depends on the Python version, which the manifest's source hashes
    show.
    """

    name = "stdlib"

    def settings(self) -> dict[str, Any]:
        return {"class_path": "datamodules.StdlibCorpus"}

    def _files(self) -> list[tuple[str, Path]]:
        root = Path(sysconfig.get_paths()["stdlib"])
        installed = {"site-packages", "dist-packages"}
        paths = (
            path for path in root.rglob("*.py") if not installed.intersection(path.parts) and path.is_file()
        )
        files = sorted((path.relative_to(root).as_posix(), path) for path in paths)
        if not files:
            raise DataError(
                f"the standard library at {root} holds no .py files (some distributions ship it without "
                "source): give another corpus, e.g. datamodules.TextFiles"
            )
        return files

    def _decode(self, name: str, data: bytes) -> str | None:
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            return data.decode(encoding)
        except (SyntaxError, UnicodeDecodeError):
            return None


class TextFiles(_LocalFiles):
    """UTF-8 text files, one document each.

    Args:
        paths: files, folders (all files below) or globs such as `corpus/**/*.txt`.
        skip_undecodable: leave out files that are not UTF-8 text instead of stopping there.

    Raises:
        DataError: on use, when a path matches nothing or a file is not UTF-8 text.
    """

    def __init__(self, paths: list[str], skip_undecodable: bool = False) -> None:
        if not paths:
            raise DataError("TextFiles(paths=[]): give at least one file, folder or glob")
        self.paths = [str(path) for path in paths]
        self.skip_undecodable = skip_undecodable

    @property
    def name(self) -> str:
        return "text"

    def settings(self) -> dict[str, Any]:
        return {
            "class_path": "datamodules.TextFiles",
            "paths": self.paths,
            "skip_undecodable": self.skip_undecodable,
        }

    def _files(self) -> list[tuple[str, Path]]:
        import glob

        found: set[Path] = set()
        for pattern in self.paths:
            root = Path(pattern)
            if root.is_dir():
                matches = [path for path in root.rglob("*") if path.is_file()]
            else:
                matches = [Path(path) for path in glob.glob(pattern, recursive=True) if Path(path).is_file()]
            if not matches:
                raise DataError(
                    f"no file matches {pattern!r}: give a file, a folder or a glob that matches something"
                )
            found.update(path.absolute() for path in matches)
        return _relative_names(found)

    def _decode(self, name: str, data: bytes) -> str | None:
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


def _relative_names(paths: set[Path]) -> list[tuple[str, Path]]:
    """Names relative to the deepest common folder: a corpus that is moved keeps its hash."""
    import os.path

    common = Path(os.path.commonpath([path.parent for path in paths]))
    return sorted((path.relative_to(common).as_posix(), path) for path in paths)
