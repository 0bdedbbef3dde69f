"""Checkpoints of the paper authors' public code (arXiv 2604.21106): names of tensors and keys of model_config.

Tensors keep their bytes and their dtype. That code rounds the rotary tables to bfloat16, so a model converted from it
does the same (`rope_bf16`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from looped_lm.common.errors import UserError
from looped_lm.loop.bptt import FullBPTT, TruncatedBPTT
from looped_lm.loop.component import Spec
from looped_lm.loop.injection import AdditiveInjection, Injection, LinearInjection, PassthroughInjection
from looped_lm.loop.lanes import HyperConnectionLanes, Lanes, SingleLane
from looped_lm.model.transformer import LoopedTransformer, size_of
from looped_lm.seams import SEAMS, components

_COMPILED = "_orig_mod."
_SECTIONS = {"prelude": "prelude", "block": "recur", "coda": "coda"}
_IN_LAYER = {
    "attn.q.weight": "attn.c_q.weight",
    "attn.k.weight": "attn.c_k.weight",
    "attn.v.weight": "attn.c_v.weight",
    "attn.out.weight": "attn.c_proj.weight",
    "mlp.fc_in.weight": "mlp.c_fc.weight",
    "mlp.fc_out.weight": "mlp.c_proj.weight",
    "norm_attn.weight": "n1.weight",
    "norm_mlp.weight": "n3.weight",
}
_TOP = {
    "embedding.weight": "transformer.wte.weight",
    "head.weight": "lm_head.weight",
    "norm_emb.weight": "norm_emb.weight",
    "norm_recur.weight": "norm_recur.weight",
    "norm_final.weight": "norm_final.weight",
    "injection.proj.weight": "inject.weight",
    "lanes.alpha": "lane_alpha",
    "lanes.mixing": "lane_mixing",
    "lanes.beta": "lane_beta",
}
#: Our injection and lanes for each value of `input_injection`.
_INJECTIONS: dict[str, tuple[type[Injection], type[Lanes]]] = {
    "inject_init_prelude": (LinearInjection, SingleLane),
    "additive": (AdditiveInjection, SingleLane),
    "passthrough": (PassthroughInjection, SingleLane),
    "hyperconnect": (PassthroughInjection, HyperConnectionLanes),
}
CONFIG_KEYS = (
    "sequence_len", "vocab_size", "size", "n_head", "n_kv_head", "n_embd", "n_prelude", "n_recur_block", "n_coda",
    "num_recur", "bptt_k", "input_injection", "num_lanes", "logit_softcap",
)  # fmt: skip


def refuse_other_keys(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a UserError that names unknown and missing keys, if there are any."""
    differing = {"unknown": set(given) - set(known), "missing": set(known) - set(given)}
    parts = [f"{kind}: {', '.join(sorted(keys))}" for kind, keys in differing.items() if keys]
    if parts:
        raise UserError(f"{what} does not have the reference code's keys; {'; '.join(parts)}.")


def reference_name(name: str) -> str:
    """The reference code's name of one of our tensors (without `model.`); UserError if it has none."""
    section, _, rest = name.partition(".")
    layer, _, inside = rest.partition(".")
    if section in _SECTIONS and inside in _IN_LAYER:
        return f"transformer.{_SECTIONS[section]}.{layer}.{_IN_LAYER[inside]}"
    if name in _TOP:
        return _TOP[name]
    raise UserError(f"The reference code has no tensor for {name}.")


