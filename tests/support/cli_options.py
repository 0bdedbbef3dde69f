"""Command-line options that make any shipped config tiny and point it at prepared tiny data."""

from __future__ import annotations

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
