"""Adds a validation loss to the run records of converted checkpoints, so that `python -m fitting` can read them.

    python measure_loss.py --data DATA_DIR --out RECORDS CHECKPOINT [CHECKPOINT ...]

`python -m datamodules prepare` has written DATA_DIR, with the tokenizer of the models. Give only the last checkpoint of
each run: a loss from the middle of a schedule is not the loss that the run would have reached.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import lightning as L

from datamodules import TokenDataModule
from fitting.records import RunRecord, record_path
from looped_lm import LoopedLM


def measured(checkpoint: Path, data_dir: Path, rows: int) -> RunRecord:
    """The record beside a checkpoint with its loss, in nats per token over `rows` validation rows of `data_dir`."""
    record = RunRecord.load(record_path(checkpoint))
    lm = LoopedLM.load_from_checkpoint(checkpoint)
    data = TokenDataModule(
        data_dir=data_dir,
        seq_len=record.seq_len,
        vocab_size=record.vocab_size,
        batch_size=4,
        final_val_rows=rows,
    )
    trainer = L.Trainer(
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.validate(lm, data, verbose=False)
    assert lm.evaluated is not None
    loss, tokens = lm.evaluated
    return dataclasses.replace(
        record,
        status="completed",
        stop_reason=None,
        val_loss=loss,
        val_tokens=tokens,
        val_step=record.steps,
        data_manifest_hash=data.manifest_hash,
        tokenizer=data.tokenizer_name,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--data", type=Path, required=True, help="prepared data")
    parser.add_argument("--out", type=Path, required=True, help="folder for the completed records")
    parser.add_argument("--rows", type=int, default=1024, help="validation rows (default: %(default)s)")
    given = parser.parse_args()
    for checkpoint in given.checkpoints:
        target = given.out / record_path(checkpoint).name
        if target.exists():
            raise SystemExit(
                f"{target} exists, and nothing is overwritten: name another folder, or remove the file."
            )
        try:
            record = measured(checkpoint, given.data, given.rows)
        except (OSError, ValueError) as error:
            raise SystemExit(f"error: {checkpoint}: {error}") from error
        print(f"{record.save(target)}: {record.val_loss:.4f} nats/token over {record.val_tokens:,} tokens")


if __name__ == "__main__":
    main()
