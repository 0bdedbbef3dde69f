"""Files and folders appear whole or not at all, and a failure to write is one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from looped_lm.common.errors import UserError
from looped_lm.common.writing import PARTIAL, failing_with, new_file, new_folder


def test_a_file_takes_its_place_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.txt"
    with new_file(path) as aside:
        aside.write_text("first")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), new_file(path) as aside:
        aside.write_text("half")
        assert path.read_text() == "first"
        raise KeyboardInterrupt
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_share_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with new_file(path) as one:
        one.write_text("one")
        with new_file(path) as other:
            other.write_text("other")
        assert path.read_text() == "other" and one.name.endswith(PARTIAL)
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_its_place_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "made" / "folder"
    with pytest.raises(RuntimeError, match="in between"), new_folder(path) as aside:
        (aside / "a").write_text("half")
        raise RuntimeError("in between")
    assert not list(path.parent.iterdir())
    with new_folder(path) as aside:
        (aside / "a").write_text("whole")
        assert not path.exists()
    assert (path / "a").read_text() == "whole" and path.stat().st_mode & 0o077
    with pytest.raises(UserError, match="exists, and nothing is overwritten"), new_folder(path):
        pass
    assert [p.name for p in path.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize("numbers", [10, 1_000_000])
def test_a_full_disk_is_one_message_also_where_torch_wraps_it(numbers: int) -> None:
    said = r"^x.ckpt could not be written \(No space left on device\). Make room.$"
    with pytest.raises(UserError, match=said) as caught, failing_with("Make room.", "x.ckpt"):
        with open("/dev/full", "wb") as file:
            torch.save({"weights": torch.zeros(numbers)}, file)
    assert caught.value.__cause__ is not None


def test_a_bug_while_writing_keeps_its_type() -> None:
    with pytest.raises(RuntimeError, match="a bug"), failing_with("Make room.", "x.ckpt"):
        raise RuntimeError("a bug")
    with pytest.raises(UserError, match="^mine$"), failing_with("Make room.", "x.ckpt"):
        try:
            raise OSError("gone")
        except OSError as error:
            raise UserError("mine") from error
