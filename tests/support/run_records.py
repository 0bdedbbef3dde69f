"""A complete run record, to be changed field by field."""

from __future__ import annotations


def record_fields(**changes):
    """The fields of a record of a completed run, with changes."""
    fields = dict(
        schema_version=1, run_name="r8", seed=1, code_version="0.1", created="2026-01-01T00:00:00Z",
        status="completed", stop_reason=None, data_manifest_hash="ab", tokenizer="bytes",
        vocab_size=256, seq_len=64, unique_tokens=None, d_model=64, head_dim=32, n_heads=2,
        n_kv_heads=2, prelude_layers=2, recurrent_layers=2, coda_layers=2, num_recurrences=8,
        components={"injection": {"class_path": "x.Linear", "init_args": {}}}, parameters={"block":
        10}, n_once=200, n_rec=100, steps=10, steps_planned=10, tokens=640, tokens_target=640.0,
        batch_tokens=64, flops_per_token=1e6, training_flops=6.4e8, flops_convention="paper",
        flops_budget=6.4e8, val_loss=3.5, val_tokens=1000, val_step=10, wall_seconds=1.5,
        hardware="cpu", precision="32-true", world_size=1, config={"model": {"d_model": 64}},
    )  # fmt: skip
    return fields | changes
