"""Corpora whose documents are one field of many records: JSON lines, parquet, Hugging Face datasets."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from datamodules.corpora import Corpus, FileCorpus, Unit, checked_paths
from datamodules.errors import DataError, import_extra
from datamodules.files import SourceFile, find, open_binary, open_decompressed

_UNIT_BYTES = 32_000_000
_UNIT_ROWS = 10_000


def _text_of(record: Any, key: str, where: str) -> str:
    """The text of one record; "" if it is null."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(record).__name__}")
    if key not in record:
        raise DataError(f"{where}: no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}")
    text = record[key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: {key!r} is {type(text).__name__}, not text")
    return text


class JSONLines(FileCorpus):
    """JSON lines, one object per line and one document per object; plain, .gz or .zst (extra `data`).

    Plain files are cut into units of 32 MB at line ends. A compressed file is one unit, whose tokens one worker
    holds in memory: several files of some hundred MB are better than one of many GB.

    Args:
        paths: files, folders (all .jsonl, .ndjson and .json below, compressed or not), globs, or their URLs.
        text_key: the key that holds the text; null counts as an empty document.

    Raises:
        DataError: `paths` is empty or not a list; on use, a path matches nothing, a file cannot be read, or a
            line is not a JSON object with a text at that key.
    """

    name = "jsonl"
    SUFFIXES = tuple(
        kind + compression for kind in (".jsonl", ".ndjson", ".json") for compression in ("", ".gz", ".zst")
    )

    def __init__(self, paths: list[str], text_key: str = "text") -> None:
        self.paths = checked_paths(self, paths)
        self.text_key = text_key

    def settings(self) -> dict[str, Any]:
        return {"class_path": "datamodules.JSONLines", "paths": self.paths, "text_key": self.text_key}

    def files(self) -> list[SourceFile]:
        return find(self.paths, self.SUFFIXES)

    def units(self) -> list[Unit]:
        units = []
        for file in self.files():
            compressed = file.url.endswith((".gz", ".zst"))
            parts = 1 if compressed else max(1, round(file.size / _UNIT_BYTES))
            for part in range(parts):
                end = None if compressed else (part + 1) * file.size // parts
                name = file.name if parts == 1 else f"{file.name} ({part + 1} of {parts})"
                units.append(Unit(name, (file, part * file.size // parts, end)))
        return units

    def documents(self, unit: Unit) -> Iterator[str]:
        file, begin, end = unit.content
        try:
            with open_decompressed(file.url) as stream:
                position = number = 0
                if begin:
                    # A line belongs to the part in which it begins.
                    stream.seek(begin - 1)
                    position = begin - 1 + len(stream.readline())
                while (end is None or position < end) and (line := stream.readline()):
                    number += 1
                    position += len(line)
                    if not line.strip():
                        continue
                    where = f"{file.name}, line {number}" + (f" after byte {begin}" if begin else "")
                    try:
                        record = json.loads(line)
                    except ValueError as error:
                        raise DataError(
                            f"{where}: not JSON ({error}); the line begins {line[:60]!r}"
                        ) from error
                    yield _text_of(record, self.text_key, where)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read {file.url}: {error}") from error


class ParquetFiles(FileCorpus):
    """Parquet files with a column of texts, one document per row (extra `data`).

    Args:
        paths: files, folders (all .parquet below), globs, or URLs of those.
        text_column: the column that holds the text; null counts as an empty document.

    Raises:
        DataError: `paths` is empty or not a list; on use, a path matches nothing, pyarrow is not installed, or a
            file is not parquet or has no such column of texts.
    """

    name = "parquet"

    def __init__(self, paths: list[str], text_column: str = "text") -> None:
        self.paths = checked_paths(self, paths)
        self.text_column = text_column

    def settings(self) -> dict[str, Any]:
        return {
            "class_path": "datamodules.ParquetFiles",
            "paths": self.paths,
            "text_column": self.text_column,
        }

    def files(self) -> list[SourceFile]:
        return find(self.paths, (".parquet",))

    def units(self) -> list[Unit]:
        units = []
        for file in self.files():
            with self._opened(file) as table:
                sizes = [table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)]
            for begin, end in _groups(sizes):
                whole = (begin, end) == (0, len(sizes))
                name = file.name if whole else f"{file.name} (groups {begin}-{end - 1})"
                units.append(Unit(name, (file, begin, end)))
        return units

    def documents(self, unit: Unit) -> Iterator[str]:
        file, begin, end = unit.content
        with self._opened(file) as table:
            for group in range(begin, end):
                try:
                    column = table.read_row_group(group, columns=[self.text_column]).column(0)
                except Exception as error:  # pyarrow raises many types where the content is damaged
                    raise DataError(f"cannot read row group {group} of {file.url}: {error}") from error
                for text in column:
                    yield text.as_py() or ""

    def _opened(self, file: SourceFile) -> Any:
        pyarrow = import_extra("pyarrow", "parquet needs")
        import_extra("pyarrow.parquet", "parquet needs")
        try:
            table = pyarrow.parquet.ParquetFile(open_binary(file.url))
        except pyarrow.ArrowException as error:
            raise DataError(f"{file.url} is not a parquet file: {error}") from error
        schema = table.schema_arrow
        _check_column(self.text_column, schema.names, file.url)
        kind = schema.field(self.text_column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"column {self.text_column!r} of {file.url} holds {kind}, not texts")
        return table


def _groups(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Join row groups into parts of about _UNIT_BYTES; yields (first, last + 1)."""
    begin = filled = 0
    for i, size in enumerate(sizes):
        filled += size
        if filled >= _UNIT_BYTES:
            yield begin, i + 1
            begin, filled = i + 1, 0
    if begin < len(sizes):
        yield begin, len(sizes)


class HuggingFaceDataset(Corpus):
    """A dataset of the Hugging Face hub, or a local folder in its layout (extra `data`).

    The whole dataset is downloaded into a cache. To read without a copy, give `ParquetFiles` an hf:// URL.

    Args:
        path: name such as `HuggingFaceFW/fineweb-edu`, or a folder.
        config: configuration of the dataset if it has several, e.g. `sample-10BT`.
        split: which split to read.
        text_column: the column that holds the text.
        revision: commit or tag; name a commit to get the same data next year.

    Raises:
        DataError: on use, the dataset cannot be loaded or has no such column.
    """

    name = "hf"

    def __init__(
        self,
        path: str,
        config: str | None = None,
        split: str = "train",
        text_column: str = "text",
        revision: str | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.split = split
        self.text_column = text_column
        self.revision = revision
        self._loaded: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    def settings(self) -> dict[str, Any]:
        return {
            "class_path": "datamodules.HuggingFaceDataset",
            "path": self.path,
            "config": self.config,
            "split": self.split,
            "text_column": self.text_column,
            "revision": self.revision,
        }

    def stamp(self) -> str:
        # A name without a revision is taken to mean the same data for ever.
        return ""

    def units(self) -> list[Unit]:
        rows = len(self._dataset())
        parts = [(begin, min(begin + _UNIT_ROWS, rows)) for begin in range(0, rows, _UNIT_ROWS)]
        return [Unit(f"rows {begin}-{end - 1}", (begin, end)) for begin, end in parts]

    def documents(self, unit: Unit) -> Iterator[str]:
        begin, end = unit.content
        for i, record in enumerate(self._dataset().select(range(begin, end))):
            yield _text_of(record, self.text_column, f"{self.path}, row {begin + i}")

    def _dataset(self) -> Any:
        if self._loaded is not None:
            return self._loaded
        datasets = import_extra("datasets", "Hugging Face datasets need")
        try:
            loaded = datasets.load_dataset(self.path, self.config, split=self.split, revision=self.revision)
        except Exception as error:  # many types: unknown names, no network, bad layouts
            raise DataError(
                f"cannot load the dataset {self.path!r}: {type(error).__name__}: {error}"
            ) from error
        _check_column(self.text_column, loaded.column_names, self.path)
        self._loaded = loaded
        return loaded


def _check_column(column: str, names: Sequence[str], where: str) -> None:
    if column not in names:
        raise DataError(f"{where} has no column {column!r}; it has {', '.join(names)}")
