"""After a resume all earlier rows are there, and none twice."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from looped_lm.runs.folder import go_on_after


def write(logger: TensorBoardLogger | CSVLogger, steps: range, value: float) -> None:
    for step in steps:
        logger.log_metrics({"loss": value} | ({"val": 2 * value} if step == 3 else {}), step)
    logger.save()
    logger.finalize("success")


@pytest.mark.usefixtures("event_files_in_order")
def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    write(TensorBoardLogger(tmp_path, "run", version=0), range(1, 9), 1.0)
    resumed = TensorBoardLogger(tmp_path, "run", version=0)
    go_on_after(resumed, 5, writes=True)
    write(resumed, range(6, 11), 2.0)
    events = EventAccumulator(resumed.log_dir).Reload().Scalars("loss")
    assert [(e.step, e.value) for e in events] == [(s, 1.0 if s <= 5 else 2.0) for s in range(1, 11)]


def test_a_csv_file_keeps_its_rows(tmp_path: Path) -> None:
    write(CSVLogger(tmp_path, "run", version=0), range(1, 9), 1.0)
    other = CSVLogger(tmp_path, "run", version=0)
    go_on_after(other, 5, writes=False)
    resumed = CSVLogger(tmp_path, "run", version=0)
    go_on_after(resumed, 5, writes=True)
    write(resumed, range(6, 11), 2.0)
    with (Path(resumed.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(r["step"]), float(r["loss"])) for r in rows] == [
        (s, 1.0 if s <= 5 else 2.0) for s in range(1, 11)
    ]
    assert [r["val"] for r in rows if r["val"]] == ["2.0"]
    assert not list(Path(resumed.log_dir).glob("*.before"))


@pytest.mark.parametrize("killed_while_it_was_kept", [False, True])
def test_rows_survive_a_kill(tmp_path: Path, killed_while_it_was_kept: bool) -> None:
    """Half a line of the run itself, and a process that was killed between taking the rows and writing them."""
    first = CSVLogger(tmp_path, "run", version=0)
    write(first, range(1, 5), 1.0)
    path = Path(first.log_dir) / "metrics.csv"
    with path.open("a") as file:
        file.write("1.0,")
    if killed_while_it_was_kept:
        path.rename(path.with_name("metrics.csv.before"))
    resumed = CSVLogger(tmp_path, "run", version=0)
    go_on_after(resumed, 4, writes=True)
    write(resumed, range(5, 7), 2.0)
    with path.open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [1, 2, 3, 4, 5, 6]
    assert not list(path.parent.glob("metrics.csv.*"))


def test_a_fresh_folder_has_nothing_to_keep(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "run", version=0)
    go_on_after(logger, 5, writes=True)
    write(logger, range(6, 8), 1.0)
    assert len((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()) == 3
