"""The folder of a run: one writer at a time, no folder twice, and what is set aside."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from looped_lm.common.errors import UserError
from looped_lm.common.writing import new_file
from looped_lm.runs import folder as run_folder
from looped_lm.runs.folder import clean, held, new_version, newest_of_run, versions
from tests.support.checkpoint_files import stored


def test_simultaneous_starts_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_version(tmp_path / "runs" / "r4"), range(40)))
    assert len(set(made)) == 40
    assert [p.name for p in versions(tmp_path / "runs" / "r4")][:2] == ["version_39", "version_38"]


def test_a_file_in_the_folders_place_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(UserError, match=r"runs.r4 could not be written \(Not a directory\).*save_dir"):
        new_version(tmp_path / "runs" / "r4")
    assert (tmp_path / "runs").read_text() == "mine"


def test_a_held_folder_is_refused_and_its_holder_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.0)
    code = f"""
import sys, time
from pathlib import Path
from looped_lm.runs.folder import held
with held(Path({str(tmp_path)!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"being written by process {other.pid} on .* since"):
            with held(tmp_path):
                pass
    finally:
        other.kill()
        other.wait()
    with held(tmp_path):
        pass  # A killed process holds nothing.
    with held(tmp_path):
        pass


def test_only_what_was_being_written_is_removed(tmp_path: Path) -> None:
    for name in ("step=2.ckpt", "step=4.ckpt.partial", "step=2.run.json"):
        (tmp_path / name).write_text("")
    with new_file(tmp_path / "step=6.ckpt") as aside:
        aside.write_text("half")
        clean(tmp_path)
        assert not aside.exists()
        aside.write_text("")
    (tmp_path / "step=6.ckpt").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step=2.ckpt", "step=2.run.json"]


def test_the_newest_folder_with_checkpoints_counts(tmp_path: Path) -> None:
    assert newest_of_run(tmp_path / "none") == (None, {})
    for number, step in ((2, 8), (10, 4)):
        (tmp_path / f"version_{number}" / "checkpoints").mkdir(parents=True)
        stored(tmp_path / f"version_{number}" / "checkpoints" / f"{step}.ckpt", step)
    (tmp_path / "version_11").mkdir()
    (tmp_path / "version_x").mkdir()
    found, damaged = newest_of_run(tmp_path)
    assert found is not None and (found.step, found.path.parent.parent.name) == (4, "version_10")
    assert not damaged
