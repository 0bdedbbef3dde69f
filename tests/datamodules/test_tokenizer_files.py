"""Tokenizers that come as a file."""

from __future__ import annotations

import io
import pickle

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from datamodules import BPETokenizer, FileTokenizer, HubTokenizer
from datamodules.errors import DataError
from datamodules.tokenizers import load_tokenizer
from tests.support.data_samples import made_up_texts


def word_level(path, special):
    backend = Backend(models.WordLevel({"[UNK]": 0, "loop": 1, "row": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(special)
    backend.save(str(path))
    return path


def test_the_usual_bos_is_found(tmp_path):
    tokenizer = FileTokenizer(word_level(tmp_path / "t.json", ["[PAD]", "<s>"]))
    assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.vocab_size) == ("<s>", 4, 5)
    assert tokenizer.encode(["loop row"])[0].tolist() == [1, 2]


def test_bos_can_be_named_and_is_never_read_from_text(tmp_path):
    tokenizer = FileTokenizer(word_level(tmp_path / "t.json", ["<go>"]), bos_token="<go>")
    assert tokenizer.bos_id == 3
    assert tokenizer.bos_id not in tokenizer.encode(["loop <go> row"])[0]


def test_a_file_without_a_known_bos_lists_the_candidates(tmp_path):
    path = word_level(tmp_path / "t.json", ["[PAD]", "<go>"])
    with pytest.raises(DataError, match=r"name one by bos_token.*<go>, \[PAD\]"):
        FileTokenizer(path)
    with pytest.raises(DataError, match="no BOS token '<nope>'"):
        FileTokenizer(path, bos_token="<nope>")


def test_ids_and_identity_survive_storing(tmp_path):
    trained = BPETokenizer(vocab_size=280)
    trained.train(made_up_texts(50))
    (tmp_path / "mine.json").write_bytes(trained.serialized()[1])
    given = FileTokenizer(tmp_path / "mine.json")
    name, content = given.serialized()
    (tmp_path / name).write_bytes(content)
    again = load_tokenizer(tmp_path, given.settings())
    assert again.settings() == given.settings() and again.name == given.name
    text = made_up_texts(1, seed=5)
    assert again.encode(text)[0].tolist() == trained.encode(text)[0].tolist()


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(DataError, match="no tokenizer file at .*gone.json"):
        FileTokenizer(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="bad.json is not a tokenizer.json"):
        FileTokenizer(tmp_path / "bad.json")
    (tmp_path / "bin.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="bin.json is not a tokenizer.json"):
        FileTokenizer(tmp_path / "bin.json")


def test_a_hub_tokenizer_is_its_file(tmp_path, monkeypatch):
    path = word_level(tmp_path / "tokenizer.json", ["<s>"])
    asked = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: asked.append((a, k)) or str(path))
    tokenizer = HubTokenizer("some/model", revision="abc")
    assert asked == [(("some/model", "tokenizer.json"), {"revision": "abc"})]
    assert tokenizer.settings() == FileTokenizer(path).settings()


def test_a_hub_tokenizer_that_cannot_be_fetched(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(
        DataError, match="cannot fetch tokenizer.json of 'some/model'.*no route.*FileTokenizer"
    ):
        HubTokenizer("some/model")


class TestSentencePiece:
    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory):
        library = pytest.importorskip("sentencepiece", reason="needs the extra `data`")
        content = io.BytesIO()
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(made_up_texts(200)),
            model_writer=content,
            vocab_size=300,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        path = tmp_path_factory.mktemp("sp") / "mine.model"
        path.write_bytes(content.getvalue())
        return path

    def test_ids_decoding_and_bos(self, model):
        from datamodules import SentencePieceTokenizer

        tokenizer = SentencePieceTokenizer(model)
        (ids,) = tokenizer.encode(["row lane loop"])
        assert tokenizer.bos_id == 1 and tokenizer.bos_id not in tokenizer.encode(["a <s> b"])[0]
        assert tokenizer.decode([1, *ids]) == "<s>row lane loop"
        assert ids.max() < tokenizer.vocab_size

    def test_it_survives_pickling_and_storing(self, model, tmp_path):
        from datamodules import SentencePieceTokenizer

        tokenizer = SentencePieceTokenizer(model)
        copy = pickle.loads(pickle.dumps(tokenizer))
        (tmp_path / "tokenizer.model").write_bytes(tokenizer.serialized()[1])
        stored = load_tokenizer(tmp_path, tokenizer.settings())
        for other in (copy, stored):
            assert other.encode(["row lane"])[0].tolist() == tokenizer.encode(["row lane"])[0].tolist()
            assert other.settings() == tokenizer.settings()

    def test_missing_and_damaged_files(self, tmp_path):
        pytest.importorskip("sentencepiece", reason="needs the extra `data`")
        from datamodules import SentencePieceTokenizer

        with pytest.raises(DataError, match="no tokenizer file at .*gone.model"):
            SentencePieceTokenizer(tmp_path / "gone.model")
        (tmp_path / "bad.model").write_bytes(b"nonsense")
        with pytest.raises(DataError, match="bad.model is not a sentencepiece model"):
            SentencePieceTokenizer(tmp_path / "bad.model")


def test_sentencepiece_missing_names_the_extra(tmp_path, monkeypatch):
    import sys

    from datamodules import SentencePieceTokenizer

    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "a.model").write_bytes(b"x")
    with pytest.raises(DataError, match=r"needs the package sentencepiece: pip install 'looped-lm\[data\]'"):
        SentencePieceTokenizer(tmp_path / "a.model")
