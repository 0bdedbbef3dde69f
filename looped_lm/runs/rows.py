"""What a resumed run finds in its folder's logs: all rows up to its step, and no row twice."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger

from looped_lm.common.writing import new_file
from looped_lm.runs.lightning_internals import purge_after


def go_on_after(logger: Logger, step: int, writes: bool) -> None:
    """Have a logger keep the rows of its folder up to `step`, and take those after it as not written.

    Rows after the checkpoint exist where a run was killed: the resumed one writes them again.

    Args:
        logger: with its folder set, and nothing written by it yet.
        step: of the checkpoint that the run goes on from.
        writes: whether this process is the one that writes logs.
    """
    purge_after(logger, step)
    if not (isinstance(logger, CSVLogger) and writes):
        return
    # Lightning's writer deletes the file that it finds; a kill at any moment leaves the rows in one of the two.
    path = Path(logger.log_dir) / "metrics.csv"
    before = path.with_name("metrics.csv.before")
    if path.is_file():
        path.replace(before)
    writer = logger.experiment
    if not before.is_file():
        return
    whole, _, _ = before.read_text(encoding="utf-8").rpartition("\n")  # A kill may leave half a line.
    rows = csv.DictReader(whole.splitlines())
    names = list(rows.fieldnames or ["step"])
    with new_file(path) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        kept = csv.DictWriter(file, names)
        kept.writeheader()
        kept.writerows(row for row in rows if int(float(row["step"])) <= step)
    writer.metrics_keys = names
    before.unlink()
