"""Plain-file corpora: the same documents in the same order, wherever they lie."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from datamodules import StdlibCorpus, TextFiles, corpora
from datamodules.errors import DataError
from tests.support.data_samples import made_up_texts, write_texts


def all_documents(corpus):
    return [text for unit in corpus.units() for text in corpus.documents(unit)]


def test_the_standard_library_is_there_whole_and_in_order():
    corpus = StdlibCorpus()
    files = corpus.files()
    names = [file.name for file in files]
    assert names == sorted(names) and len(set(names)) == len(names) > 500
    assert "json/decoder.py" in names and not any("site-packages" in name for name in names)
    units = corpus.units()
    assert [file.name for unit in units for file in unit.content] == names
    wanted = next(unit for unit in units for file in unit.content if file.name == "json/decoder.py")
    source = Path(sysconfig.get_paths()["stdlib"], "json", "decoder.py").read_text()
    assert source in list(corpus.documents(wanted))


def test_the_standard_library_is_decoded_as_python_does():
    corpus = StdlibCorpus()
    assert corpus.decode("a.py", "# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1")).endswith("'é'\n")
    assert corpus.decode("a.py", b"x = '\xff'\n") is None
    assert corpus.decode("a.py", b"# coding: nonsense\n") is None


def test_files_folders_and_globs_give_each_file_once(tmp_path):
    texts = made_up_texts(12)
    folder = write_texts(tmp_path / "a", texts)
    corpus = TextFiles([str(folder), str(folder / "000?.txt"), str(folder / "0003.txt")])
    assert all_documents(corpus) == texts


def test_units_follow_sizes_and_not_the_place_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "_UNIT_BYTES", 500)
    texts = made_up_texts(30)
    here = TextFiles([str(write_texts(tmp_path / "here", texts))])
    there = TextFiles([str(write_texts(tmp_path / "deep" / "down", texts))])
    names = [unit.name for unit in here.units()]
    assert len(names) > 3 and names == [unit.name for unit in there.units()]
    assert names[0].startswith("0000.txt .. ")
    assert all_documents(here) == all_documents(there) == texts


def test_the_stamp_changes_with_the_files(tmp_path):
    folder = write_texts(tmp_path / "a", made_up_texts(3))
    before = TextFiles([str(folder)]).stamp()
    assert TextFiles([str(folder)]).stamp() == before
    (folder / "0001.txt").write_text("other")
    assert TextFiles([str(folder)]).stamp() != before


def test_what_is_not_text_is_refused_or_skipped(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(
        DataError, match=r"image.txt is not UTF-8 text \(byte 0x89 at offset 0\).*skip_undecodable"
    ):
        all_documents(TextFiles([str(tmp_path)]))
    (tmp_path / "image.txt").write_bytes(b"a\0b")
    with pytest.raises(DataError, match="image.txt is not UTF-8 text .it contains NUL bytes"):
        all_documents(TextFiles([str(tmp_path)]))
    assert all_documents(TextFiles([str(tmp_path)], skip_undecodable=True)) == ["good"]


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(DataError, match="no file at .*gone.*txt'"):
        TextFiles([str(tmp_path / "gone*.txt")]).units()
    with pytest.raises(DataError, match=r"TextFiles\(paths=\[\]\)"):
        TextFiles([])
    with pytest.raises(DataError, match="give a list"):
        TextFiles("a.txt")


def test_a_file_that_vanishes_is_named(tmp_path):
    corpus = TextFiles([str(write_texts(tmp_path / "a", ["one", "two"]))])
    units = corpus.units()
    (tmp_path / "a" / "0001.txt").unlink()
    with pytest.raises(DataError, match="cannot read .*0001.txt: No such file"):
        list(corpus.documents(units[0]))
