"""The run record: round trip, atomic writing, refusals that name file and field for every kind of bad
value.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from fitting.records import RecordError, RunRecord, write_bytes_atomically
from tests.support.run_records import record_fields


def test_round_trip_is_exact(tmp_path):
    record = RunRecord(**record_fields(val_loss=3.123456789012345))
    path = record.save(tmp_path / "new" / "step10.run.json")
    assert RunRecord.load(path) == record
    assert list(json.loads(path.read_text())) == [field.name for field in dataclasses.fields(RunRecord)]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = RunRecord(**record_fields()).save(tmp_path / "a.run.json")
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        RunRecord(**record_fields(seed=2)).save(path)
    # As the operating system raises it for a handle, without the file's name.
    monkeypatch.setattr("os.fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.run\.json'"):
        RunRecord(**record_fields(seed=2)).save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.run.json"]


def test_bytes_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.bin"
    assert write_bytes_atomically(path, b"old, and longer") == path
    write_bytes_atomically(path, b"new")
    assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]
    # A disk that is full, and an interruption: whatever ends the writing.
    for stop in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        monkeypatch.setattr("os.fsync", Mock(side_effect=stop))
        with pytest.raises(type(stop)):
            write_bytes_atomically(path, b"newest")
        assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
        ({"val_loss": float("nan")}, "val_loss"),
        ({"val_loss": -1.0}, "val_loss"),
        ({"val_loss": None}, "val_loss"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 12.5}, "tokens"),
        ({"seed": True}, "seed"),
        ({"status": "done"}, "status"),
        ({"flops_convention": "mine"}, "flops_convention"),
        ({"flops_per_token": float("inf")}, "flops_per_token"),
        ({"n_rec": 0}, "n_rec"),
        ({"vocab_size": "256"}, "vocab_size"),
        ({"wall_seconds": None}, "wall_seconds"),
        ({"components": {"injection": {"class_path": "x"}}}, "components.injection"),
        ({"parameters": {"block": 1.5}}, "parameters.block"),
        ({"config": {"a": [1, float("inf")]}}, "config.a[1]"),
        ({"config": {"a": (1, 2)}}, "config.a"),
        ({"extra": 1}, "extra"),
        ({"val_step": 5}, "val_step"),
        ({"val_step": None}, "val_step"),
        ({"training_flops": 6.5e8}, "training_flops"),
    ],
)
def test_bad_values_name_file_and_field(tmp_path, change, field):
    path = tmp_path / "bad.run.json"
    with pytest.raises(RecordError) as refused:
        RunRecord.from_dict(record_fields(**change), str(path))
    assert str(path) in str(refused.value) and f"'{field}'" in str(refused.value)


def test_construction_checks_too_and_missing_fields_are_named(tmp_path):
    with pytest.raises(RecordError, match="n_rec"):
        RunRecord(**record_fields(n_rec=-1))
    fields = record_fields()
    del fields["tokens"], fields["steps"]
    (tmp_path / "x.run.json").write_text(json.dumps(fields))
    with pytest.raises(RecordError, match="x.run.json.*steps, tokens"):
        RunRecord.load(tmp_path / "x.run.json")


def test_a_run_that_did_not_complete_may_lack_a_loss_and_tokens():
    record = RunRecord(
        **record_fields(status="diverged", val_loss=None, tokens=0, steps=0, training_flops=0.0)
    )
    assert not record.finished


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_texts_that_are_no_record_are_refused(text):
    with pytest.raises(RecordError, match="mine.json"):
        RunRecord.from_json(text, "mine.json")


def test_importing_the_schema_loads_no_numeric_library():
    code = "import sys, fitting.records; print([m for m in ('numpy', 'scipy', 'torch') if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert out.stdout.strip() == "[]"
