"""Prepared data behind a URL."""

from __future__ import annotations

import itertools

import fsspec
import pytest
import torch

from datamodules import TokenDataModule, storage
from datamodules.errors import DataError
from datamodules.remote import mirror
from tests.support.data_samples import prepared


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "CHUNK_BYTES", 2000)
        prepared(folder, count=80)
    return folder


def upload(folder):
    """Make `folder` the one and only content of memory://bucket/set."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    for path in folder.rglob("*"):
        if path.is_file():
            store.pipe(f"/bucket/set/{path.relative_to(folder).as_posix()}", path.read_bytes())


@pytest.fixture
def url(original):
    upload(original)
    yield "memory://bucket/set"
    fsspec.filesystem("memory").store.clear()


def module(data_dir, cache, **options):
    data = TokenDataModule(data_dir=data_dir, seq_len=16, batch_size=3, cache_dir=cache, **options)
    data.prepare_data()
    data.setup()
    return data


def test_rows_are_those_of_the_folder_and_chunks_come_when_read(original, url, tmp_path):
    local, remote = module(original, tmp_path), module(url, tmp_path)
    assert remote.manifest_hash == local.manifest_hash and remote.vocab_size == 257
    folder = remote._data.folder
    assert not list(folder.glob("*/*.bin"))
    batches = [itertools.islice(data.train_dataloader(), 40) for data in (local, remote)]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*batches, strict=True))
    assert len(list(folder.glob("train/*.bin"))) == len(local.manifest["splits"]["train"]["chunks"]) > 3
    assert (
        sum(len(inputs) for inputs, _ in remote.val_dataloader()) == local.manifest["splits"]["val"]["rows"]
    )
    # What was fetched is read again without the store.
    fsspec.filesystem("memory").rm("/bucket/set/train", recursive=True)
    assert next(iter(module(url, tmp_path).train_dataloader()))[0].shape == (3, 16)


def test_workers_fetch_too(original, tmp_path):
    remote = module(f"file://{original}", tmp_path, num_workers=2)
    local = module(original, tmp_path)
    batches = [itertools.islice(data.train_dataloader(), 20) for data in (local, remote)]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(*batches, strict=True))


def test_a_damaged_chunk_is_refused_on_arrival(url, tmp_path):
    store = fsspec.filesystem("memory")
    chunks = store.glob("/bucket/set/train/*.bin")
    for chunk in chunks:
        content = bytearray(store.cat(chunk))
        content[-1] ^= 1
        store.pipe(chunk, bytes(content))
    data = module(url, tmp_path)
    with pytest.raises(DataError, match="memory://bucket/set/train/chunk-.*bin is damaged"):
        next(iter(data.train_dataloader()))
    assert not list(data._data.folder.glob("train/*.bin"))
    store.rm("/bucket/set/train", recursive=True)
    with pytest.raises(DataError, match="cannot read memory://bucket/set/train/chunk-"):
        next(iter(data.train_dataloader()))


def test_urls_without_prepared_data(url, tmp_path):
    with pytest.raises(DataError, match="cannot read memory://bucket/none/manifest.json"):
        mirror("memory://bucket/none", tmp_path)
    fsspec.filesystem("memory").pipe("/bucket/set/manifest.json", b"{")
    with pytest.raises(DataError, match="memory://bucket/set/manifest.json is damaged"):
        mirror(url, tmp_path)


def test_data_that_changes_behind_the_url_gets_another_folder(url, tmp_path):
    before = mirror(url, tmp_path)
    assert mirror(url + "/", tmp_path) == before
    prepared(tmp_path / "other", count=90)
    upload(tmp_path / "other")
    assert mirror(url, tmp_path) != before
