"""Where a run's prepared data comes from: a corpus prepared into a cache, a given folder, or a URL of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from datamodules import manifest as manifests
from datamodules.checks import check_recipe
from datamodules.corpora import Corpus
from datamodules.errors import DataError
from datamodules.prepare import prepare
from datamodules.recipe import cache_name
from datamodules.remote import RemoteChunks, mirror
from datamodules.settings import PrepareSettings
from datamodules.storage import Rows
from datamodules.tokenizers import Tokenizer

SMALL_BYTES = 2**28
"""Up to this size every hash is compared when data is opened (half a second); beyond, sizes only, and
`python -m datamodules verify` does the rest."""


class PreparedData(ABC):
    """Data that is or will be prepared, and how to get at it."""

    chunks_may_miss = False
    way_out = "Restore or prepare it again"

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The local folder; it need not exist before `prepare`."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The tokenizer's, known before `prepare`."""

    @abstractmethod
    def prepare(self, progress: bool) -> None:
        """Do what has to be done once per machine before the data can be opened."""

    @abstractmethod
    def check(self, manifest: dict[str, Any], vocab_size: int) -> None:
        """Raise DataError where the data disagrees with what was asked for."""

    def open(self, vocab_size: int) -> dict[str, Any]:
        """The manifest, after checking recipe and files.

        Raises:
            DataError: missing, damaged, or prepared with other settings than those asked for.
        """
        manifest = manifests.read(self.folder)
        self.check(manifest, vocab_size)
        content = manifests.size(manifest) <= SMALL_BYTES
        faults = manifests.check_files(self.folder, manifest, content, self.chunks_may_miss)
        if faults:
            raise DataError(f"the data in {self.folder} is damaged: {'; '.join(faults[:5])}. {self.way_out}")
        return manifest

    def rows(self, manifest: dict[str, Any], split: str) -> Rows:
        """The rows of one split by number."""
        part = manifest["splits"][split]
        row_length = manifest["settings"]["seq_len"] + 1
        return Rows(self.folder / split, row_length, part["rows"], self.remote_chunks(split, part["chunks"]))

    def remote_chunks(self, split: str, chunks: list[dict[str, Any]]) -> RemoteChunks | None:
        """What brings chunks here when they are read; by default None, since they are here."""
        return None


class CachedCorpus(PreparedData):
    """A corpus that is prepared on first use, in a folder of the cache named after its recipe."""

    way_out = "Delete that folder and start again"

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, settings: PrepareSettings, cache: Path) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._settings = settings
        self._cache = cache
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        # Looks at all source files, so only once.
        if self._folder is None:
            self._folder = self._cache / cache_name(self._corpus, self._tokenizer, self._settings)
        return self._folder

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def prepare(self, progress: bool) -> None:
        prepare(self._corpus, self._tokenizer, self._settings, self.folder, progress=progress)

    def check(self, manifest: dict[str, Any], vocab_size: int) -> None:
        check_recipe(self.folder, manifest, self._settings.as_dict(), self._tokenizer, None, vocab_size)


class GivenFolder(PreparedData):
    """A folder written by `python -m datamodules prepare`.

    Args:
        asked: preparation settings that were given a value, by their name in the manifest.
        tokenizer, corpus: compared with those of the data; None where none was asked for.
    """

    def __init__(
        self, folder: Path, asked: dict[str, Any], tokenizer: Tokenizer | None, corpus: Corpus | None
    ) -> None:
        self._folder: Path | None = folder
        self._asked = asked
        self._tokenizer = tokenizer
        self._corpus = corpus

    @property
    def folder(self) -> Path:
        assert self._folder is not None
        return self._folder

    @property
    def vocab_size(self) -> int:
        if self._tokenizer is not None:
            return self._tokenizer.vocab_size
        return manifests.read(self.folder)["tokenizer"]["vocab_size"]

    def prepare(self, progress: bool) -> None:
        """Nothing: it was prepared beforehand."""

    def check(self, manifest: dict[str, Any], vocab_size: int) -> None:
        check_recipe(self.folder, manifest, self._asked, self._tokenizer, self._corpus, vocab_size)


class GivenURL(GivenFolder):
    """The same behind a URL; its chunks come into the cache when they are read."""

    chunks_may_miss = True

    def __init__(
        self,
        url: str,
        cache: Path,
        asked: dict[str, Any],
        tokenizer: Tokenizer | None,
        corpus: Corpus | None,
    ) -> None:
        super().__init__(cache, asked, tokenizer, corpus)
        self._url = url.rstrip("/")
        self._cache = cache
        self._folder = None

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = mirror(self._url, self._cache)
        return self._folder

    def remote_chunks(self, split: str, chunks: list[dict[str, Any]]) -> RemoteChunks | None:
        return RemoteChunks(f"{self._url}/{split}", self.folder / split, chunks)
