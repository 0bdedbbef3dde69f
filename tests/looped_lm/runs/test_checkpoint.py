"""Comparisons of checkpoints."""

from __future__ import annotations

import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from looped_lm.runs.checkpoint import (
    compare_tensors,
    differences,
    in_folder,
    load_checkpoint,
    newest_whole,
    verify,
)
from looped_lm.runs.checkpoint_io import RecordingCheckpointIO
from tests.support.checkpoint_files import flip, stored
from tests.support.tiny import tiny_lm


def test_a_flipped_byte_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """torch.load gives back wrong weights without a word; only padding and time stamps are not covered here."""
    path = stored(tmp_path / "a.ckpt", 1)
    whole, size = path.read_bytes(), path.stat().st_size
    verify(path)
    flip(path, size // 2)
    assert not torch.equal(torch.load(path, weights_only=True)["state_dict"]["w"], torch.arange(4000.0) + 1)
    found = 0
    for place in random.Random(0).sample(range(size), 150):
        path.write_bytes(whole)
        flip(path, place)
        try:
            assert torch.equal(load_checkpoint(path)["state_dict"]["w"], torch.arange(4000.0) + 1)
        except ValueError as error:
            found += 1
            assert str(path) in str(error)
    assert found > 120


def test_a_file_that_was_verified_is_read_again_only_where_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str | None] = []
    testzip = zipfile.ZipFile.testzip
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: reads.append("all") or testzip(archive))
    path = stored(tmp_path / "a.ckpt", 1)
    disk = RecordingCheckpointIO(TorchCheckpointIO())
    for _ in range(2):
        assert disk.load_checkpoint(path)["global_step"] == 1
    assert reads == ["all"]
    flip(path, path.stat().st_size // 2)
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match="a.ckpt is damaged"):
        disk.load_checkpoint(path)
    with pytest.raises(ValueError, match="none.ckpt cannot be read"):
        disk.load_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_checkpoint_is_found(tmp_path: Path, share: float) -> None:
    path = stored(tmp_path / "a.ckpt", 1)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ValueError, match="a.ckpt cannot be read as a checkpoint: it is truncated, damaged"):
        load_checkpoint(path)


def test_the_newest_whole_checkpoint_of_a_folder(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "none") == (None, {})
    for step in (2, 8, 4, 6):
        stored(tmp_path / f"{'abcd'[step // 2 - 1]}.ckpt", step)
    assert [c.step for c in in_folder(tmp_path)[0]] == [8, 6, 4, 2]
    flip(tmp_path / "d.ckpt", 9000)
    (tmp_path / "c.ckpt").write_bytes(b"half")
    found, damaged = newest_whole(tmp_path)
    assert found is not None and found.path.name == "b.ckpt" and found.step == 4
    assert {p.name for p in damaged} == {"c.ckpt", "d.ckpt"}


def test_a_component_more_is_one_difference() -> None:
    def trainer(*callbacks: str) -> dict[str, Any]:
        return {"callbacks": [{"class_path": c, "init_args": {"n": 1}} for c in callbacks], "tags": ["a"]}

    assert [str(d) for d in differences(trainer("A", "B", "B"), trainer("X", "A", "B", "B"))] == [
        "callbacks.X.class_path: None in the checkpoint, 'X' here",
        "callbacks.X.init_args.n: None in the checkpoint, 1 here",
    ]


def test_differences_name_every_leaf_that_is_not_equal() -> None:
    stored = {
        "size": 1,
        "lanes": {"class_path": "A", "init_args": {"k": 2}},
        "betas": (0.8, 0.9),
        "same": None,
    }
    given = {
        "size": 2,
        "lanes": {"class_path": "B", "init_args": {}},
        "betas": [0.8, 0.9],
        "same": None,
        "new": 3,
    }
    assert [str(d) for d in differences(stored, given)] == [
        "lanes.class_path: 'A' in the checkpoint, 'B' here",
        "lanes.init_args.k: 2 in the checkpoint, None here",
        "new: None in the checkpoint, 3 here",
        "size: 1 in the checkpoint, 2 here",
    ]


def test_hyperparameters_hold_every_default() -> None:
    """A checkpoint of a module built with defaults rebuilds it after a default has changed."""
    hparams = dict(tiny_lm().hparams)
    assert hparams["logit_softcap"] == 15.0 and hparams["rope_bf16"] is False
    assert hparams["transfer"]["init_args"]["matrix"] == 0.014


def test_tensors_that_do_not_fit_are_named() -> None:
    own = {"a": torch.zeros(2), "b": torch.zeros(3)}
    says = r"(?s)3 tensor.*a: \(4,\) in the checkpoint.*c: only in.*b: only in the model"
    with pytest.raises(ValueError, match=says):
        compare_tensors({"a": torch.zeros(4), "c": torch.zeros(1)}, own)
    compare_tensors(own, own)
