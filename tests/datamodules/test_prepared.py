"""The three places where prepared data comes from, and what is checked when it is opened."""

from __future__ import annotations

import shutil

import pytest

from datamodules import BPETokenizer, ByteTokenizer, PrepareSettings, StdlibCorpus, TextFiles, prepared
from datamodules.errors import DataError
from datamodules.prepared import CachedCorpus, PreparedFolder
from tests.support.data_samples import ListCorpus, made_up_texts
from tests.support.data_samples import prepared as prepared_sample

SETTINGS = PrepareSettings(seq_len=16, val_fraction=0.2)


@pytest.fixture
def folder(tmp_path):
    prepared_sample(tmp_path / "set")
    return tmp_path / "set"


def given(folder):
    return PreparedFolder(folder, {"seq_len": 16}, None, None)


def test_a_given_folder_gives_manifest_rows_and_vocabulary(folder):
    data = given(folder)
    manifest = data.open(300)
    assert data.vocab_size == 257
    rows = data.rows(manifest, "val")
    assert len(rows) == manifest["splits"]["val"]["rows"] and rows[0].shape == (17,)


def test_a_cached_corpus_is_there_after_prepare_and_not_before(tmp_path):
    data = CachedCorpus(ListCorpus(made_up_texts(60)), ByteTokenizer(), SETTINGS, tmp_path)
    assert data.vocab_size == 257 and data.folder.parent == tmp_path
    with pytest.raises(DataError, match="no prepared data at"):
        data.open(257)
    data.prepare(progress=False)
    assert data.open(257)["splits"]["train"]["rows"] > 0


def test_a_cached_corpus_knows_its_vocabulary_without_its_files(tmp_path):
    assert CachedCorpus(TextFiles(["gone"]), ByteTokenizer(), SETTINGS, tmp_path).vocab_size == 257


def test_damage_is_found_when_data_is_opened(folder, monkeypatch):
    (chunk,) = (folder / "val").glob("*.bin")
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-9] + bytes((whole[-9] ^ 4,)) + whole[-8:])
    with pytest.raises(
        DataError, match="val/chunk-00000-0.bin: content changed.*Restore or prepare it again"
    ):
        given(folder).open(257)
    # Data too large to be hashed at each start is left to `verify`.
    monkeypatch.setattr(prepared, "SMALL_BYTES", 10)
    given(folder).open(257)
    chunk.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=f"{len(whole) - 1} bytes, expected {len(whole)}"):
        given(folder).open(257)
    shutil.rmtree(folder / "val")
    with pytest.raises(DataError, match="val/chunk-00000-0.bin: missing; val/index.json: missing"):
        given(folder).open(257)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="no prepared data at .*gone"):
        given(tmp_path / "gone").vocab_size  # noqa: B018


def check(folder, asked=None, tokenizer=None, corpus=None, vocab_size=257):
    PreparedFolder(folder, asked or {}, tokenizer, corpus).open(vocab_size)


def test_what_agrees_passes(folder):
    same = {"seq_len": 16, "val_fraction": 0.2, "cut_documents": True, "packing_buffer": 1000, "seed": 0}
    check(folder, same, ByteTokenizer(), ListCorpus(made_up_texts(200)), 32_001)
    check(folder)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"asked": {"seq_len": 32}}, "seq_len is 32, but the data in .*set was prepared with 16"),
        ({"asked": {"cut_documents": False}}, "cut_documents is False, .* prepared with True"),
        ({"asked": {"packing_buffer": 5}}, "packing_buffer is 5, .* prepared with 1000"),
        ({"asked": {"val_fraction": 0.1}}, "val_fraction is 0.1, .* prepared with 0.2"),
        ({"asked": {"seed": 4}}, "prepare_seed is 4, .* prepared with 0"),
        ({"tokenizer": BPETokenizer(300)}, "the tokenizer is .*BPETokenizer.* prepared with .*ByteTokenizer"),
        ({"corpus": StdlibCorpus()}, "the corpus is .*StdlibCorpus.* prepared from .*ListCorpus"),
        ({"vocab_size": 256}, "vocab_size is 256, but the tokenizer bytes of .* has 257 ids"),
    ],
)
def test_what_differs_is_refused(folder, difference, message):
    with pytest.raises(DataError, match=message):
        check(folder, **difference)
