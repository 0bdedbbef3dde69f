"""Finding and opening files, by path and by URL."""

from __future__ import annotations

import gzip
import io

import fsspec
import pytest

from datamodules import files
from datamodules.errors import DataError


@pytest.fixture
def memory():
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pipe({"/corpus/a/one.txt": b"1", "/corpus/b/two.txt": b"22", "/corpus/b/note.md": b"-"})
    yield "memory://corpus"
    store.store.clear()


def test_urls_of_folders_globs_and_files(memory):
    assert [f.name for f in files.find([memory])] == ["a/one.txt", "b/note.md", "b/two.txt"]
    assert [f.name for f in files.find([memory], (".txt",))] == ["a/one.txt", "b/two.txt"]
    assert [f.name for f in files.find([memory + "/**/*.txt"])] == ["a/one.txt", "b/two.txt"]
    (one,) = files.find([memory + "/b/two.txt"])
    assert (one.name, one.size) == ("two.txt", 2)
    with files.open_binary(one.url) as stream:
        assert stream.read() == b"22"


def test_names_are_the_same_by_path_and_by_url(tmp_path):
    for name in ("a/x.txt", "b/y.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    by_path = files.find([str(tmp_path)])
    by_url = files.find([f"file://{tmp_path}"])
    assert (
        [(f.name, f.size) for f in by_path]
        == [(f.name, f.size) for f in by_url]
        == [("a/x.txt", 7), ("b/y.txt", 7)]
    )


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("1")
    assert [file.name for file in files.find(["~/a.txt"])] == ["a.txt"]


def test_stamps_change_with_content(memory, tmp_path):
    (tmp_path / "a").write_text("1")
    before = files.find([str(tmp_path)])[0].stamp
    (tmp_path / "a").write_text("2")
    assert files.find([str(tmp_path)])[0].stamp != before


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nothing/here", "no file at 'memory://nothing/here'"),
        ("nonsense://a/b", "cannot open nonsense://a/b: .*schemes are those of fsspec"),
    ],
)
def test_urls_that_lead_nowhere(url, message):
    with pytest.raises(DataError, match=message):
        files.find([url])


def test_a_scheme_without_its_package_names_the_package(monkeypatch):
    def missing(_):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(DataError, match="cannot open s3://bucket/x: Install s3fs"):
        files.find(["s3://bucket/x"])


def test_gzip_is_read_through(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    with files.open_decompressed(str(path)) as stream:
        assert stream.read() == b"one\ntwo\n"


class TestZstandard:
    @pytest.fixture
    def library(self):
        return pytest.importorskip("zstandard", reason="needs the extra `data`")

    def test_several_frames_are_one_stream(self, library, tmp_path):
        path = tmp_path / "a.zst"
        lines = b"".join(b"line %d\n" % i for i in range(50_000))
        path.write_bytes(library.compress(lines) + library.compress(b"last\n"))
        with files.open_decompressed(str(path)) as stream:
            assert stream.read() == lines + b"last\n"

    def test_a_truncated_stream_is_an_error(self, library, tmp_path):
        path = tmp_path / "a.zst"
        path.write_bytes(library.compress(bytes(range(256)) * 1000)[:-20])
        with files.open_decompressed(str(path)) as stream, pytest.raises(EOFError, match="truncated"):
            stream.read()


def test_zstandard_missing_names_the_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.zst").write_bytes(b"x")
    with pytest.raises(DataError, match=r"needs the package zstandard: pip install 'looped-lm\[data\]'"):
        files.open_decompressed(str(tmp_path / "a.zst"))


def test_a_folder_that_may_not_be_looked_at_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")

    def refuse(_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_file", refuse)
    with pytest.raises(DataError, match="cannot list .*: Permission denied"):
        files.find([str(tmp_path)])


def test_what_is_not_zstandard_is_a_data_error():
    class Library:
        class ZstdError(Exception):
            pass

        class ZstdDecompressor:
            def decompressobj(self):
                return self

            def decompress(self, data):
                raise Library.ZstdError("wrong magic")

    stream = io.BufferedReader(files._Zstandard(io.BytesIO(b"nonsense"), "a.zst", Library))
    with pytest.raises(DataError, match="a.zst is not zstandard data: wrong magic"):
        stream.readline()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot read .*gone: No such file"):
        files.open_binary(str(tmp_path / "gone"))
