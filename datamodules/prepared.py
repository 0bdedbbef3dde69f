"""Where a run's prepared data is, and whether it is whole and as asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from datamodules import manifest as manifests
from datamodules.corpora import Corpus
from datamodules.errors import DataError
from datamodules.prepare import prepare
from datamodules.recipe import PrepareSettings, cache_name, differ
from datamodules.storage import Rows
from datamodules.tokenizers import Tokenizer

SMALL_BYTES = 2**28
"""Up to this size every hash is compared when data is opened (half a second); beyond it only sizes are,
and `python -m datamodules verify` does the rest."""


@dataclass(eq=False)
class PreparedFolder:
    """A prepared folder, and what was asked for, with which the folder is compared."""

    place: Path
    asked: dict[str, Any]
    """The preparation settings that were given, by their names in the manifest."""
    tokenizer: Tokenizer | None = None
    corpus: Corpus | None = None
    chunks_may_miss: ClassVar[bool] = False
    way_out: ClassVar[str] = "Restore or prepare it again"

    @cached_property
    def folder(self) -> Path:
        """The local folder; it need not exist before `prepare`."""
        return self.place

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary, known before `prepare`."""
        if self.tokenizer is not None:
            return self.tokenizer.vocab_size
        return manifests.read(self.folder)["tokenizer"]["vocab_size"]

    def prepare(self, progress: bool) -> None:
        """Do once per machine what must precede `open`: here, nothing."""

    def open(self, vocab_size: int) -> dict[str, Any]:
        """The manifest, for a model of `vocab_size` ids. DataError: data is missing, damaged or not as asked for."""
        manifest = manifests.read(self.folder)
        self._check_recipe(manifest, vocab_size)
        small = sum(c["bytes"] for part in manifest["splits"].values() for c in part["chunks"]) <= SMALL_BYTES
        faults = manifests.check_files(
            self.folder, manifest, content=small, chunks_may_miss=self.chunks_may_miss
        )
        if faults:
            raise DataError(f"the data in {self.folder} is damaged: {'; '.join(faults[:5])}. {self.way_out}")
        return manifest

    def _check_recipe(self, manifest: dict[str, Any], vocab_size: int) -> None:
        stored, folder = manifest["settings"], self.folder
        for key, value in self.asked.items():
            if stored[key] != value:
                name = "prepare_seed" if key == "seed" else key
                raise DataError(
                    f"{name} is {value}, but the data in {folder} was prepared with {stored[key]}: use that "
                    "value, or prepare other data"
                )
        there = manifest["tokenizer"]
        if self.tokenizer is not None and differ(self.tokenizer.settings(), there["settings"]):
            raise DataError(
                f"the tokenizer is {self.tokenizer.settings()}, but the data in {folder} was prepared with "
                f"{there['settings']}: leave the tokenizer out to use that one, or prepare other data"
            )
        if self.corpus is not None and differ(self.corpus.settings(), manifest["corpus"]):
            raise DataError(
                f"the corpus is {self.corpus.settings()}, but the data in {folder} was prepared from "
                f"{manifest['corpus']}: leave the corpus out to use that one, or leave data_dir out to prepare "
                "yours"
            )
        if there["vocab_size"] > vocab_size:
            raise DataError(
                f"vocab_size is {vocab_size}, but the tokenizer {there['name']} of {folder} has "
                f"{there['vocab_size']} ids: raise vocab_size to at least that, or leave it out"
            )

    def rows(self, manifest: dict[str, Any], split: str) -> Rows:
        """The rows of one split, by number."""
        row_length = manifest["settings"]["seq_len"] + 1
        return Rows(self.folder / split, row_length, manifest["splits"][split]["rows"])


class CachedCorpus(PreparedFolder):
    """A corpus that is prepared on first use, in a folder of the cache named after its recipe."""

    way_out = "Delete that folder and start again"

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, settings: PrepareSettings, cache: Path) -> None:
        super().__init__(cache, asdict(settings), tokenizer)
        self._recipe = (corpus, tokenizer, settings)

    @cached_property
    def folder(self) -> Path:
        # Cached, since the name depends on every source file.
        return self.place / cache_name(*self._recipe)

    def prepare(self, progress: bool) -> None:
        prepare(*self._recipe, self.folder, progress=progress)
