"""Text -> packed rows of tokens -> batches.

`corpora` and `tabular` read documents, `tokenizers` and `tokenizer_files` turn them into ids, `prepare` packs
these into rows on disk, and `token_data_module` reads them in the order that `position` gives. Names load on first
use (PEP 562), since torch takes seconds to import.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from typing import Any

_NAMES = {
    "token_data_module": ["TokenDataModule"],
    "tokenizers": ["Tokenizer", "ByteTokenizer", "BPETokenizer"],
    "tokenizer_files": ["FileTokenizer", "HubTokenizer", "SentencePieceTokenizer"],
    "corpora": ["Corpus", "Unit", "StdlibCorpus", "TextFiles"],
    "tabular": ["JSONLines", "ParquetFiles", "HuggingFaceDataset"],
    "errors": ["DataError"],
    "recipe": ["PrepareSettings"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)

#: Modules by the names they had in version 0.1.0, which users' YAML and code may still hold.
_RENAMED = {
    "datamodules.records": "datamodules.tabular",
    "datamodules.pretrained": "datamodules.tokenizer_files",
    "datamodules.settings": "datamodules.recipe",
    "datamodules.tokens": "datamodules.token_data_module",
}


class _EarlierNames:
    """Finder and loader that give today's module under its earlier name."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in _RENAMED else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        """None: the import system makes a module, which `exec_module` replaces."""

    def exec_module(self, module: Any) -> None:
        # The import system then hands out what it finds here.
        sys.modules[module.__name__] = importlib.import_module(_RENAMED[module.__name__])


sys.meta_path.append(_EarlierNames())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'datamodules' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"datamodules.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
