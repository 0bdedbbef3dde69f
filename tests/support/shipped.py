"""What tests read of the shipped configs, and models at the paper's scale."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.cli import instantiate_class

from looped_lm import (
    AdditiveInjection,
    HyperConnectionLanes,
    LinearInjection,
    LoopedTransformer,
    PassthroughInjection,
    TruncatedBPTT,
)
from looped_lm.configuration.config_files import BASE, LAYOUT, SHIPPED
from looped_lm.loop.component import as_factory, as_instance
from looped_lm.seams import SEAMS

VOCAB, SEQ_LEN = 32_001, 2048


def paper_model(size: int, r: int, **overrides: Any) -> LoopedTransformer:
    """The paper's model of a size and recurrence count, on the meta device."""
    prelude, recurrent, coda = (0, 20, 0) if r == 1 else (2, 16 // r, 2)
    arguments: dict[str, Any] = dict(
        size=size,
        prelude_layers=prelude,
        recurrent_layers=recurrent,
        coda_layers=coda,
        num_recurrences=r,
        injection=PassthroughInjection if r == 1 else LinearInjection,
    )
    with torch.device("meta"):
        return LoopedTransformer(VOCAB, SEQ_LEN, **{**arguments, **overrides})


COMBINATIONS: dict[str, dict[str, Any]] = {
    "r1": dict(
        prelude_layers=0, recurrent_layers=4, coda_layers=0, num_recurrences=1, injection=PassthroughInjection
    ),
    "linear": {},
    "additive": dict(injection=AdditiveInjection),
    "passthrough": dict(injection=PassthroughInjection),
    "truncated": dict(bptt=TruncatedBPTT()),
    "truncated additive": dict(bptt=TruncatedBPTT(1), injection=AdditiveInjection),
    "lanes": dict(injection=PassthroughInjection, lanes=HyperConnectionLanes),
    "lanes + linear": dict(lanes=partial(HyperConnectionLanes, num_lanes=3)),
    "gqa": dict(n_kv_heads=1),
}


def shipped(config: str) -> dict[str, Any]:
    """Arguments of the architecture that a shipped config describes."""
    base, own = (yaml.safe_load((SHIPPED / name).read_text())["model"] for name in ("base.yaml", config))
    arguments = {**{key: base[key] for key in (*LAYOUT, *SEAMS)}, **own}
    for key, seam in SEAMS.items():
        spec = arguments[key] if isinstance(arguments[key], dict) else {"class_path": arguments[key]}
        arguments[key] = as_factory(spec) if seam.sizes else as_instance(spec)
    del arguments["recurrences"]  # of training, not of the model
    return arguments


SHIPPED_ARCHITECTURES = sorted(p.name for p in SHIPPED.glob("r*.yaml"))


def default_callbacks() -> list[L.Callback]:
    """Those of base.yaml."""
    listed = yaml.safe_load(BASE.read_text())["trainer"]["callbacks"]
    return [instantiate_class((), {"init_args": {}, **spec}) for spec in listed]
