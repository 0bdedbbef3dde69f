"""A training run as its record describes it."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import torch

from fitting.records import RunRecord
from looped_lm.model.accounting import active_parameters

if TYPE_CHECKING:
    from looped_lm.training.lightning_module import LoopedLM

SIZES = ("vocab_size", "seq_len", "d_model", "head_dim", "n_heads", "n_kv_heads", "num_recurrences")


def run_record(lm: LoopedLM, **of_the_run: Any) -> RunRecord:
    """The record of a run of `lm`; `of_the_run` adds the fields that `lm` does not give, and overrides others."""
    model = lm.model
    counts = active_parameters(model)
    active = {}
    if counts != (lm.sections.n_once, lm.sections.n_rec):
        active = dict(zip(("n_once_active", "n_rec_active"), counts, strict=True))
    of_the_model = {
        "run_name": lm.provenance.get("run_name") or "run",
        "seed": int(lm.provenance.get("seed") or torch.initial_seed() % 2**32),
        "config": lm.provenance.get("config"),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **{name: getattr(model, name) for name in SIZES},
        "prelude_layers": len(model.prelude),
        "recurrent_layers": len(model.block),
        "coda_layers": len(model.coda),
        "components": lm.component_specs(),
        "parameters": lm.sections.as_dict(),
        "n_once": lm.sections.n_once,
        "n_rec": lm.sections.n_rec,
        **active,
        "batch_tokens": lm.batch_tokens,
        "flops_per_token": lm.flops_per_token,
        "flops_convention": "paper",
    }
    return RunRecord(schema_version=RunRecord.SCHEMA_VERSION, **{**of_the_model, **of_the_run})
