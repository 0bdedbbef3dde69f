"""`python -m looped_lm convert`: checkpoints of the paper authors' public code to ours, and back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from looped_lm.common.errors import UserError

PAPER_BATCH_TOKENS = 2**18


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog="python -m looped_lm convert",
        description="Convert checkpoints of the paper authors' public code (a folder with model_<step>.pt and "
        "meta_<step>.json) into a checkpoint with a run record, and back.",
        allow_abbrev=False,
    )
    direction = p.add_mutually_exclusive_group(required=True)
    direction.add_argument("--from", dest="source", choices=["reference"], help="format of PATH")
    direction.add_argument("--to", dest="target", choices=["reference"], help="format to write")
    p.add_argument("path", type=Path, metavar="PATH", help="folder to read with --from, checkpoint with --to")
    p.add_argument(
        "--out", type=Path, required=True, help="file to write with --from, folder with --to; must not exist"
    )
    p.add_argument("--step", type=int, help="--from: step to read; default: the last")
    p.add_argument(
        "--batch-tokens",
        type=int,
        help=f"--from: tokens of a training step, for the record's counts; default: {PAPER_BATCH_TOKENS}, the paper's",
    )
    return p


def from_reference(folder: Path, out: Path, step: int | None, batch_tokens: int) -> None:
    """Convert a folder of the reference code to a checkpoint with its run record beside it."""
    from fitting.records import RunRecord, record_path
    from looped_lm.common.writing import failing_with
    from looped_lm.runs.checkpoint_io import write_checkpoint
    from looped_lm.sharing.reference_folder import read_folder

    record_file = record_path(out)
    for path in (out, record_file):
        if path.exists():
            raise UserError(f"{path} exists, and nothing is overwritten: name another file, or remove it.")
    checkpoint, lm = read_folder(folder, step, batch_tokens)
    with failing_with("Make room, or name another file.", out):
        write_checkpoint(checkpoint, out)
        RunRecord.from_dict(checkpoint["run_record"]).save(record_file)
    print(f"checkpoint  {out}\nrun record  {record_file}")
    print(
        f"step {checkpoint['global_step']}, N {lm.sections.n:,}; the record's tokens and FLOPs assume "
        f"{batch_tokens:,} tokens a step",
    )


def to_reference(checkpoint_file: Path, out: Path) -> None:
    """Write the model of a checkpoint as the reference code stores it."""
    from looped_lm.sharing.reference_folder import write_folder

    step, model = write_folder(checkpoint_file, out)
    print(f"{out}: step {step}")
    if not model.rotary.bf16_tables:
        print(
            "note: the reference code rounds its rotary tables to bfloat16, but this model does not: its logits change "
            "by about 4e-3 there.",
            file=sys.stderr,
        )


def main(args: Sequence[str]) -> None:
    """Run the command."""
    given = parser().parse_args(args)
    if given.source:
        batch_tokens = PAPER_BATCH_TOKENS if given.batch_tokens is None else given.batch_tokens
        from_reference(given.path, given.out, given.step, batch_tokens)
    elif given.step is not None or given.batch_tokens is not None:
        raise UserError(
            "--step and --batch-tokens belong to --from: a checkpoint holds one step, and its counts."
        )
    else:
        to_reference(given.path, given.out)
