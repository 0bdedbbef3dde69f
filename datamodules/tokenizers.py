"""Tokenizers: text to token ids and back, always with a BOS token that stands before each document.

Here the base class and those that need no file; pretrained.py has those that come as one.

A tokenizer here is a plain object with a known vocabulary size, so that a model can be built before any data
is touched; one that is trained on the corpus (`needs_training`) gets its documents later, during preparation.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datamodules.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Ids = NDArray[np.int64]


class Tokenizer(ABC):
    """Base of all tokenizers: subclass it and name your class by class_path.

    A subclass must be picklable (preparation hands it to worker processes) and deterministic.
    """

    vocab_size: int
    """Ids lie in [0, vocab_size); for a trained tokenizer an upper bound. Known at construction."""
    bos_id: int
    """The id put before every document; it is never produced from text."""
    needs_training: bool = False
    train_characters: int = 0
    """Characters of training documents to hand to `train`; 0 where there is nothing to train."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for folders, records and messages."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON-able identity: class_path and what decides the ids. Part of the cache key and of the
        manifest."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, without BOS."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, BOS shown where it stands."""

    @abstractmethod
    def serialized(self) -> tuple[str, bytes]:
        """(file name, content) that is stored beside the data and hashed."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Tokenizer:
        """The tokenizer stored in a prepared folder; `settings` as in its manifest."""

    def train(self, documents: Iterable[str], progress: bool = False) -> None:
        """Learn the vocabulary from the documents; only where `needs_training`."""
        raise NotImplementedError(f"{type(self).__name__} is not trained on the corpus")

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the stored form: equal fingerprints mean equal ids for equal text."""
        return hashlib.sha256(self.serialized()[1]).hexdigest()


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0-255; BOS is 256; vocabulary 257."""

    vocab_size = 257
    bos_id = 256
    name = "bytes"

    def settings(self) -> dict[str, Any]:
        return {"class_path": "datamodules.ByteTokenizer"}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = bytearray()
        for token in ids:
            pieces += b"<|bos|>" if token == self.bos_id else bytes((int(token),))
        return pieces.decode(errors="replace")

    def serialized(self) -> tuple[str, bytes]:
        return "tokenizer.txt", b"UTF-8 bytes 0-255, BOS 256\n"

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Tokenizer:
        return cls()


class JSONTokenizer(Tokenizer):
    """What the trained and the given tokenizer.json share: a backend of the `tokenizers` library."""

    _backend: Backend | None = None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        backend = self._ready()
        # The backend's own thread pool warns at every later fork unless told what to do; workers of a
        # preparation set this to "false", since they are the parallelism.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._ready().decode([int(i) for i in ids], skip_special_tokens=False)

    def _ready(self) -> Backend:
        if self._backend is None:
            raise DataError(
                f"the tokenizer {self.name} has not been trained yet: it gets its vocabulary when the data "
                "is prepared (`python -m datamodules prepare`, or the start of a training run)"
            )
        return self._backend

    def adopt(self, backend: Backend) -> None:
        """Use this backend from now on."""
        # Otherwise a document that contains the literal text of a special token would inject its id.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend


class BPETokenizer(JSONTokenizer):
    """Byte-level BPE trained on the training documents of the corpus; lossless; BOS is id 0.

    Args:
        vocab_size: ids at most, BOS and the 256 bytes included; a small corpus may give fewer.
        train_characters: characters of training documents it learns from. They are taken from parts of the
            corpus in a seeded order until the number is reached: training on everything costs more time than
                it gains.

    Raises:
        DataError: vocab_size below 257 or train_characters below 1.
    """

    bos_id = 0
    needs_training = True
    _BOS = "<|bos|>"

    def __init__(self, vocab_size: int = 1024, train_characters: int = 8_000_000) -> None:
        if vocab_size < 257:
            raise DataError(f"BPETokenizer(vocab_size={vocab_size}): 256 bytes and BOS need at least 257 ids")
        if train_characters < 1:
            raise DataError(f"BPETokenizer(train_characters={train_characters}): it must be at least 1")
        self.vocab_size = vocab_size
        self.train_characters = train_characters

    @property
    def name(self) -> str:
        return f"bpe{self.vocab_size}"

    def settings(self) -> dict[str, Any]:
        return {
            "class_path": "datamodules.BPETokenizer",
            "vocab_size": self.vocab_size,
            "train_characters": self.train_characters,
        }

    def train(self, documents: Iterable[str], progress: bool = False) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, trainers

        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[self._BOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=progress,
        )
        backend.train_from_iterator(documents, trainer)
        self.adopt(backend)

    def serialized(self) -> tuple[str, bytes]:
        return "tokenizer.json", self._ready().to_str().encode()

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Tokenizer:
        from tokenizers import Tokenizer as Backend

        tokenizer = cls(settings["vocab_size"], settings["train_characters"])
        tokenizer.adopt(Backend.from_file(str(folder / "tokenizer.json")))
        return tokenizer


def load_tokenizer(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer stored in a prepared folder; `settings` as in its manifest.

    Raises:
        DataError: its class cannot be imported.
    """
    import importlib

    module, _, name = settings["class_path"].rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(
            f"cannot import the tokenizer {settings['class_path']} of {folder}: {error}"
        ) from error
    return cls.load(folder, settings)
