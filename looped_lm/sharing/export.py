"""A model as a folder to share: model.safetensors, config.json and, where known, its tokenizer's file.

Neither Lightning nor a pickle is needed to read it. config.json names every component by class path, so the package of
a user's own component must be installed where the folder is read.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looped_lm.common.errors import UserError
from looped_lm.common.writing import new_folder
from looped_lm.loop.component import Component, Spec, import_class
from looped_lm.model.transformer import LoopedTransformer
from looped_lm.runs.checkpoint import compare_tensors
from looped_lm.seams import SEAMS, before

FORMAT, VERSION = "looped_lm", 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def sha256(tokenizer: Any) -> str:
    """Of a tokenizer's stored form (hex): equal ones make equal ids of equal text."""
    return hashlib.sha256(tokenizer.serialized()[1]).hexdigest()


def save_pretrained(model: LoopedTransformer, folder: str | Path, tokenizer: Any = None) -> Path:
    """Write the folder, whole or not at all. Weights keep their dtype.

    Args:
        model: the model.
        folder: must not exist.
        tokenizer: an object with `serialized()` (file name, content) and `settings()` (class_path and more), as
            `datamodules.Tokenizer` has; None: the folder has none.

    Raises:
        UserError: there is something at `folder`.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    config: dict[str, Any] = {
        "format": FORMAT,
        "format_version": VERSION,
        "architecture": model.architecture(),
    }
    files: dict[str, bytes] = {}
    if tokenizer is not None:
        name, content = tokenizer.serialized()
        config["tokenizer"] = {**tokenizer.settings(), "sha256": sha256(tokenizer)}
        files[name] = content
    files[CONFIG] = (json.dumps(config, indent=2, allow_nan=False) + "\n").encode()
    with new_folder(folder) as aside:
        for name, content in files.items():
            (aside / name).write_bytes(content)
        # safetensors writes a tensor's storage as it is in memory.
        tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
    return folder


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder that `save_pretrained` wrote.

    Raises:
        UserError: no such folder, or of another format or version.
    """
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} is no exported model: its {CONFIG} cannot be read ({error}). `python -m looped_lm export` "
            "writes such folders."
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise UserError(f"{path} does not describe a model of looped_lm: its format is not {FORMAT!r}.")
    if config.get("format_version") != VERSION:
        raise UserError(
            f"{path} has format version {config.get('format_version')!r}; this version of looped_lm reads {VERSION}."
        )
    return config


def load_pretrained(folder: str | Path, **overrides: Any) -> LoopedTransformer:
    """The model in a folder that `save_pretrained` wrote, on the CPU, with the dtypes it was saved with.

    Args:
        folder: the folder.
        overrides: arguments of LoopedTransformer that change nothing in the weights (recompute, bptt, ...).

    Raises:
        UserError: no such folder, arguments or components that are not known here, or weights of another architecture.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    arguments = {**_architecture(Path(folder)), **overrides}
    path = Path(folder) / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}. Copy or export the folder again.") from error
    model = LoopedTransformer(**arguments)
    compare_tensors(
        tensors,
        model.state_dict(),
        f"{CONFIG} and {WEIGHTS} of {folder} do not belong together; export the model again.",
    )
    model.load_state_dict(tensors, assign=True)
    return model


def _architecture(folder: Path) -> dict[str, Any]:
    stored = read_config(folder).get("architecture")
    known = set(inspect.signature(LoopedTransformer).parameters)
    given = set(stored) if isinstance(stored, dict) else set()
    later = {key: spec for key, spec in before().items() if key in known}
    if not isinstance(stored, dict) or not known - set(later) <= given <= known:
        raise UserError(
            f"{folder / CONFIG}: the architecture has unknown keys {sorted(given - known)} and lacks "
            f"{sorted(known - set(later) - given)}. Read it with the version of looped_lm that wrote it."
        )
    stored = {**later, **stored}
    for key, seam in SEAMS.items():
        if key in stored:
            refuse_foreign(stored[key], seam.base, f"{folder / CONFIG}: {key}")
    return stored


def refuse_foreign(spec: Spec | Any, base: type, where: str) -> None:
    """Refuse a class path that names no component: a shared file must not make us call just anything.

    Raises:
        UserError: naming the class path.
    """
    path = spec.get("class_path") if isinstance(spec, Mapping) else None
    found = import_class(path) if isinstance(path, str) else None
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise UserError(f"{where} is {path!r}, which is no {base.__name__}.")
    for value in _nested(spec.get("init_args") or {}):
        refuse_foreign(value, Component, f"{where}, an argument of {path},")


def _nested(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if "class_path" in value:
            return [value]
        return [spec for v in value.values() for spec in _nested(v)]
    return [spec for v in value for spec in _nested(v)] if isinstance(value, list) else []
