"""Preparation as a whole: one hash whatever the workers, interruptions that cost nothing, and refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import datamodules.prepare as preparation
from datamodules import BPETokenizer, ByteTokenizer, PrepareSettings, TextFiles, corpora
from datamodules import manifest as manifests
from datamodules.errors import DataError
from datamodules.prepare import prepare
from datamodules.stages import document_digest, is_validation
from tests.support.data_samples import ListCorpus, made_up_texts, prepared, write_texts

SETTINGS = PrepareSettings(seq_len=32, val_fraction=0.2)


def texts_corpus(folder, count=120):
    return TextFiles([str(write_texts(folder, made_up_texts(count)))])


def run(corpus, out, settings=SETTINGS, tokenizer=None, workers=1):
    return prepare(corpus, tokenizer or BPETokenizer(300, 10_000), settings, out, workers, progress=False)


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(corpora, "_UNIT_BYTES", 2000)


def test_one_and_four_workers_give_the_same_data(tmp_path, small_units, monkeypatch):
    monkeypatch.setattr(preparation, "SHARD_TOKENS", 1500)
    corpus = texts_corpus(tmp_path / "texts")
    assert len(corpus.units()) > 4
    one, four = (run(corpus, tmp_path / str(workers), workers=workers) for workers in (1, 4))
    assert len(one["splits"]["train"]["chunks"]) > 1
    assert one["hash"] == four["hash"] == manifests.read(tmp_path / "4")["hash"]
    assert manifests.check_files(tmp_path / "4", four, content=True) == []
    files = [
        sorted(p.relative_to(d).as_posix() for p in d.rglob("*")) for d in (tmp_path / "1", tmp_path / "4")
    ]
    assert files[0] == files[1]
    assert not any(name.startswith(("units", "shards", "recipe")) for name in files[0])


def test_many_shards_hold_the_same_documents(tmp_path, small_units, monkeypatch):
    corpus = texts_corpus(tmp_path / "texts")
    whole = run(corpus, tmp_path / "whole", tokenizer=ByteTokenizer())
    monkeypatch.setattr(preparation, "SHARD_TOKENS", 5000)
    parts = run(corpus, tmp_path / "parts", tokenizer=ByteTokenizer())
    assert len(parts["splits"]["train"]["chunks"]) > 2
    for split in ("train", "val"):
        for key in ("documents", "tokens_in"):
            assert parts["splits"][split][key] == whole["splits"][split][key]
    assert manifests.check_files(tmp_path / "parts", parts, content=True) == []


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"seq_len": 31}, {"cut_documents": False}, {"packing_buffer": 3}]
)
def test_every_setting_changes_the_data(tmp_path, change):
    before, after = (
        prepared(tmp_path / name, count=80, **{"seq_len": 32, **settings})
        for name, settings in (("before", {}), ("after", change))
    )
    chunks = [[chunk["sha256"] for chunk in m["splits"]["train"]["chunks"]] for m in (before, after)]
    assert chunks[0] != chunks[1] and before["hash"] != after["hash"]


class Learner(ByteTokenizer):
    """Bytes, but remembers what it was trained on."""

    needs_training, train_characters = True, 10**9
    lessons: list[str] = []

    def train(self, documents, progress=False):
        Learner.lessons = list(documents)


def test_tokenizers_learn_from_training_documents_alone(tmp_path):
    texts = made_up_texts(100)
    run(ListCorpus(texts), tmp_path / "all", tokenizer=Learner())
    held_out = {text for text in texts if is_validation(document_digest(text), SETTINGS.val_fraction)}
    assert held_out and sorted(Learner.lessons) == sorted(set(texts) - held_out)


@pytest.mark.parametrize("progress", [False, True])
def test_tokenizers_learn_from_no_more_characters_than_asked(tmp_path, monkeypatch, progress):
    monkeypatch.setattr(Learner, "train_characters", 1000)
    prepare(ListCorpus(made_up_texts(100)), Learner(), SETTINGS, tmp_path / "some", progress=progress)
    characters = [len(text) for text in Learner.lessons]
    assert sum(characters[:-1]) < 1000 <= sum(characters)


class Interrupted(Exception):
    pass


class BrokenCorpus(ListCorpus):
    """Has a bug that shows as an error of the system."""

    def documents(self, unit):
        raise ConnectionResetError(104, "a bug of mine")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bug_in_a_corpus_of_ones_own_is_not_taken_for_a_full_disk(tmp_path, workers):
    with pytest.raises(ConnectionResetError, match="a bug of mine"):
        run(BrokenCorpus(made_up_texts(30)), tmp_path / "out", tokenizer=ByteTokenizer(), workers=workers)


class FailingCorpus(ListCorpus):
    """Stops at its n-th unit, and remembers which units were read."""

    def __init__(self, texts, fail_at):
        super().__init__(texts)
        self.fail_at, self.read = fail_at, []

    def documents(self, unit):
        if len(self.read) == self.fail_at:
            raise Interrupted
        self.read.append(unit.name)
        yield from unit.content


def test_a_restart_goes_on_from_the_finished_parts(tmp_path):
    texts = made_up_texts(100)
    expected = run(ListCorpus(texts), tmp_path / "whole", tokenizer=ByteTokenizer())
    corpus = FailingCorpus(texts, fail_at=6)
    with pytest.raises(Interrupted):
        run(corpus, tmp_path / "out", tokenizer=ByteTokenizer())
    assert not (tmp_path / "out").exists() and len(corpus.read) == 6
    corpus.read, corpus.fail_at = [], None
    assert run(corpus, tmp_path / "out", tokenizer=ByteTokenizer())["hash"] == expected["hash"]
    assert len(corpus.read) == 4
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("stage", ["write_index", "write_bytes_atomically", "_finish", "rename"])
def test_an_interruption_at_any_stage_costs_nothing(tmp_path, monkeypatch, stage):
    texts = made_up_texts(80)
    expected = run(ListCorpus(texts), tmp_path / "whole")
    with monkeypatch.context() as patch:

        def stop(*_, **__):
            raise Interrupted

        target, name = (os, "replace") if stage == "rename" else (preparation, stage)
        if stage == "rename":
            real = os.replace
            patch.setattr(
                os, "replace", lambda a, b: stop() if str(b) == str(tmp_path / "out") else real(a, b)
            )
        else:
            patch.setattr(target, name, stop)
        with pytest.raises(Interrupted):
            run(ListCorpus(texts), tmp_path / "out")
    assert run(ListCorpus(texts), tmp_path / "out")["hash"] == expected["hash"]
    assert manifests.check_files(tmp_path / "out", expected, content=True) == []


def test_prepared_data_is_reused_and_never_overwritten(tmp_path):
    corpus = FailingCorpus(made_up_texts(80), fail_at=None)
    first = run(corpus, tmp_path / "out", tokenizer=ByteTokenizer())
    corpus.read = []
    assert run(corpus, tmp_path / "out", tokenizer=ByteTokenizer()) == first and corpus.read == []
    with pytest.raises(
        DataError, match=r"already prepared with another recipe \(settings: .*'seq_len': 32.*asked"
    ):
        run(corpus, tmp_path / "out", PrepareSettings(seq_len=16), ByteTokenizer())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(DataError, match="mine exists and is not a prepared data set.*nothing was changed"):
        run(corpus, tmp_path / "mine", tokenizer=ByteTokenizer())
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file exists and is not a prepared data set"):
        run(corpus, tmp_path / "file", tokenizer=ByteTokenizer())


def test_an_interrupted_run_of_another_recipe_or_other_sources_is_not_mixed_in(
    tmp_path, small_units, monkeypatch
):
    corpus = texts_corpus(tmp_path / "texts")

    def interrupt(settings=SETTINGS):
        with monkeypatch.context() as patch:
            patch.setattr(preparation, "_pack", lambda *_: (_ for _ in ()).throw(Interrupted()))
            with pytest.raises(Interrupted):
                run(corpus, tmp_path / "out", settings, ByteTokenizer())

    interrupt()
    interrupt(PrepareSettings(seq_len=8))
    (tmp_path / "texts" / "0003.txt").write_text("changed")
    interrupt()
    assert len(list(tmp_path.glob("out.*.partial"))) == 3
    manifest = run(corpus, tmp_path / "out", tokenizer=ByteTokenizer())
    assert manifest["hash"] == run(corpus, tmp_path / "again", tokenizer=ByteTokenizer())["hash"]
    # With the data there, nobody can go on with the others.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "again.lock", "out", "out.lock", "texts"]


def test_two_at_once_prepare_once(tmp_path, capsys):
    corpora_read = [FailingCorpus(made_up_texts(80), fail_at=None) for _ in range(3)]
    hashes = []

    together = threading.Barrier(3)

    def start(corpus):
        together.wait()
        hashes.append(prepare(corpus, ByteTokenizer(), SETTINGS, tmp_path / "out")["hash"])

    threads = [threading.Thread(target=start, args=(corpus,)) for corpus in corpora_read]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hashes) == 3 and len(set(hashes)) == 1
    assert sorted(len(corpus.read) for corpus in corpora_read) == [0, 0, 8]
    assert capsys.readouterr().err.count("another process is preparing") == 2


@pytest.mark.parametrize(
    ("texts", "settings", "message"),
    [
        ([], {}, "the corpus list is empty"),
        (["", ""], {}, r"gave no document with any text \(2 empty ones\)"),
        (
            ["short"],
            {},
            "the (train|val) split has no full row: .*Documents are held out whole.*smaller seq_len",
        ),
        (made_up_texts(40), {"seq_len": 10**5}, "the train split has no full row"),
        (made_up_texts(40), {"val_fraction": 1e-9}, "the val split has no full row: 0 documents"),
    ],
)
def test_corpora_that_give_no_rows_are_refused(tmp_path, texts, settings, message):
    recipe = PrepareSettings(**{"seq_len": 32, "val_fraction": 0.2, **settings})
    with pytest.raises(DataError, match=message):
        run(ListCorpus(texts), tmp_path / "out", recipe, ByteTokenizer())
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot read or write .*file"):
        run(ListCorpus(made_up_texts(9)), tmp_path / "file" / "out", tokenizer=ByteTokenizer())
    with pytest.raises(DataError, match="workers is 0"):
        run(ListCorpus(made_up_texts(9)), tmp_path / "out", workers=0)


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path, monkeypatch):
    import datamodules.stages as stages

    texts = made_up_texts(80)
    expected = run(ListCorpus(texts), tmp_path / "whole", tokenizer=ByteTokenizer())
    written = []

    def full(path, content):
        if len(written) > 5:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        real(path, content)

    real = stages.write_bytes_atomically
    with monkeypatch.context() as patch:
        patch.setattr(stages, "write_bytes_atomically", full)
        with pytest.raises(
            DataError, match="cannot read or write .*out.*partial.*: No space left.*run again"
        ):
            run(ListCorpus(texts), tmp_path / "out", tokenizer=ByteTokenizer())
    assert run(ListCorpus(texts), tmp_path / "out", tokenizer=ByteTokenizer())["hash"] == expected["hash"]


@pytest.mark.slow
def test_twelve_workers_give_the_same_data(tmp_path, small_units, monkeypatch):
    monkeypatch.setattr(preparation, "SHARD_TOKENS", 400)
    corpus = texts_corpus(tmp_path / "texts")
    one, twelve = (run(corpus, tmp_path / str(workers), workers=workers) for workers in (1, 12))
    assert len(one["splits"]["train"]["chunks"]) > 3
    assert one["hash"] == twelve["hash"] == manifests.read(tmp_path / "12")["hash"]


@pytest.mark.slow
def test_the_embedded_corpus_killed_in_the_middle_and_with_1_and_4_workers(tmp_path):
    """The whole standard library with the trained BPE: twice through, and killed with SIGKILL at two
    moments."""
    command = [sys.executable, "-m", "datamodules", "prepare", "--source", "stdlib"]
    command += ["--tokenizer", "bpe:1024", "--out"]
    for workers in ("1", "4"):
        subprocess.run([*command, str(tmp_path / workers), "--workers", workers], check=True)
    hashes = {manifests.read(tmp_path / workers)["hash"] for workers in ("1", "4")}
    killed = tmp_path / "killed"
    for finished in (3, 20):
        process = subprocess.Popen([*command, str(killed), "--workers", "2"], stderr=subprocess.DEVNULL)
        while len(list(tmp_path.glob("killed.*.partial/units/*.npz"))) < finished:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kept = len(list(tmp_path.glob("killed.*.partial/units/*.npz")))
        assert finished <= kept and not killed.exists()
    subprocess.run([*command, str(killed)], check=True)
    hashes.add(manifests.read(killed)["hash"])
    assert len(hashes) == 1
    assert manifests.check_files(killed, manifests.read(killed), content=True) == []
