"""Command-line options and a sweep that make shipped configs tiny and point them at prepared tiny data."""

from __future__ import annotations

import json
from pathlib import Path


def tiny_options(data_dir: Path, steps: int = 3) -> list[str]:
    """Options for `fit`: d_model 64, rows of 16 bytes, a few steps of two rows."""
    return [
        "--trainer.accelerator=cpu",
        f"--data.data_dir={data_dir}",
        "--data.tokenizer=datamodules.ByteTokenizer",
        "--data.seq_len=16",
        "--data.batch_size=2",
        "--data.val_rows=2",
        "--data.final_val_rows=4",
        "--model.size=1",
        "--model.head_dim=16",
        "--model.batch_tokens=32",
        "--model.val_every_steps=2",
        "--model.horizon=looped_lm.Steps",
        f"--model.horizon.steps={steps}",
    ]


def tiny_sweep(folder: Path, data_dir: Path, seeds: int, steps: int) -> Path:
    """Runs of r = 4, d_model 64, on rows of 16 bytes."""
    path = folder / "tiny.yaml"
    keys = {
        "trainer.accelerator": "cpu",
        "data.data_dir": str(data_dir),
        "data.tokenizer": "datamodules.ByteTokenizer",
        "data.seq_len": 16,
        "data.batch_size": 2,
        "data.val_rows": 2,
        "data.final_val_rows": 4,
        "model.size": 1,
        "model.head_dim": 16,
        "model.batch_tokens": 32,
        "model.val_every_steps": 10,
        "model.horizon": "looped_lm.Steps",
        "model.horizon.steps": steps,
        "model.prelude_layers": 1,
        "model.recurrent_layers": 1,
        "model.coda_layers": 1,
    }
    grid = {"config": ["r4.yaml"], "seed_everything": list(range(1, seeds + 1))}
    path.write_text(json.dumps({"keys": keys, "grid": grid}))
    return path
