"""The manifest: what it counts, what changes its hash, and what `check_files` finds."""

from __future__ import annotations

import copy
import json
import math
import shutil

import numpy as np
import pytest

from datamodules import manifest as manifests
from datamodules import storage
from datamodules.errors import DataError
from tests.support.data_samples import iterate_rows, prepared


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "CHUNK_BYTES", 2000)
        prepared(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "set")


def test_entropy_of_known_distributions():
    assert manifests.unigram_entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert manifests.unigram_entropy(np.array([0, 9])) == 0.0
    p = np.array([0.5, 0.25, 0.25])
    assert manifests.unigram_entropy(np.array([2, 1, 1])) == pytest.approx(-(p * np.log(p)).sum())


def test_a_prepared_folder_is_whole(folder):
    manifest = manifests.read(folder)
    assert len(manifest["splits"]["train"]["chunks"]) > 2
    assert manifests.check_files(folder, manifest, content=True) == []
    train = manifest["splits"]["train"]
    assert train["rows"] == sum(chunk["rows"] for chunk in train["chunks"])
    assert train["tokens"] == train["rows"] * 17
    assert train["fill"] == pytest.approx(
        1 - (train["tokens_cropped"] + train["tokens_unfilled"]) / train["tokens_in"]
    )
    rows = iterate_rows(folder / "val", 17, manifest["splits"]["val"]["rows"])
    counts = np.bincount(np.concatenate([row[1:] for row in rows]))
    assert manifest["val_unigram_entropy"] == pytest.approx(manifests.unigram_entropy(counts))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("place", ["header", "middle", "last"])
def test_a_single_flipped_bit_is_found_and_its_chunk_named(folder, split, place):
    path = sorted((folder / split).glob("*.bin"))[-1]
    content = bytearray(path.read_bytes())
    content[{"header": 0, "middle": len(content) // 2, "last": -1}[place]] ^= 0x10
    path.write_bytes(content)
    manifest = manifests.read(folder)
    assert manifests.check_files(folder, manifest, content=True) == [
        f"{split}/{path.name}: content changed (SHA-256 differs from the manifest)"
    ]
    assert manifests.check_files(folder, manifest, content=False) == []


def test_missing_and_short_files_are_named_without_reading_the_data(folder):
    manifest = manifests.read(folder)
    chunks = sorted((folder / "train").glob("*.bin"))
    size = chunks[0].stat().st_size
    chunks[0].write_bytes(chunks[0].read_bytes()[:-3])
    chunks[1].unlink()
    (folder / "tokenizer.txt").unlink()
    (folder / "val" / "index.json").write_text("{")
    assert manifests.check_files(folder, manifest, content=False) == [
        f"train/{chunks[0].name}: {size - 3} bytes, expected {size}",
        f"train/{chunks[1].name}: missing",
        "val/index.json: damaged (JSONDecodeError('Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)'))",
        "tokenizer.txt: missing",
    ]


def test_a_file_that_cannot_be_read_is_named(folder, monkeypatch):
    manifest = manifests.read(folder)

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifests, "file_sha256", refuse)
    assert manifests.check_files(folder, manifest, content=False) == [
        "tokenizer.txt: cannot be read (Permission denied)"
    ]


def test_an_index_that_lists_other_chunks_is_found(folder):
    path = folder / "train" / "index.json"
    index = json.loads(path.read_text())
    index["chunks"].reverse()
    path.write_text(json.dumps(index))
    (folder / "val" / "index.json").unlink()
    (folder / "tokenizer.txt").write_text("other")
    assert manifests.check_files(folder, manifests.read(folder), content=False) == [
        "train/index.json: lists other chunks than the manifest",
        "val/index.json: missing",
        "tokenizer.txt: content changed (SHA-256 differs from the manifest)",
    ]


def test_every_key_but_the_machines_own_is_in_the_hash(folder):
    manifest = manifests.read(folder)
    for key in manifest:
        changed = copy.deepcopy(manifest)
        changed[key] = "other"
        assert (manifests.manifest_hash(changed) == manifest["hash"]) == (key in ("hash", "corpus")), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"rows": ', '"rows": 1', 1), "was changed after it was written"),
        (lambda text: text[:200], "is damaged"),
        (lambda text: "[]", "is damaged"),
        (lambda text: text.replace('"format": 1', '"format": 99'), "has format 99, but this version reads 1"),
    ],
)
def test_a_damaged_manifest_is_refused(folder, change, message):
    path = folder / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=message):
        manifests.read(folder)


def test_what_is_no_prepared_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="no prepared data at .*gone"):
        manifests.read(tmp_path / "gone")
    with pytest.raises(DataError, match="holds no manifest.json"):
        manifests.read(tmp_path)
