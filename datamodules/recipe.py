"""The recipe of prepared data, and the name it gives to a folder in the cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from datamodules.corpora import Corpus
from datamodules.settings import FORMAT, PrepareSettings, sha256_of
from datamodules.tokenizers import Tokenizer


def recipe(corpus: Corpus, tokenizer: Tokenizer, settings: PrepareSettings) -> dict[str, Any]:
    """All settings that decide the result, JSON-able; the content of the sources is not among them."""
    return {
        "format": FORMAT,
        "corpus": corpus.settings(),
        "tokenizer": tokenizer.settings(),
        "settings": settings.as_dict(),
    }


def default_cache_dir() -> Path:
    """LOOPED_LM_CACHE if set, else `looped_lm` in the user's cache folder (XDG_CACHE_HOME or ~/.cache)."""
    own = os.environ.get("LOOPED_LM_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "looped_lm"


def cache_name(corpus: Corpus, tokenizer: Tokenizer, settings: PrepareSettings) -> str:
    """Folder name for a cache: readable, and different whenever a setting or the state of the sources
    differs."""
    key = sha256_of([recipe(corpus, tokenizer, settings), corpus.stamp()])[:12]
    return f"{corpus.name}-{tokenizer.name}-T{settings.seq_len}-{key}"
