"""A checkpoint in the format of the paper authors' public code, written from its description alone.

Shapes are as in forward.py. `tensors` gives the content of the files and the same tensors in forward.py's form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.reference import forward

INJECTIONS = {
    "inject_init_prelude": forward.linear,
    "additive": forward.additive,
    "passthrough": forward.passthrough,
    "hyperconnect": forward.passthrough,
}


def model_config(injection: str, **changes: Any) -> dict[str, Any]:
    """Three heads of 64 with one key/value head, layout (2,2,1)x3, 70 tokens (128 padded)."""
    return {
        "sequence_len": 16, "vocab_size": 70, "size": 3, "n_head": 3, "n_kv_head": 1, "n_embd": 192, "n_prelude": 2,
        "n_recur_block": 2, "n_coda": 1, "num_recur": 3, "bptt_k": None, "input_injection": injection,
        "num_lanes": 2 if injection == "hyperconnect" else 1, "logit_softcap": 15.0, **changes,
    }  # fmt: skip


def tensors(config: dict[str, Any], seed: int = 0) -> tuple[dict[str, Tensor], forward.Weights]:
    """Random tensors under the names of the authors' code, and the same tensors in forward.py's form."""
    generator = torch.Generator().manual_seed(seed)
    d, r, k = config["n_embd"], config["num_recur"], config["num_lanes"]
    kv = d * config["n_kv_head"] // config["n_head"]
    padded = -(-config["vocab_size"] // 64) * 64

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def scale() -> Tensor:
        return 1 + 0.2 * torch.randn(d, generator=generator)

    files: dict[str, Tensor] = {}
    weights: forward.Weights = {}
    for theirs, ours, count in (
        ("prelude", "prelude", "n_prelude"),
        ("recur", "block", "n_recur_block"),
        ("coda", "coda", "n_coda"),
    ):
        weights[ours] = []
        for i in range(config[count]):
            layer = {
                "q": matrix(d, d), "k": matrix(kv, d), "v": matrix(kv, d), "out": matrix(d, d),
                "mlp_in": matrix(4 * d, d), "mlp_out": matrix(d, 4 * d), "norm_attn": scale(), "norm_mlp": scale(),
            }  # fmt: skip
            weights[ours].append(layer)
            prefix = f"transformer.{theirs}.{i}"
            files[f"{prefix}.attn.c_q.weight"] = layer["q"]
            files[f"{prefix}.attn.c_k.weight"] = layer["k"]
            files[f"{prefix}.attn.c_v.weight"] = layer["v"]
            files[f"{prefix}.attn.c_proj.weight"] = layer["out"]
            files[f"{prefix}.mlp.c_fc.weight"] = layer["mlp_in"]
            files[f"{prefix}.mlp.c_proj.weight"] = layer["mlp_out"]
            files[f"{prefix}.n1.weight"] = layer["norm_attn"]
            files[f"{prefix}.n3.weight"] = layer["norm_mlp"]
    weights["embedding"], weights["head"] = matrix(padded, d) * d**0.5, matrix(padded, d)
    files["transformer.wte.weight"], files["lm_head.weight"] = weights["embedding"], weights["head"]
    for name in ("norm_emb", "norm_recur", "norm_final"):
        weights[name] = scale()
        files[f"{name}.weight"] = weights[name]
    weights["inject"] = None
    if config["input_injection"] == "inject_init_prelude":
        weights["inject"] = files["inject.weight"] = matrix(d, 2 * d)
    if config["input_injection"] == "hyperconnect":
        for name, shape in (("lane_alpha", (r, k)), ("lane_mixing", (r, k, k)), ("lane_beta", (r, k))):
            weights[name] = files[name] = torch.randn(shape, generator=generator)
    return files, weights


def write(folder: Path, config: dict[str, Any], files: dict[str, Tensor], step: int = 1200) -> Path:
    """Put the two files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(files, folder / f"model_{step:06d}.pt")
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": config}))
    return folder


def logits(config: dict[str, Any], weights: forward.Weights, tokens: Tensor) -> Tensor:
    """Logits (B,T,V) by the plain re-implementation."""
    _, out = forward.forward(
        weights,
        tokens,
        tokens,
        head_dim=config["n_embd"] // config["n_head"],
        num_recurrences=config["num_recur"],
        injection=INJECTIONS[config["input_injection"]],
        vocab_size=config["vocab_size"],
        softcap=config["logit_softcap"],
        bf16_tables=True,
    )
    return out
