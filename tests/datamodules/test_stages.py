"""Tokenizing and packing jobs: the split, the shuffle, the cutting, and what they count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import ByteTokenizer, PrepareSettings
from datamodules.errors import DataError
from datamodules.stages import (
    Job,
    clean,
    cut,
    document_digest,
    is_validation,
    pack_shard,
    read_counts,
    read_marker,
    shuffle_key,
    tokenize_unit,
)
from datamodules.storage import write_index
from tests.support.data_samples import ListCorpus, iterate_rows, made_up_texts

BOS = ByteTokenizer.bos_id


def run(folder, texts, per_unit=10, num_shards=1, split="train", **options):
    """Both stages over all units and shards; returns (job, unit summaries, shard summaries)."""
    job = Job(
        ListCorpus(texts, per_unit),
        ByteTokenizer(),
        PrepareSettings(**{"seq_len": 16, "val_fraction": 0.2, **options}),
        folder,
    )
    for name in ("units", "shards", "train", "val"):
        (folder / name).mkdir(parents=True)
    units = job.corpus.units()
    sources = [tokenize_unit(job, unit, i) for i, unit in enumerate(units)]
    shards = [pack_shard(job, split, i, num_shards, len(units)) for i in range(num_shards)]
    return job, sources, shards


def stored_rows(job, shards, split="train"):
    chunks = [chunk for shard in shards for chunk in shard["chunks"]]
    write_index(job.work / split, chunks)
    rows = iterate_rows(job.work / split, job.settings.row_length, sum(shard["rows"] for shard in shards))
    return [row.tolist() for row in rows]


def test_the_split_is_decided_by_content_and_has_the_asked_share():
    digests = [document_digest(text) for text in made_up_texts(4000)]
    share = np.mean([is_validation(digest, 0.1) for digest in digests])
    assert abs(share - 0.1) < 0.02
    held_out = {digest for digest in digests if is_validation(digest, 0.1)}
    assert held_out <= {digest for digest in digests if is_validation(digest, 0.3)}


def test_no_document_is_in_both_splits_not_even_as_a_copy(tmp_path):
    texts = made_up_texts(60)
    texts += texts[:20]
    seen = {}
    for split in ("train", "val"):
        job, _, shards = run(tmp_path / split, texts, split=split, seq_len=8, cut_documents=True)
        rows = stored_rows(job, shards, split)
        tokens = [token for row in rows for token in row]
        numbers = "".join("\n" if t == BOS else chr(t) for t in tokens).split("\n")
        seen[split] = {part.split(":")[0] for part in numbers if ":" in part and part.split(":")[0].isdigit()}
    assert len(seen["train"]) > 30 and seen["val"] and not seen["train"] & seen["val"]


def test_shuffle_keys_depend_on_seed_and_place():
    digest = document_digest("text")
    keys = {shuffle_key(digest, seed, unit, place) for seed in (0, 1) for unit in (0, 1) for place in (0, 1)}
    assert len(keys) == 8 and all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("num_shards", [2, 5])
def test_shards_are_slices_of_one_global_shuffle(tmp_path, num_shards):
    texts = made_up_texts(80)
    whole = run(tmp_path / "one", texts, packing_buffer=1)
    parts = run(tmp_path / "many", texts, num_shards=num_shards, packing_buffer=1)
    assert sum(shard["documents"] for shard in parts[2]) == whole[2][0]["documents"]
    assert sum(shard["tokens_in"] for shard in parts[2]) == whole[2][0]["tokens_in"]
    # With a buffer of one document rows keep the order, so the first shard begins as the whole does.
    first = stored_rows(parts[0], parts[2][:1])
    assert len(first) > 5 and first == stored_rows(whole[0], whole[2])[: len(first)]


def test_the_seed_shuffles_documents(tmp_path):
    texts = made_up_texts(60)
    rows = [
        stored_rows(job, shards) for job, _, shards in (run(tmp_path / str(s), texts, seed=s) for s in (0, 1))
    ]
    assert rows[0] != rows[1]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    row_length=st.integers(2, 20),
)
@settings(max_examples=100, deadline=None)
def test_cutting_loses_nothing_and_every_piece_begins_with_bos(lengths, row_length):
    documents = [np.concatenate(([BOS], np.arange(n - 1) % 200)).astype(np.uint16) for n in lengths]
    flat, pieces = cut(np.concatenate(documents), np.array(lengths), row_length, BOS)
    assert flat.dtype == np.uint16 and pieces.sum() == len(flat) and pieces.max() <= row_length
    starts = np.cumsum(pieces) - pieces
    assert (flat[starts] == BOS).all()
    assert flat[flat != BOS].tolist() == np.concatenate(documents)[np.concatenate(documents) != BOS].tolist()
    expected = sum(1 if n <= row_length else -(-(n - 1) // (row_length - 1)) for n in lengths)
    assert len(pieces) == expected


def test_token_counts_add_up(tmp_path):
    for cut_documents in (True, False):
        job, sources, (shard,) = run(
            tmp_path / str(cut_documents), made_up_texts(80), seq_len=32, cut_documents=cut_documents
        )
        assert shard["tokens_in"] == shard["rows"] * 33 + shard["tokens_cropped"] + shard["tokens_unfilled"]
        assert (shard["pieces"] > shard["documents"]) == cut_documents
        assert sum(source["documents"] for source in sources) > shard["documents"]
        # The documents are far longer than a row here: without cutting nearly all of each is lost.
        kept = shard["rows"] * 33 / shard["tokens_in"]
        assert kept > 0.95 if cut_documents else kept < 0.5


def test_targets_are_counted_without_the_first_token_of_a_row(tmp_path):
    job, _, (shard,) = run(tmp_path, made_up_texts(80), split="val")
    counts = read_counts(job.shard_marker("val", 0))
    rows = np.array(stored_rows(job, [shard], "val"))
    assert counts.tolist() == np.bincount(rows[:, 1:].ravel(), minlength=257).tolist()


def test_documents_without_tokens_are_counted_and_left_out(tmp_path):
    _, (source,), _ = run(tmp_path, ["", *made_up_texts(8), ""], per_unit=10)
    assert (source["documents"], source["empty"]) == (8, 2)


def test_lone_surrogates_become_question_marks():
    assert clean("a\ud800b") == "a?b" and clean("ü") == "ü"


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    class Liar(ByteTokenizer):
        vocab_size = 50

    (tmp_path / "units").mkdir()
    job = Job(ListCorpus(["text"]), Liar(), PrepareSettings(), tmp_path)
    with pytest.raises(DataError, match="gave id 120 for a document of from 0; its vocab_size is 50"):
        tokenize_unit(job, job.corpus.units()[0], 0)


def test_a_job_leaves_its_marker_last(tmp_path):
    job, (source, *_), (shard,) = run(tmp_path, made_up_texts(30))
    assert read_marker(job.unit_marker(0)) == source
    assert read_marker(job.shard_marker("train", 0)) == shard
    assert read_marker(job.unit_marker(99)) is None
