"""A model's parameters in the form of the reference implementation."""

from __future__ import annotations

from typing import Any

import torch

from looped_lm import (
    AdditiveInjection,
    HyperConnectionLanes,
    LinearInjection,
    LoopedTransformer,
    PassthroughInjection,
)
from tests.support.reference import forward as reference


def reference_weights(model: LoopedTransformer) -> dict[str, Any]:
    """The model's parameters, detached, in the reference's form; requires_grad set."""

    def leaf(p: torch.Tensor) -> torch.Tensor:
        return p.detach().clone().requires_grad_()

    def layer(block: Any) -> dict[str, torch.Tensor]:
        return {
            "q": leaf(block.attn.q.weight),
            "k": leaf(block.attn.k.weight),
            "v": leaf(block.attn.v.weight),
            "out": leaf(block.attn.out.weight),
            "mlp_in": leaf(block.mlp.fc_in.weight),
            "mlp_out": leaf(block.mlp.fc_out.weight),
            "norm_attn": leaf(block.norm_attn.weight),
            "norm_mlp": leaf(block.norm_mlp.weight),
        }

    weights: dict[str, Any] = {
        "embedding": leaf(model.embedding.weight),
        "head": leaf(model.head.weight),
        "norm_emb": leaf(model.norm_emb.weight),
        "norm_recur": leaf(model.norm_recur.weight),
        "norm_final": leaf(model.norm_final.weight),
        "prelude": [layer(b) for b in model.prelude],
        "block": [layer(b) for b in model.block],
        "coda": [layer(b) for b in model.coda],
        "inject": leaf(model.injection.proj.weight) if isinstance(model.injection, LinearInjection) else None,
    }
    if isinstance(model.lanes, HyperConnectionLanes):
        weights["lane_alpha"] = leaf(model.lanes.alpha)
        weights["lane_mixing"] = leaf(model.lanes.mixing)
        weights["lane_beta"] = leaf(model.lanes.beta)
    return weights


INJECTIONS = {
    LinearInjection: reference.linear,
    AdditiveInjection: reference.additive,
    PassthroughInjection: reference.passthrough,
}
