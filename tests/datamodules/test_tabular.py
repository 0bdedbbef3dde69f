"""Corpora of many documents per file."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from datamodules import HuggingFaceDataset, JSONLines, ParquetFiles, tabular
from datamodules.errors import DataError
from tests.support.data_samples import made_up_texts

TEXTS = made_up_texts(60)


def all_documents(corpus):
    return [text for unit in corpus.units() for text in corpus.documents(unit)]


def lines_of(texts, key="text"):
    return "".join(json.dumps({key: text, "n": i}) + "\n" for i, text in enumerate(texts)).encode()


@pytest.mark.parametrize("unit_bytes", [50, 300, 1000, 10**9])
def test_json_lines_are_the_same_however_the_file_is_cut(tmp_path, monkeypatch, unit_bytes):
    monkeypatch.setattr(tabular, "_UNIT_BYTES", unit_bytes)
    (tmp_path / "a.jsonl").write_bytes(lines_of(TEXTS))
    corpus = JSONLines([str(tmp_path)])
    assert (len(corpus.units()) > 1) == (unit_bytes < 10**9)
    assert all_documents(corpus) == TEXTS


def test_a_last_line_without_an_end_and_blank_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "_UNIT_BYTES", 20)
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "one"}\n\n\r\n{"text": null}\n{"text": "three"}')
    assert all_documents(JSONLines([str(tmp_path)])) == ["one", "", "three"]


def test_compressed_json_lines(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines_of(TEXTS, "body")))
    assert all_documents(JSONLines([str(tmp_path / "*.gz")], text_key="body")) == TEXTS
    library = pytest.importorskip("zstandard", reason="needs the extra `data`")
    (tmp_path / "b.jsonl.zst").write_bytes(library.compress(lines_of(TEXTS)))
    assert all_documents(JSONLines([str(tmp_path / "*.zst")])) == TEXTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"text": "a"}\n{"text": "b"\n',
            r"a.jsonl, line 2: not JSON .*the line begins b'\{\"text\": \"b\"\\n'",
        ),
        (b'{"body": "a", "id": 1}\n', "a.jsonl, line 1: no key 'text'; it has 'body', 'id'"),
        (b'{"text": 3}\n', "a.jsonl, line 1: 'text' is int, not text"),
        (b'["text"]\n', "a.jsonl, line 1: expected a JSON object, found list"),
        (b"\x00\xff\x13\n", "a.jsonl, line 1: not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        all_documents(JSONLines([str(tmp_path)]))


def test_truncated_and_damaged_compression(tmp_path):
    whole = gzip.compress(lines_of(TEXTS))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-30])
    with pytest.raises(DataError, match="cannot read .*a.jsonl.gz: Compressed file ended"):
        all_documents(JSONLines([str(tmp_path)]))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:40] + b"\xff\xff\xff" + whole[43:])
    with pytest.raises(DataError, match="cannot read .*a.jsonl.gz"):
        all_documents(JSONLines([str(tmp_path)]))
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip at all")
    with pytest.raises(DataError, match="cannot read .*a.jsonl.gz: Not a gzipped file"):
        all_documents(JSONLines([str(tmp_path)]))
    pytest.importorskip("zstandard", reason="needs the extra `data`")
    (tmp_path / "a.jsonl.gz").rename(tmp_path / "a.jsonl.zst")
    with pytest.raises(DataError, match="a.jsonl.zst is not zstandard data"):
        all_documents(JSONLines([str(tmp_path)]))


def test_a_folder_without_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="no file ending in .jsonl or "):
        JSONLines([str(tmp_path)]).units()


class TestParquet:
    @pytest.fixture
    def arrow(self):
        return pytest.importorskip("pyarrow", reason="needs the extra `data`")

    def write(self, arrow, path, **columns):
        import pyarrow.parquet

        pyarrow.parquet.write_table(arrow.table(columns), path, row_group_size=7)

    def test_rows_in_order_in_parts_of_row_groups(self, arrow, tmp_path, monkeypatch):
        monkeypatch.setattr(tabular, "_UNIT_BYTES", 2000)
        self.write(arrow, tmp_path / "a.parquet", body=[*TEXTS, None], n=list(range(61)))
        corpus = ParquetFiles([str(tmp_path)], text_column="body")
        assert len(corpus.units()) > 2 and "groups 0-" in corpus.units()[0].name
        assert all_documents(corpus) == [*TEXTS, ""]

    def test_wrong_columns_and_files(self, arrow, tmp_path):
        self.write(arrow, tmp_path / "a.parquet", body=TEXTS[:2], n=[1, 2])
        with pytest.raises(DataError, match="a.parquet has no column 'text'; it has body, n"):
            ParquetFiles([str(tmp_path)]).units()
        with pytest.raises(DataError, match="column 'n' of .*a.parquet holds int64, not texts"):
            ParquetFiles([str(tmp_path)], "n").units()
        (tmp_path / "a.parquet").write_bytes(b"nonsense")
        with pytest.raises(DataError, match="a.parquet is not a parquet file"):
            ParquetFiles([str(tmp_path)]).units()

    def test_a_damaged_row_group_is_named(self, arrow, tmp_path):
        path = tmp_path / "a.parquet"
        self.write(arrow, path, text=TEXTS)
        corpus = ParquetFiles([str(path)])
        units = corpus.units()
        content = bytearray(path.read_bytes())
        content[4:300] = b"\xff" * 296
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot read row group 0 of .*a.parquet"):
            list(corpus.documents(units[0]))


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(
        DataError, match=r"parquet needs the package pyarrow: pip install 'looped-lm\[data\]'"
    ):
        ParquetFiles([str(tmp_path)]).units()


class TestHuggingFace:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        pytest.importorskip("datasets", reason="needs the extra `data`")
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "train.jsonl").write_bytes(lines_of(TEXTS))
        return str(tmp_path / "set")

    def test_rows_in_order(self, folder, monkeypatch):
        monkeypatch.setattr(tabular, "_UNIT_ROWS", 25)
        corpus = HuggingFaceDataset(folder)
        assert [unit.name for unit in corpus.units()] == ["rows 0-24", "rows 25-49", "rows 50-59"]
        assert all_documents(corpus) == TEXTS

    def test_wrong_names(self, folder):
        with pytest.raises(DataError, match="has no column 'body'; it has text, n"):
            HuggingFaceDataset(folder, text_column="body").units()
        with pytest.raises(DataError, match="cannot load the dataset .*split"):
            HuggingFaceDataset(folder, split="nope").units()
        with pytest.raises(DataError, match="cannot load the dataset 'nobody/nothing-here'"):
            HuggingFaceDataset("nobody/nothing-here").units()


def test_datasets_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"need the package datasets: pip install 'looped-lm\[data\]'"):
        HuggingFaceDataset("a/b").units()
