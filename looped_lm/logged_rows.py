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
    """Lightning's writer deletes the file that it finds."""
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return
    aside = path.with_name("metrics.csv.before")
    path.replace(aside)
    with aside.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(float(row["step"])) <= step]
    writer = logger.experiment
    writer.metrics = [{name: value for name, value in row.items() if value != ""} for row in rows]
    writer.save()
    aside.unlink()
