"""Tokenizers that come as a file: a tokenizer.json or a sentencepiece model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.errors import DataError, import_extra
from datamodules.files import read_bytes
from datamodules.tokenizers import Ids, JSONTokenizer, Tokenizer, json_backend


class FileTokenizer(JSONTokenizer):
    """Any tokenizer.json of the `tokenizers` library.

    Args:
        bos_token: the token to put before documents, as text. None: the first that the file has of <s>,
            <|bos|>, <bos>, <|begin_of_text|>, [BOS], <|endoftext|> and [CLS].

    Raises:
        DataError: the file is missing or not a tokenizer.json, or it has no such BOS token.
    """

    _USUAL = ("<s>", "<|bos|>", "<bos>", "<|begin_of_text|>", "[BOS]", "<|endoftext|>", "[CLS]")

    def __init__(self, path: str | os.PathLike[str], bos_token: str | None = None) -> None:
        self.path = Path(path)
        self._content = _content_of(self.path)
        backend = json_backend(self.path, self._content)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        wanted = self._USUAL if bos_token is None else (bos_token,)
        found = [token for token in wanted if token in vocabulary]
        if not found:
            special = sorted(t.content for t in backend.get_added_tokens_decoder().values())
            raise DataError(
                f"{self.path} has no BOS token {' or '.join(map(repr, wanted))}; name one by bos_token. Its "
                f"special tokens are: {', '.join(special[:20]) or 'none'}"
            )
        self.bos_token = found[0]
        self.bos_id = vocabulary[self.bos_token]
        self.vocab_size = max(vocabulary.values()) + 1
        self.adopt(backend)

    @property
    def name(self) -> str:
        return f"tokenizer-{self.fingerprint()[:8]}"

    def settings(self) -> dict[str, Any]:
        return {
            "class_path": "datamodules.FileTokenizer",
            "sha256": self.fingerprint(),
            "bos_token": self.bos_token,
        }

    def serialized(self) -> tuple[str, bytes]:
        return "tokenizer.json", self._content

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Tokenizer:
        return cls(folder / "tokenizer.json", settings["bos_token"])


class HubTokenizer(FileTokenizer):
    """The tokenizer.json of a Hugging Face repository, kept in the hub's own cache.

    Args:
        repository: such as `HuggingFaceTB/SmolLM2-135M`.
        revision: commit, branch or tag.
        bos_token: see FileTokenizer.

    Raises:
        DataError: the file cannot be fetched, or see FileTokenizer.
    """

    def __init__(self, repository: str, revision: str | None = None, bos_token: str | None = None) -> None:
        # It comes with the tokenizers library, and takes a while to import.
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(repository, "tokenizer.json", revision=revision)
        except Exception as error:  # unknown names, missing rights, no network: many types
            raise DataError(
                f"cannot fetch tokenizer.json of {repository!r}: {type(error).__name__}: {error}. Without a "
                "network, give the file to FileTokenizer"
            ) from error
        super().__init__(path, bos_token)


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece .model, such as that of Llama 2 (extra `data`).

    Raises:
        DataError: the file is missing or not a model, has no BOS piece, or sentencepiece is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._content = _content_of(self.path, "sentencepiece .model")
        self._processor = self._open()
        self.vocab_size = self._processor.get_piece_size()
        self.bos_id = self._processor.bos_id()
        if self.bos_id < 0:
            raise DataError(
                f"{self.path} was trained without a BOS piece, which separates documents: give another model"
            )

    def _open(self) -> Any:
        sentencepiece = import_extra("sentencepiece", f"{self.path} needs")
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=self._content)
        except Exception as error:  # the library raises RuntimeError or its own types by version
            raise DataError(f"{self.path} is not a sentencepiece model: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_processor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._processor = self._open()

    @property
    def name(self) -> str:
        return f"sentencepiece-{self.fingerprint()[:8]}"

    def settings(self) -> dict[str, Any]:
        return {"class_path": "datamodules.SentencePieceTokenizer", "sha256": self.fingerprint()}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        threads = 1 if os.environ.get("TOKENIZERS_PARALLELISM") == "false" else -1
        # No text can give BOS: sentencepiece reads control symbols in a text as plain text.
        encoded = self._processor.encode(list(texts), num_threads=threads)
        return [np.asarray(ids, dtype=np.int64) for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token in [*map(int, ids), self.bos_id]:
            if token != self.bos_id:
                run.append(token)
                continue
            parts.append(self._processor.decode(run))
            run = []
        return self._processor.id_to_piece(self.bos_id).join(parts)

    def serialized(self) -> tuple[str, bytes]:
        return "tokenizer.model", self._content

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any]) -> Tokenizer:
        return cls(folder / "tokenizer.model")


def _content_of(path: Path, kind: str = "tokenizer.json") -> bytes:
    if not path.is_file():
        raise DataError(f"no tokenizer file at {path}: give the path of a {kind}")
    return read_bytes(str(path))
