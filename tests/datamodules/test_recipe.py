"""What decides prepared data, and where and under which name it is cached."""

from __future__ import annotations

import pytest

from datamodules import BPETokenizer, PrepareSettings, StdlibCorpus, TextFiles
from datamodules.errors import DataError
from datamodules.recipe import cache_name, canonical_json, default_cache_dir, sha256_of
from tests.support.data_samples import made_up_texts, write_texts

SETTINGS = PrepareSettings(seq_len=32, val_fraction=0.2)


def test_the_cache_name_changes_with_every_setting_and_with_the_files(tmp_path):
    corpus, tokenizer = TextFiles([str(write_texts(tmp_path / "a", made_up_texts(3)))]), BPETokenizer(300)
    name = cache_name(corpus, tokenizer, SETTINGS)
    assert name.startswith("text-bpe300-T32-") and name == cache_name(corpus, tokenizer, SETTINGS)
    others = [
        cache_name(StdlibCorpus(), tokenizer, SETTINGS),
        cache_name(corpus, BPETokenizer(301), SETTINGS),
        cache_name(corpus, BPETokenizer(300, train_characters=5), SETTINGS),
        cache_name(corpus, tokenizer, PrepareSettings(seq_len=32, val_fraction=0.2, seed=1)),
    ]
    (tmp_path / "a" / "0000.txt").write_text("changed")
    others.append(cache_name(corpus, tokenizer, SETTINGS))
    assert len({name, *others}) == 6


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("LOOPED_LM_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("LOOPED_LM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "looped_lm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "looped_lm"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seq_len": -3}, "seq_len is -3"),
        ({"val_fraction": 0.0}, "val_fraction is 0.0"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0"),
        ({"packing_buffer": 0}, "packing_buffer is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(DataError, match=message):
        PrepareSettings(**settings)


def test_equal_values_have_equal_json():
    assert canonical_json({"b": (1, 2), "a": "ü"}) == canonical_json({"a": "ü", "b": [1, 2]})
    assert sha256_of({"a": 1}) != sha256_of({"a": 2})
