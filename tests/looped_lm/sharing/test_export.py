"""Export and loading back, without Lightning."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from datamodules import ByteTokenizer
from looped_lm import (
    HyperConnectionLanes,
    LoopedTransformer,
    PassthroughInjection,
    ScaledResidual,
    TruncatedBPTT,
)
from looped_lm.common.errors import UserError
from looped_lm.sharing.export import save_pretrained
from looped_lm.sharing.load import load_pretrained, load_tokenizer
from tests.support.tiny import perturb, tiny_model, tokens

MODELS: dict[str, dict[str, Any]] = {
    "linear": {"bptt": TruncatedBPTT(1), "n_kv_heads": 2, "rope_bf16": True, "logit_softcap": 20.0},
    "lanes": {
        "injection": PassthroughInjection,
        "lanes": partial(HyperConnectionLanes, num_lanes=3),
        "residual": partial(ScaledResidual, gain=0.5),
        "head_dim": 24,
        "size": 1.5,
    },
}


def exported(folder: Path, name: str = "linear") -> tuple[LoopedTransformer, Path]:
    model = tiny_model(**MODELS[name])
    perturb(model)
    return model, save_pretrained(model, folder / "model", ByteTokenizer())


def edit(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    model, folder = exported(tmp_path, name)
    assert {f.name for f in tmp_path.iterdir()} == {"model"}, "nothing is left aside"
    again = LoopedTransformer.from_pretrained(folder)
    inputs, _ = tokens()
    assert torch.equal(again(inputs), model(inputs))
    assert again.bptt.keeps_grad(0, 2) is model.bptt.keeps_grad(0, 2)
    assert all(p.requires_grad for p in again.parameters())
    save_pretrained(again, tmp_path / "again", ByteTokenizer())
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_weights_keep_their_precision(tmp_path: Path) -> None:
    model = tiny_model()
    model.embedding.to(torch.bfloat16)
    save_pretrained(model, tmp_path / "m")
    assert load_file(tmp_path / "m" / "model.safetensors")["embedding.weight"].dtype is torch.bfloat16
    again = load_pretrained(tmp_path / "m", recompute=True)
    assert again.embedding.weight.dtype is torch.bfloat16 and again.recompute


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    _, folder = exported(tmp_path)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(["schöne Grüße"])[0]) == "schöne Grüße"
    save_pretrained(tiny_model(), tmp_path / "bare")
    with pytest.raises(ValueError, match="without a tokenizer.*--tokenizer"):
        load_tokenizer(tmp_path / "bare")


def test_reading_needs_no_lightning(tmp_path: Path) -> None:
    _, folder = exported(tmp_path)
    script = (
        "import sys; sys.modules['lightning'] = None\n"
        "from looped_lm import LoopedTransformer\n"
        "import torch\n"
        "LoopedTransformer.from_pretrained(sys.argv[1])(torch.tensor([[1, 2]]))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    model, folder = exported(tmp_path)
    with pytest.raises(UserError, match="nothing is overwritten"):
        save_pretrained(model, folder)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(model, tmp_path / "other")
    assert {f.name for f in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda c: c.update(format_version=2), "format version 2"),
        (lambda c: c.update(format="other"), "format is not"),
        (lambda c: c["architecture"].update(width=3), "unknown keys ..width"),
        (lambda c: c["architecture"].pop("lanes"), "lacks ..lanes"),
        (lambda c: c["architecture"].update(recurrent_layers=2), "block.1.attn.k.weight: only in the model"),
        (lambda c: c["architecture"].update(n_kv_heads=4), r"attn.k.weight: \(32, 64\) in the checkpoint, \(64, 64\)"),
        (
            lambda c: c["architecture"]["injection"].update(class_path="os.system"),
            "'os.system', which is not a subclass of Injection",
        ),
        (lambda c: c["architecture"]["lanes"].update(class_path="nobody.Lanes"), "cannot import module 'nobody'"),
        (
            lambda c: c["architecture"]["lanes"]["init_args"].update(x=[{"class_path": "os.getcwd"}]),
            "'os.getcwd', which is not a subclass of Component",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    _, folder = exported(tmp_path)
    edit(folder, change)
    with pytest.raises(ValueError, match=says):
        LoopedTransformer.from_pretrained(folder)


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not an exported model.*looped_lm export"):
        LoopedTransformer.from_pretrained(tmp_path)
    _, folder = exported(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        LoopedTransformer.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        LoopedTransformer.from_pretrained(folder)
