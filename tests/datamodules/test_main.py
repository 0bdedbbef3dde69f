"""python -m datamodules: what it prints, what it refuses, and how fast it answers."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from datamodules import (
    BPETokenizer,
    HuggingFaceDataset,
    JSONLines,
    ParquetFiles,
    StdlibCorpus,
    TextFiles,
    storage,
)
from datamodules import manifest as manifests
from datamodules.__main__ import main, make_corpus, make_tokenizer, parser
from tests.support.data_samples import made_up_texts, write_texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return str(write_texts(tmp_path_factory.mktemp("corpus") / "texts", made_up_texts(80)))


@pytest.fixture(scope="module")
def original(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "set"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "CHUNK_BYTES", 2000)
        assert main([*prepare_arguments(texts, out), "--tokenizer", "bytes"]) == 0
    return out


def prepare_arguments(source, out):
    return ["prepare", "--source", source, "--out", str(out), "--seq-len", "32", "--val-fraction", "0.2"]


def said(capsys):
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_prepare_shows_progress_and_ends_with_a_summary(texts, tmp_path, capsys):
    assert main([*prepare_arguments(texts, tmp_path / "out"), "--tokenizer", "bpe:300", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    manifest = manifests.read(tmp_path / "out")
    train = manifest["splits"]["train"]
    for expected in (
        manifest["hash"],
        f"{train['documents']:,} documents",
        f"{train['rows']:,} rows",
        "% kept",
        f"{train['tokens_cropped']:,} cropped",
        f"entropy    {manifest['val_unigram_entropy']:.4f}",
        "seed 3",
    ):
        assert expected in captured.out
    assert "tokenize: 100%" in captured.err and "pack: 100%" in captured.err and "tokens/s" in captured.err
    assert main([*prepare_arguments(texts, tmp_path / "out"), "--tokenizer", "bpe:300", "--seed", "3"]) == 0
    output = said(capsys)
    assert manifest["hash"] in output and "already prepared" in output and "tokenize:" not in output


def test_inspect_shows_rows_as_text(original, capsys):
    assert main(["inspect", str(original), "--rows", "2", "--start", "1"]) == 0
    output = said(capsys)
    assert "--- train row 1: documents begin at [0" in output and "--- train row 2" in output
    assert output.count("<|bos|>") >= 2 and "row 3" not in output
    assert main(["inspect", str(original), "--part", "val", "--rows", "1"]) == 0
    assert "--- val row 0" in said(capsys)


@pytest.mark.parametrize("options", [["--start", "99999"], ["--start", "-1"], ["--rows", "-2"]])
def test_inspect_of_rows_that_do_not_exist(original, capsys, options):
    assert main(["inspect", str(original), *options]) == 1
    assert "train has rows 0 to " in said(capsys)


def test_verify_names_the_damaged_chunk(original, tmp_path, capsys):
    folder = shutil.copytree(original, tmp_path / "set")
    assert main(["verify", str(folder)]) == 0
    assert "are as they were written" in said(capsys)
    chunk = sorted((folder / "train").glob("*.bin"))[1]
    content = bytearray(chunk.read_bytes())
    content[777] ^= 1
    chunk.write_bytes(content)
    assert main(["verify", str(folder)]) == 1
    output = said(capsys)
    assert f"train/{chunk.name}: content changed" in output and "prepare the data again" in output
    assert output.count(".bin") == 1


BAD_INPUT = [
    (["prepare", "--source", "{tmp}/gone.txt", "--out", "{tmp}/o"], "no file at '{tmp}/gone.txt'"),
    (["prepare", "--source", "{tmp}/no/*.jsonl", "--out", "{tmp}/o"], "no file ending in .jsonl"),
    (
        ["prepare", "--source", "{tmp}/bin.txt", "--out", "{tmp}/o", "--tokenizer", "bytes"],
        "bin.txt is not UTF-8 text",
    ),
    (
        ["prepare", "--source", "{tmp}/bad.jsonl", "--out", "{tmp}/o", "--tokenizer", "bytes"],
        "bad.jsonl, line 1: not JSON",
    ),
    (
        ["prepare", "--source", "{tmp}/a.jsonl", "--out", "{tmp}/o", "--tokenizer", "bytes"],
        "no key 'text'; it has 'body'",
    ),
    (["prepare", "--source", "stdlib", "a.txt", "--out", "{tmp}/o"], "--source mixes stdlib and text files"),
    (["prepare", "--source", "stdlib", "stdlib", "--out", "{tmp}/o"], "only one stdlib can be given"),
    (
        ["prepare", "--source", "stdlib", "--skip-undecodable", "--out", "{tmp}/o"],
        "--skip-undecodable is for text files",
    ),
    (
        ["prepare", "--source", "{tmp}/empty", "--out", "{tmp}/o", "--tokenizer", "bytes"],
        "gave no document with any text",
    ),
    (
        ["prepare", "--source", "stdlib", "--out", "{tmp}/o", "--tokenizer", "gpt9"],
        "--tokenizer gpt9: give bytes, bpe:",
    ),
    (
        ["prepare", "--source", "stdlib", "--out", "{tmp}/o", "--tokenizer", "bpe:100"],
        "need at least 257 ids",
    ),
    (
        ["prepare", "--source", "stdlib", "--out", "{tmp}/o", "--tokenizer", "{tmp}/no.json"],
        "no tokenizer file at {tmp}/no.json",
    ),
    (
        ["prepare", "--source", "stdlib", "--out", "{tmp}/o", "--tokenizer", "bytes", "--bos-token", "x"],
        "--bos-token is for",
    ),
    (["prepare", "--source", "stdlib", "--out", "{tmp}/o", "--seq-len", "-4"], "seq_len is -4"),
    (["prepare", "--source", "stdlib", "--out", "{tmp}/o", "--val-fraction", "2"], "val_fraction is 2.0"),
    (["prepare", "--source", "stdlib", "--out", "{tmp}/o", "--workers", "0"], "workers is 0"),
    (["prepare", "--source", "stdlib", "--out", "{tmp}/bin.txt/o"], "cannot read or write {tmp}/bin.txt"),
    (["prepare", "--source", "stdlib", "--out", "{tmp}"], "{tmp} exists and is not a prepared data set"),
    (["inspect", "{tmp}/gone"], "no prepared data at {tmp}/gone"),
    (["verify", "{tmp}"], "{tmp} holds no manifest.json"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_one_clear_message(tmp_path, capsys, arguments, message):
    (tmp_path / "bin.txt").write_bytes(b"\x89PNG")
    (tmp_path / "bad.jsonl").write_text("nonsense\n")
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 1
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert message.format(tmp=tmp_path) in line
    assert "Traceback" not in captured.err and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["nope"], "invalid choice"),
        (["prepare", "--source", "a"], "--out"),
        (["verify", "a", "-x"], "unrecognized"),
    ],
)
def test_bad_usage_is_argparse_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and message in said(capsys)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("stdlib", StdlibCorpus),
        ("a/b.txt", TextFiles),
        ("s3://bucket/x/*.jsonl.zst", JSONLines),
        ("hf://datasets/a/b/*.parquet", ParquetFiles),
        ("dataset:HuggingFaceFW/fineweb-edu:sample-10BT", HuggingFaceDataset),
    ],
)
def test_sources_by_their_form(source, kind):
    arguments = parser().parse_args(["prepare", "--source", source, "--out", "o", "--text-key", "body"])
    corpus = make_corpus(arguments)
    assert type(corpus) is kind
    if kind is HuggingFaceDataset:
        assert (corpus.path, corpus.config, corpus.text_column) == (
            "HuggingFaceFW/fineweb-edu",
            "sample-10BT",
            "body",
        )
    if kind in (JSONLines, ParquetFiles):
        assert corpus.paths == [source] and "body" in corpus.settings().values()


def test_a_tokenizer_by_its_form():
    arguments = parser().parse_args(
        ["prepare", "--source", "stdlib", "--out", "o", "--tokenizer", "bpe:1024"]
    )
    tokenizer = make_tokenizer(arguments)
    assert type(tokenizer) is BPETokenizer and tokenizer.vocab_size == 1024


def test_help_and_usage_errors_load_nothing_heavy():
    code = (
        "import sys\nfrom datamodules.__main__ import main\n"
        "for arguments in (['--help'], ['prepare', '--help'], ['nope']):\n"
        "    try:\n        main(arguments)\n    except SystemExit:\n        pass\n"
        "import datamodules\n"
        "print([m for m in ('torch', 'lightning', 'litdata', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip().endswith("[]") and "--seq-len" in output