def architecture_from_reference(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of LoopedTransformer from a model_config, components as class_path and init_args.

    Raises:
        UserError: unknown or missing keys, a number out of range, or an unknown injection.
    """
    refuse_other_keys("model_config", config, CONFIG_KEYS)
    kind = config["input_injection"]
    if kind not in _INJECTIONS:
        raise UserError(f"input_injection is {kind!r}; known are {', '.join(_INJECTIONS)}.")
    for key in CONFIG_KEYS:
        _refuse_other_numbers(key, config[key])
    config = {k: int(v) if isinstance(v, float) and v == int(v) else v for k, v in config.items()}
    width, heads, r, window = config["n_embd"], config["n_head"], config["num_recur"], config["bptt_k"]
    if width % heads:
        raise UserError(f"n_embd {width} is not a multiple of n_head {heads}.")
    injection, lanes = _INJECTIONS[kind]
    several = {"num_lanes": config["num_lanes"]} if lanes is HyperConnectionLanes else {}
    return {
        "vocab_size": config["vocab_size"],
        "seq_len": config["sequence_len"],
        "size": size_of(width),
        "head_dim": width // heads,
        "n_kv_heads": config["n_kv_head"],
        "prelude_layers": config["n_prelude"],
        "recurrent_layers": config["n_recur_block"],
        "coda_layers": config["n_coda"],
        "num_recurrences": r,
        "injection": _spec(injection),
        "lanes": _spec(lanes, **several),
        "bptt": _spec(FullBPTT) if window is None or window >= r else _spec(TruncatedBPTT, window=window),
        "logit_softcap": float(config["logit_softcap"]),
        "rope_bf16": True,
    }


def _refuse_other_numbers(key: str, value: Any) -> None:
    if key == "input_injection" or (key == "bptt_k" and value is None):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if key in ("size", "logit_softcap"):
        right, kind = number and value > 0, "a positive number"
    else:
        least = 0 if key in ("n_prelude", "n_coda") else 1
        right, kind = number and value == int(value) >= least, f"a whole number of at least {least}"
    if not right:
        raise UserError(f"{key} is {value!r}; it must be {kind}.")


def _spec(component: type, **init_args: Any) -> Spec:
    return {"class_path": f"looped_lm.{component.__name__}", "init_args": init_args}


def tensors_from_reference(tensors: Mapping[str, Tensor], model: LoopedTransformer) -> dict[str, Tensor]:
    """The state dict of `model` from the reference code's tensors, `_orig_mod.` prefixes removed.

    Raises:
        UserError: names that are unknown, missing or given twice.
    """
    plain = {name.replace(_COMPILED, ""): tensor for name, tensor in tensors.items()}
    if len(plain) != len(tensors):
        raise UserError(f"Some tensors come both with and without {_COMPILED}: leave one of each out.")
    names = {name: reference_name(name) for name in model.state_dict()}
    refuse_other_keys("The checkpoint", plain, names.values())
    return {name: plain[theirs] for name, theirs in names.items()}


def config_to_reference(model: LoopedTransformer) -> dict[str, Any]:
    """The model_config that describes a model; UserError if the reference code lacks a component."""
    kinds = {classes: kind for kind, classes in _INJECTIONS.items()}
    kind = kinds.get((type(model.injection), type(model.lanes)))
    if kind is None:
        raise UserError(
            f"The reference code has no {type(model.injection).__name__} with {type(model.lanes).__name__}; it has "
            + ", ".join(f"{i.__name__} with {lanes.__name__}" for i, lanes in kinds)
            + "."
        )
    for key, component in components(model).items():
        known = (FullBPTT, TruncatedBPTT) if key == "bptt" else (SEAMS[key].default,)
        if key not in ("injection", "lanes") and type(component) not in known:
            raise UserError(f"The reference code has no {type(component).__name__}.")
    if model.document_start is not None:
        raise UserError(
            "The reference code has no masks between documents, and this model has a document_start."
        )
    r = model.num_recurrences
    return {
        "sequence_len": model.seq_len,
        "vocab_size": model.vocab_size,
        "size": size_of(model.d_model),
        "n_head": model.n_heads,
        "n_kv_head": model.n_kv_heads,
        "n_embd": model.d_model,
        "n_prelude": len(model.prelude),
        "n_recur_block": len(model.block),
        "n_coda": len(model.coda),
        "num_recur": r,
        "bptt_k": sum(model.bptt.keeps_grad(i, r) for i in range(r)),
        "input_injection": kind,
        "num_lanes": getattr(model.lanes, "num_lanes", 1),
        "logit_softcap": model.logit_softcap,
    }
