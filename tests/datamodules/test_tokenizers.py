"""Tokenizers: lossless, deterministic, and BOS never comes out of text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import BPETokenizer, ByteTokenizer
from datamodules.errors import DataError
from datamodules.tokenizers import load_tokenizer
from tests.support.data_samples import made_up_texts


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    tokenizer = BPETokenizer(vocab_size=300)
    tokenizer.train(made_up_texts(100))
    return tokenizer


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids.tolist()) == text
    assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.bos_id < tokenizer.vocab_size


def test_bytes_show_bos():
    assert ByteTokenizer().decode([256, 104, 105]) == "<|bos|>hi"


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_bpe_round_trip_of_any_text(bpe, text):
    (ids,) = bpe.encode([text])
    assert bpe.decode(ids.tolist()) == text
    assert bpe.bos_id not in ids


def test_bpe_merges_and_stays_within_its_vocabulary(bpe):
    text = made_up_texts(1, seed=9)[0]
    (ids,) = bpe.encode([text])
    assert len(ids) < len(text.encode()) and ids.max() < bpe.vocab_size == 300
    assert bpe.bos_id == 0 and bpe.decode([0]) == "<|bos|>"


def test_text_that_spells_bos_is_not_bos(bpe):
    (ids,) = bpe.encode(["a <|bos|> b"])
    assert bpe.bos_id not in ids


def test_bpe_training_is_deterministic(bpe):
    again = BPETokenizer(vocab_size=300)
    again.train(made_up_texts(100))
    assert again.fingerprint() == bpe.fingerprint()
    other = BPETokenizer(vocab_size=300)
    other.train(made_up_texts(100, seed=1))
    assert other.fingerprint() != bpe.fingerprint()


def test_a_stored_tokenizer_is_the_same_again(bpe, tmp_path):
    for tokenizer in (bpe, ByteTokenizer()):
        name, content = tokenizer.serialized()
        (tmp_path / name).write_bytes(content)
        loaded = load_tokenizer(tmp_path, tokenizer.settings())
        assert loaded.fingerprint() == tokenizer.fingerprint() and loaded.settings() == tokenizer.settings()
        assert (
            loaded.encode(["row lane ü <|bos|>"])[0].tolist()
            == tokenizer.encode(["row lane ü <|bos|>"])[0].tolist()
        )


def test_bad_input_is_refused_with_the_reason(tmp_path):
    with pytest.raises(DataError, match="vocab_size=256.*at least 257"):
        BPETokenizer(vocab_size=256)
    with pytest.raises(DataError, match="train_characters=0"):
        BPETokenizer(train_characters=0)
    with pytest.raises(DataError, match="bpe1024 has not been trained"):
        BPETokenizer().encode(["text"])
    with pytest.raises(DataError, match="cannot import the tokenizer nowhere.Tokenizer"):
        load_tokenizer(tmp_path, {"class_path": "nowhere.Tokenizer"})
    with pytest.raises(DataError, match="cannot import .*datamodules has no Nope"):
        load_tokenizer(tmp_path, {"class_path": "datamodules.Nope"})
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer.json is not a tokenizer.json of the tokenizers library"):
        load_tokenizer(tmp_path, BPETokenizer().settings())


def test_a_bug_in_the_module_of_a_tokenizer_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "my_broken_module.py").write_text("from datamodules import DataError\nDataError.nope\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AttributeError, match="nope"):
        load_tokenizer(tmp_path, {"class_path": "my_broken_module.Tokenizer"})
