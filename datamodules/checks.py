"""Does prepared data fit what is asked of it?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datamodules.corpora import Corpus
from datamodules.errors import DataError
from datamodules.manifest import same
from datamodules.tokenizers import Tokenizer


def check_recipe(
    folder: Path,
    manifest: dict[str, Any],
    asked: dict[str, Any],
    tokenizer: Tokenizer | None,
    corpus: Corpus | None,
    vocab_size: int,
) -> None:
    """Refuse prepared data whose recipe disagrees with what is asked, naming both values.

    Args:
        asked: preparation settings that were given a value, by their name in the manifest.
        tokenizer, corpus: compared by their settings; None where none was asked for.
        vocab_size: ids that the model has.

    Raises:
        DataError: something disagrees.
    """
    stored = manifest["settings"]
    for key, value in asked.items():
        if stored[key] != value:
            name = "prepare_seed" if key == "seed" else key
            raise DataError(
                f"{name} is {value}, but the data in {folder} was prepared with {stored[key]}: use that "
                "value, or prepare other data"
            )
    there = manifest["tokenizer"]
    if tokenizer is not None and not same(tokenizer.settings(), there["settings"]):
        raise DataError(
            f"the tokenizer is {tokenizer.settings()}, but the data in {folder} was prepared with "
            f"{there['settings']}: leave the tokenizer out to use that one, or prepare other data"
        )
    if corpus is not None and not same(corpus.settings(), manifest["corpus"]):
        raise DataError(
            f"the corpus is {corpus.settings()}, but the data in {folder} was prepared from "
            f"{manifest['corpus']}: leave the corpus out to use that one, or leave data_dir out to prepare "
            "yours"
        )
    if there["vocab_size"] > vocab_size:
        raise DataError(
            f"vocab_size is {vocab_size}, but the tokenizer {there['name']} of {folder} has "
            f"{there['vocab_size']} ids: raise vocab_size to that at least, or leave it out"
        )
