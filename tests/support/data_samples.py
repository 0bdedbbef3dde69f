"""Small corpora for the data tests, made up from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datamodules import ByteTokenizer, PrepareSettings
from datamodules.corpora import Corpus, Unit
from datamodules.prepare import prepare
from datamodules.storage import Rows

WORDS = "loop depth width token row lane once again more less alpha beta".split()


def made_up_texts(count: int, seed: int = 0, words: int = 30) -> list[str]:
    """Texts of random words; no two are equal, since each begins with its number."""
    rng = random.Random(seed)
    return [
        f"{i}: " + " ".join(rng.choices(WORDS, k=1 + int(rng.expovariate(1 / words)))) for i in range(count)
    ]


class ListCorpus(Corpus):
    """Texts from memory, `per_unit` to a unit."""

    name = "list"

    def __init__(self, texts: list[str], per_unit: int = 10) -> None:
        self.texts = texts
        self.per_unit = per_unit

    def settings(self) -> dict[str, Any]:
        return {"class_path": "data_samples.ListCorpus", "count": len(self.texts)}

    def units(self) -> list[Unit]:
        return [
            Unit(f"from {i}", tuple(self.texts[i : i + self.per_unit]))
            for i in range(0, len(self.texts), self.per_unit)
        ]

    def documents(self, unit: Unit) -> Iterator[str]:
        yield from unit.content

    def stamp(self) -> str:
        return ""


def write_texts(folder: Path, texts: list[str]) -> Path:
    """One file per text; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i:04d}.txt").write_text(text)
    return folder


def prepared(folder: Path, count: int = 200, **settings: Any) -> dict[str, Any]:
    """A small data set of bytes; returns its manifest."""
    recipe = PrepareSettings(**{"seq_len": 16, "val_fraction": 0.2, **settings})
    return prepare(ListCorpus(made_up_texts(count)), ByteTokenizer(), recipe, folder, progress=False)


def iterate_rows(folder: Path, row_length: int, num_rows: int) -> Iterator[Any]:
    """All rows of a split in stored order, each (T + 1,)."""
    rows = Rows(folder, row_length, num_rows)
    for row in range(num_rows):
        yield rows[row]
