"""What a resumed run finds in its folder's logs: all rows up to its step, and no row twice."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger


def go_on_after(logger: Logger, step: int, writes: bool) -> None:
    """Have a logger keep the rows of its folder up to `step`, and take those after it as not written.

    Rows after the checkpoint exist where a run was killed: the resumed one writes them again.

    Args:
        logger: with its folder set, and nothing written by it yet.
        step: of the checkpoint that the run goes on from.
        writes: whether this process is the one that writes logs.
    """
    if isinstance(logger, TensorBoardLogger):
        # TensorBoard's own mark in the new event file; readers leave out what an earlier file has from there on.
        logger._kwargs["purge_step"] = step + 1
    elif isinstance(logger, CSVLogger) and writes:
        _keep_rows(logger, step)


def _keep_rows(logger: CSVLogger, step: int) -> None:
    """Lightning's writer deletes the file that it finds; a kill at any moment leaves the rows in one of the two."""
    path = Path(logger.log_dir) / "metrics.csv"
    aside, partial = path.with_name("metrics.csv.before"), path.with_name("metrics.csv.partial")
    if path.is_file():
        path.replace(aside)
    writer = logger.experiment
    if not aside.is_file():
        return
    whole, _, _ = aside.read_text(encoding="utf-8").rpartition("\n")  # A kill may leave half a line.
    rows = csv.DictReader(whole.splitlines())
    names = list(rows.fieldnames or ["step"])
    with partial.open("w", newline="", encoding="utf-8") as file:
        kept = csv.DictWriter(file, names)
        kept.writeheader()
        kept.writerows(row for row in rows if int(float(row["step"])) <= step)
    partial.replace(path)
    writer.metrics_keys = names
    aside.unlink()
