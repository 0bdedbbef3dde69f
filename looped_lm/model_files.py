"""A trained model and its tokenizer, from a checkpoint or from an exported folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from looped_lm.checkpoints import look, verify
from looped_lm.component import as_instance, import_class
from looped_lm.pretrained import load_pretrained, read_config
from looped_lm.transformer import LoopedTransformer


class TextTokenizer(Protocol):
    """What is needed of a tokenizer; `datamodules.Tokenizer` has it."""

    vocab_size: int
    bos_id: int

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Ids of each text, without BOS."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids."""

    def serialized(self) -> tuple[str, bytes]:
        """(file name, content) of its stored form."""

    def settings(self) -> dict[str, Any]:
        """class_path and what else its class's `load(folder, settings)` needs."""


def load_model(path: str | Path) -> LoopedTransformer:
    """The model of a checkpoint, or of a folder written by `export`, on the CPU.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: it is neither.
    """
    path = Path(path)
    if path.is_dir():
        return load_pretrained(path).eval()
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is neither a checkpoint nor a folder written by `python -m looped_lm export`."
        )
    look(path)
    verify(path)
    from looped_lm.lightning_module import LoopedLM

    return LoopedLM.load_from_checkpoint(path, map_location="cpu").model.eval()


def load_tokenizer(path: str | Path, given: str | None = None) -> TextTokenizer:
    """The tokenizer that a model was trained with.

    Args:
        path: checkpoint or exported folder. A checkpoint names its data in the run record, and the data its tokenizer;
            the embedded corpus is prepared first where it is not there yet.
        given: class path of another, or class_path and init_args as YAML.

    Raises:
        ValueError: there is none to be found.
    """
    if given is not None:
        spec = yaml.safe_load(given)
        return as_instance({"class_path": spec} if isinstance(spec, str) else spec)
    way_out = (
        "Name one by --tokenizer, such as datamodules.ByteTokenizer or "
        "'{class_path: datamodules.FileTokenizer, init_args: {path: tokenizer.json}}'."
    )
    path = Path(path)
    if path.is_dir():
        settings = read_config(path).get("tokenizer")
        if settings is None:
            raise ValueError(f"{path} was exported without a tokenizer. {way_out}")
        return import_class(settings["class_path"]).load(path, settings)
    config = look(path).record.get("config") or {}
    if not (config.get("data") or {}).get("class_path"):
        raise ValueError(
            f"{path} does not say what data it was trained on, so its tokenizer is unknown. {way_out}"
        )
    data = as_instance(config["data"])
    if not hasattr(data, "load_tokenizer"):
        raise ValueError(f"{path} was trained on {type(data).__name__}, which knows no tokenizer. {way_out}")
    try:
        data.prepare_data()
        data.setup("predict")
        return data.load_tokenizer()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"The data that {path} was trained on is not at hand ({error}). {way_out}"
        ) from error
