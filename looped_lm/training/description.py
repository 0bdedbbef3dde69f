"""A model as a run record describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looped_lm.training.lightning_module import LoopedLM


def describe(lm: LoopedLM) -> dict[str, Any]:
    """What the model is and costs, by the names of a run record's fields."""
    model = lm.model
    return {
        "vocab_size": model.vocab_size,
        "seq_len": lm.seq_len,
        "d_model": model.d_model,
        "head_dim": model.head_dim,
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "prelude_layers": len(model.prelude),
        "recurrent_layers": len(model.block),
        "coda_layers": len(model.coda),
        "num_recurrences": model.num_recurrences,
        "components": lm.component_specs(),
        "parameters": lm.sections.as_dict(),
        "n_once": lm.sections.n_once,
        "n_rec": lm.sections.n_rec,
        "batch_tokens": lm.batch_tokens,
    }
