"""Prepared data against what is asked of it: every difference names both values."""

from __future__ import annotations

import pytest

from datamodules import BPETokenizer, ByteTokenizer, StdlibCorpus
from datamodules.checks import check_recipe
from datamodules.errors import DataError
from tests.support.data_samples import ListCorpus, made_up_texts, prepared


@pytest.fixture(scope="module")
def folder_and_manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    return folder, prepared(folder)


def check(folder_and_manifest, asked=None, tokenizer=None, corpus=None, vocab_size=257):
    folder, manifest = folder_and_manifest
    check_recipe(folder, manifest, asked or {}, tokenizer, corpus, vocab_size)


def test_what_agrees_passes(folder_and_manifest):
    same = {"seq_len": 16, "val_fraction": 0.2, "cut_documents": True, "packing_buffer": 1000, "seed": 0}
    check(folder_and_manifest, same, ByteTokenizer(), ListCorpus(made_up_texts(200)), 32_001)
    check(folder_and_manifest)


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
def test_what_differs_is_refused(folder_and_manifest, difference, message):
    with pytest.raises(DataError, match=message):
        check(folder_and_manifest, **difference)
