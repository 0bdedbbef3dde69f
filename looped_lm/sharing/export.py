"""A model as a folder to share: model.safetensors, config.json and, where known, its tokenizer's file.

Reading it needs neither Lightning nor pickle. config.json names every component by class path, so a user's own
components must be installed where the folder is read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from looped_lm.common.writing import new_folder
from looped_lm.model.transformer import LoopedTransformer

FORMAT, VERSION = "looped_lm", 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def sha256(tokenizer: Any) -> str:
    """Hash (hex) of a tokenizer's stored form: equal hashes mean equal ids for equal text."""
    return hashlib.sha256(tokenizer.serialized()[1]).hexdigest()


def save_pretrained(model: LoopedTransformer, folder: str | Path, tokenizer: Any = None) -> Path:
    """Write the folder, whole or not at all. Weights keep their dtype.

    Args:
        model: the model.
        folder: must not exist.
        tokenizer: as `load.TextTokenizer` describes; None: the folder has none.

    Raises:
        UserError: there is something at `folder`.
        OSError: the folder cannot be written.
    """
    from safetensors import SafetensorError
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
        # safetensors writes a tensor's storage as it is in memory, so it must be contiguous.
        tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
        try:
            save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            # Only the text of the error has the system's reason.
            raise OSError(str(error)) from error
    return folder
