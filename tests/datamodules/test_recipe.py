"""Where prepared data is cached, and under which name."""

from __future__ import annotations

from datamodules import BPETokenizer, PrepareSettings, StdlibCorpus, TextFiles
from datamodules.recipe import cache_name, default_cache_dir
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
