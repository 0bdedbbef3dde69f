"""`python -m looped_lm export`: a checkpoint's model as a folder to share (safetensors and config.json)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog="python -m looped_lm export",
        description="Write a checkpoint's model as model.safetensors and config.json, with its tokenizer. "
        "LoopedTransformer.from_pretrained(folder) reads it.",
        allow_abbrev=False,
    )
    p.add_argument("--ckpt", "--ckpt_path", required=True, help="checkpoint of a run")
    p.add_argument("--out", type=Path, required=True, help="folder to write; it must not exist")
    tokenizer = p.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", help="class path, or class_path and init_args as YAML; default: that of training"
    )
    tokenizer.add_argument("--no-tokenizer", action="store_true", help="write the model only")
    return p


def main(args: Sequence[str]) -> None:
    """Run the command."""
    given = parser().parse_args(args)
    from looped_lm.common.writing import failing_with
    from looped_lm.sharing.export import save_pretrained
    from looped_lm.sharing.load import load_model, load_tokenizer

    model = load_model(given.ckpt)
    tokenizer = None if given.no_tokenizer else load_tokenizer(given.ckpt, given.tokenizer)
    with failing_with("Make room, or name another folder.", given.out):
        folder = save_pretrained(model, given.out, tokenizer)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {size / 2**20:.1f} MiB")
