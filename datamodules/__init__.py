"""Text -> packed rows of tokens -> batches.

The public names are resolved on first use (PEP 562), so importing this package costs nothing: neither torch
nor lightning nor litdata is loaded until a name that needs them is touched.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "TokenDataModule": "tokens",
    "Tokenizer": "tokenizers",
    "ByteTokenizer": "tokenizers",
    "BPETokenizer": "tokenizers",
    "FileTokenizer": "pretrained",
    "HubTokenizer": "pretrained",
    "SentencePieceTokenizer": "pretrained",
    "Corpus": "corpora",
    "Unit": "corpora",
    "StdlibCorpus": "corpora",
    "TextFiles": "corpora",
    "JSONLines": "records",
    "ParquetFiles": "records",
    "HuggingFaceDataset": "records",
    "DataError": "errors",
    "PrepareSettings": "settings",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'datamodules' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = importlib.import_module(f"datamodules.{_HOME[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
