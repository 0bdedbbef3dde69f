"""How text becomes token ids: the base class of tokenizers, and those that need no file."""

from __future__ import annotations

import hashlib
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datamodules.errors import DataError
from datamodules.files import read_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Ids = NDArray[np.int64]


class Tokenizer(ABC):
    """Base of all tokenizers: subclass it (deterministic, picklable) and name your class by class_path."""

    vocab_size: int
    """Ids are in [0, vocab_size). Known at construction; an upper bound if `train` is needed."""
    bos_id: int
    """The id put before every document; no text gives it."""
    needs_training: bool = False
    """Whether `train` must be called before anything can be encoded. Preparation calls it."""
    train_characters: int = 0
    """Characters of training documents that `train` gets; 0 if nothing is trained."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name for folders, records and messages."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON-able identity, for cache and manifest: class_path and whatever decides the ids."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, without BOS."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, with BOS shown where it occurs."""

    @abstractmethod
    def serialized(self) -> tuple[str, bytes]:
        """(file name, content) to store beside the data and to hash."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Tokenizer:
        """The tokenizer stored in a prepared folder, with the `settings` in its manifest."""

    def train(self, documents: Iterable[str], progress: bool = False) -> None:
        """Learn the vocabulary from the documents; called only if `needs_training`."""
        raise NotImplementedError(f"{type(self).__name__} is not trained on the corpus")

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the stored form: equal fingerprints mean equal ids for equal text."""
        return hashlib.sha256(self.serialized()[1]).hexdigest()


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids 0 to 255, and BOS as 256: a vocabulary of 257 ids."""

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
    """Base of the tokenizers that are a tokenizer.json: a backend of the `tokenizers` library."""

    _backend: Backend | None = None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        backend = self._ready()
        # Otherwise the thread pool warns at every later fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._ready().decode([int(i) for i in ids], skip_special_tokens=False)

    def _ready(self) -> Backend:
        if self._backend is None:
            raise DataError(
                f"the tokenizer {self.name} has not been trained yet: it gets its vocabulary when data is "
                "prepared, by `python -m datamodules prepare` or at the start of a training run"
            )
        return self._backend

    def adopt(self, backend: Backend) -> None:
        """Use this backend from now on."""
        # Otherwise a document that contains the text of a special token would give its id.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend


class BPETokenizer(JSONTokenizer):
    """Byte-level BPE, trained on the training documents of the corpus; lossless; BOS is id 0.

    Args:
        vocab_size: number of ids at most, with BOS and the 256 bytes (DataError below 257); a small corpus may
            give fewer.
        train_characters: characters of training documents to learn from, taken from units in a seeded order.
            More of them cost more time than they are worth.
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
        tokenizer = cls(settings["vocab_size"], settings["train_characters"])
        path = folder / "tokenizer.json"
        tokenizer.adopt(json_backend(path, read_bytes(str(path))))
        return tokenizer


def json_backend(path: Path, content: bytes) -> Backend:
    """The backend that a tokenizer.json holds. DataError, naming `path`: the content is something else."""
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise DataError(f"{path} is not a tokenizer.json of the tokenizers library: {error}") from error


def load_tokenizer(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer stored in a prepared folder. DataError: its class cannot be found."""
    class_path = settings["class_path"]
    module, _, name = class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module or "builtins"), name, None)
    except ModuleNotFoundError as error:
        raise DataError(
            f"cannot import the tokenizer {class_path} of {folder}: {error}. Make it importable where this runs"
        ) from error
    if cls is None:
        raise DataError(f"cannot import the tokenizer {class_path} of {folder}: {module} has no {name}")
    return cls.load(folder, settings)
