"""How far runs are, read off files alone; claims; last lines of a log."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import yaml

from fitting.records import RecordError, RunRecord
from looped_lm.runs.preemption import EXIT_STATUS
from looped_lm.sweeps import worker
from looped_lm.sweeps.place import Claimed, Place, State
from looped_lm.sweeps.runs import Run
from tests.support.run_records import record_fields

RUN = Run("mine", (), {"model.size": 3}, {"model.size": 3}, ("model.size",))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, "mine")


def write_record(place: Place, **fields: Any) -> RunRecord:
    checkpoints = place.folder(RUN) / "version_0" / "checkpoints"
    record = RunRecord.from_dict({**record_fields(), "run_name": place.name(RUN), **fields})
    record.save(checkpoints / f"step={record.steps:06d}.run.json")
    return record


def test_states_follow_the_files(place: Place) -> None:
    assert place.status(RUN).state is State.WAITING and not place.root.exists(), "looking makes nothing"
    place.note(RUN, command=["fit"])
    assert place.status(RUN).state is State.INTERRUPTED, "begun, not ended, and nobody there: it was killed"
    with place.claimed(RUN):
        assert place.status(RUN).state is State.RUNNING
    for exit_status in (EXIT_STATUS, 130, 143):
        place.note(RUN, exit_status=exit_status)
        assert place.status(RUN).state is State.INTERRUPTED
    place.note(RUN, exit_status=1)
    status = place.status(RUN)
    assert (status.state, status.attempts, status.exit_status) == (State.FAILED, 1, 1)
    write_record(place, status="stopped", stop_reason="at step 5", steps=5)
    status = place.status(RUN)
    assert status.state is State.FAILED and status.record is not None and status.record.steps == 5
    assert place.keep_record(RUN) is None
    write_record(place)
    (place.folder(RUN) / "version_0" / "checkpoints" / "half.run.json").write_text('{"schema_version": 1')
    assert place.status(RUN).state is State.FINISHED
    kept = place.keep_record(RUN)
    assert kept == place.records / f"{RUN.id}.run.json" and RunRecord.load(kept).finished


def test_a_collected_record_finishes_a_run_on_a_machine_that_never_trained_it(
    place: Place, tmp_path: Path
) -> None:
    write_record(place)
    place.keep_record(RUN)
    elsewhere = Place(tmp_path / "other", "mine", records=place.records)
    assert elsewhere.finished(RUN) and elsewhere.status(RUN).attempts == 0


def test_a_run_keeps_its_folder_when_the_sweep_names_it_otherwise(place: Place, tmp_path: Path) -> None:
    place.note(RUN, command=["fit"])
    more = Run("mine", (), {"model.size": 3, "seed_everything": 1}, {"model.size": 3, "seed_everything": 1},
               ("model.size", "seed_everything"))  # fmt: skip
    assert more.hash == RUN.hash and more.id != RUN.id
    fresh = Place(tmp_path, "mine")
    assert fresh.folder(more) == place.folder(RUN) and f"--run_name={RUN.id}" in fresh.command(more)


def test_a_collected_record_that_cannot_be_read_stops_the_sweep(place: Place) -> None:
    """It might be of a later version: to train its run again would throw it away."""
    write_record(place)
    kept = place.keep_record(RUN)
    assert kept is not None
    kept.write_text(kept.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    (place.folder(RUN) / "version_0" / "checkpoints" / kept.name).unlink(missing_ok=True)
    elsewhere = Place(place.root / "other", "mine", records=place.records)
    with pytest.raises(RecordError, match="schema_version"):
        elsewhere.status(RUN)


def test_a_damaged_collected_record_is_replaced_by_the_runs_own(place: Place) -> None:
    record = write_record(place)
    kept = place.keep_record(RUN)
    assert kept is not None
    kept.write_text("")
    assert place.status(RUN).state is State.FINISHED
    assert place.keep_record(RUN) == kept and RunRecord.load(kept) == record


def test_records_of_no_run_of_the_sweep_are_told_apart(place: Place) -> None:
    write_record(place)
    kept = place.keep_record(RUN)
    other = Run("mine", (), {"model.size": 4}, {"model.size": 4}, ("model.size",))
    assert place.foreign([other, RUN]) == [] and place.foreign([other]) == [kept]


def test_a_run_that_failed_since_it_was_chosen_is_left_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launchers start at once: what fails under one of them is not tried again by the other."""
    tried = []
    monkeypatch.setattr(worker, "_fit", lambda command, log: tried.append(command) or 1)
    assert worker.work(place, RUN, attempts=0) == 1 and len(tried) == 1
    assert worker.work(place, RUN, attempts=0) == 1 and len(tried) == 1
    assert worker.work(place, RUN, attempts=1) == 1 and len(tried) == 2, "a retry chose it as it is now"
    place.note(RUN, exit_status=EXIT_STATUS)
    assert worker.work(place, RUN, attempts=0) == 1 and len(tried) == 3, "one that was stopped goes on"


def test_an_attempt_notes_what_it_added_to_the_time_of_training(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(place, status="stopped", stop_reason="at step 5", steps=5, wall_seconds=40.0)
    monkeypatch.setattr(worker, "_fit", lambda command, log: write_record(place, wall_seconds=100.0) and 0)
    assert worker.work(place, RUN) == 0
    assert place.attempts(RUN)[-1]["fit_seconds"] == 60.0


def _claim(place: Place, held: Any, release: Any) -> None:
    with place.claimed(RUN):
        held.set()
        release.wait(30)


def test_a_claim_ends_with_its_process_however_that_ends(place: Place) -> None:
    fork = multiprocessing.get_context("fork")
    held, release = fork.Event(), fork.Event()
    process = fork.Process(target=_claim, args=(place, held, release))
    process.start()
    assert held.wait(30)
    with pytest.raises(Claimed), place.claimed(RUN):
        pass
    process.kill()
    process.join()
    with place.claimed(RUN):
        pass


def test_half_a_line_of_a_killed_process_is_no_attempt(place: Place) -> None:
    place.note(RUN, command=["fit"])
    with (place.folder(RUN) / "attempts.jsonl").open("a") as file:
        file.write('{"time": 1')
    place.note(RUN, command=["fit"])
    with (place.folder(RUN) / "attempts.jsonl").open("ab") as file:
        file.write(b"123\n\xff\xfe\n")
    assert len(place.attempts(RUN)) == 2 and place.status(RUN).state is State.INTERRUPTED


def test_a_path_is_taken_as_it_is_written(tmp_path: Path) -> None:
    (argument,) = (word for word in Place(tmp_path / "o a: b", "mine").command(RUN) if "save_dir" in word)
    assert yaml.safe_load(argument.partition("=")[2]) == str(tmp_path / "o a: b" / "mine")


def test_the_last_lines_show_what_a_progress_bar_showed_last(place: Place) -> None:
    assert place.last_lines(RUN) == []
    place.folder(RUN).mkdir(parents=True)
    place.log(RUN).write_bytes(b"one\n\ntwo\r 10%\r 20%\r\nthree\nerror: \xff\n")
    assert place.last_lines(RUN, 3) == [" 20%", "three", "error: \N{REPLACEMENT CHARACTER}"]
