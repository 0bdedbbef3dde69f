"""Rows on disk: written as litdata chunks, read by number."""

from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import pytest
import torch

from datamodules import storage
from datamodules.errors import DataError


def write(folder, rows, row_length=5, prefix="chunk-00000"):
    folder.mkdir(parents=True, exist_ok=True)
    chunks = storage.write_rows(iter(rows), row_length, folder, prefix)
    storage.write_index(folder, chunks)
    return chunks


def numbered(count, row_length=5, dtype=np.uint16):
    return [np.full(row_length, i, dtype) for i in range(count)]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(storage, "CHUNK_BYTES", 40)


def test_rows_come_back_in_any_order_across_chunks(tmp_path, small_chunks):
    chunks = write(tmp_path, numbered(30))
    assert [chunk["rows"] for chunk in chunks] == [4] * 7 + [2]
    rows = storage.Rows(tmp_path, 5, 30)
    assert [int(rows[i][0]) for i in (29, 0, 13, 12, 29)] == [29, 0, 13, 12, 29]
    batch = rows.__getitems__([7, 3])
    assert batch.dtype == torch.int64 and batch.tolist() == [[7] * 5, [3] * 5]


def test_litdata_itself_reads_the_folder(tmp_path, small_chunks):
    from litdata import StreamingDataset, TokensLoader

    write(tmp_path, numbered(10))
    dataset = StreamingDataset(str(tmp_path), item_loader=TokensLoader(5))
    assert [int(row[0]) for row in dataset] == list(range(10))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, np.uint16), (65536, np.uint16), (65537, np.uint32)])
def test_tokens_take_as_few_bytes_as_they_need(tmp_path, vocab_size, dtype):
    assert storage.token_dtype(vocab_size) == dtype
    write(tmp_path, [np.full(5, vocab_size - 1, dtype)])
    assert storage.Rows(tmp_path, 5, 1).__getitems__([0]).tolist() == [[vocab_size - 1] * 5]


def test_writing_again_replaces_what_an_interrupted_run_left(tmp_path, small_chunks):
    first = write(tmp_path, numbered(10))
    (tmp_path / ".chunk-00000.77").mkdir()
    (tmp_path / ".chunk-00000.77" / "half.bin").write_bytes(b"x")
    assert write(tmp_path, numbered(10)) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"chunk-00000-{i}.bin" for i in range(3)] + [
        "index.json"
    ]


def test_no_rows_no_chunks(tmp_path):
    assert storage.write_rows(iter([]), 5, tmp_path, "chunk-0") == []


def test_a_missing_or_short_chunk_is_one_clear_error(tmp_path, small_chunks):
    write(tmp_path / "train", numbered(10))
    (tmp_path / "train" / "chunk-00000-1.bin").write_bytes(b"")
    rows = storage.Rows(tmp_path / "train", 5, 10)
    assert int(rows[0][0]) == 0
    with pytest.raises(DataError, match="cannot read row 4 of .*train.*`python -m datamodules verify"):
        rows[4]


def _first_token(rows, index, answers):
    answers.put(int(rows[index][0]))


def test_a_reader_can_be_forked_and_pickled_while_it_is_open(tmp_path, small_chunks):
    write(tmp_path, numbered(10))
    rows = storage.Rows(tmp_path, 5, 10)
    assert int(rows[9][0]) == 9
    assert int(pickle.loads(pickle.dumps(rows))[3][0]) == 3
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_first_token, args=(rows, 6, answers))
    child.start()
    assert answers.get(timeout=30) == 6
    child.join()
    assert int(rows[8][0]) == 8


def test_targets_are_one_token_ahead():
    inputs, targets = storage.split_batch(torch.arange(10).reshape(2, 5))
    assert inputs.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]] and targets.tolist() == [
        [1, 2, 3, 4],
        [6, 7, 8, 9],
    ]
    assert inputs.is_contiguous() and targets.is_contiguous()
