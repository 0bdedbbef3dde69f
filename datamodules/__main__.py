"""python -m datamodules prepare | inspect | verify"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from datamodules.errors import DataError

if TYPE_CHECKING:
    from datamodules.corpora import Corpus
    from datamodules.tokenizers import Tokenizer

_JSON_ENDINGS = (
    ".jsonl",
    ".ndjson",
    ".json",
    ".jsonl.gz",
    ".ndjson.gz",
    ".json.gz",
    ".jsonl.zst",
    ".ndjson.zst",
)


def parser() -> argparse.ArgumentParser:
    """The argument parser of all three commands."""
    top = argparse.ArgumentParser(
        prog="python -m datamodules", description="Prepare text for training, look at it, and check it."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="{prepare,inspect,verify}")

    prepare = commands.add_parser(
        "prepare",
        help="text -> packed rows of tokens",
        description="Tokenize and pack a corpus into a folder that `data.data_dir` reads. An interrupted "
        "run goes on "
        "where it stopped when it is started again. The result is the same for any number of workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    prepare.add_argument(
        "--source",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="stdlib (Python's own source), or files, folders, globs or URLs (s3://, gs://, hf://): by "
        "their ending JSON "
        "lines (.jsonl .ndjson .json, also .gz .zst), parquet, or else one text per file; or "
        "dataset:NAME[:CONFIG] of the Hugging Face hub",
    )
    prepare.add_argument("--text-key", default="text", help="key or column that holds the text")
    prepare.add_argument("--split", default="train", help="split of a Hugging Face dataset")
    prepare.add_argument("--revision", help="commit or tag of a Hugging Face dataset or tokenizer")
    prepare.add_argument(
        "--skip-undecodable", action="store_true", help="leave out text files that are not UTF-8"
    )
    prepare.add_argument(
        "--tokenizer",
        default="bpe:1024",
        help="bytes, bpe:VOCAB_SIZE (trained on the source), a tokenizer.json, a sentencepiece .model, or "
        "hub:NAME",
    )
    prepare.add_argument(
        "--bos-token", help="token to put before documents, where a tokenizer.json does not tell"
    )
    prepare.add_argument("--seq-len", type=int, default=256, help="T; rows hold T + 1 tokens")
    prepare.add_argument("--out", type=Path, required=True, help="folder to create")
    prepare.add_argument("--workers", type=int, default=1, help="processes")
    prepare.add_argument("--seed", type=int, default=0, help="of the document shuffle")
    prepare.add_argument("--val-fraction", type=float, default=0.05, help="share of documents held out")
    prepare.add_argument("--packing-buffer", type=int, default=1000, help="documents that wait for a row")
    prepare.add_argument(
        "--cut-documents",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cut documents into pieces of a row's length first (the paper does not)",
    )

    inspect = commands.add_parser("inspect", help="what a prepared folder holds, and some rows as text")
    inspect.add_argument("folder", type=Path)
    inspect.add_argument("--rows", type=int, default=3, help="how many rows to show")
    inspect.add_argument("--start", type=int, default=0, help="the first row to show")
    inspect.add_argument("--part", choices=("train", "val"), default="train")

    verify = commands.add_parser("verify", help="compare every hash of a prepared folder with its manifest")
    verify.add_argument("folder", type=Path)
    return top


def make_corpus(arguments: argparse.Namespace) -> Corpus:
    """The corpus that --source means.

    Raises:
        DataError: several sources of different kinds, or an option that the kind does not have.
    """
    from datamodules.corpora import StdlibCorpus, TextFiles
    from datamodules.records import HuggingFaceDataset, JSONLines, ParquetFiles

    kinds = {_kind(source) for source in arguments.source}
    if len(kinds) > 1:
        raise DataError(
            f"--source mixes {' and '.join(sorted(kinds))}: give sources of one kind, or prepare them one "
            "by one"
        )
    (kind,) = kinds
    if arguments.skip_undecodable and kind != "text files":
        raise DataError(f"--skip-undecodable is for text files, but the source is {kind}")
    if kind in ("stdlib", "a dataset") and len(arguments.source) > 1:
        raise DataError(f"--source {' '.join(arguments.source)}: only one {kind} can be given")
    if kind == "stdlib":
        return StdlibCorpus()
    if kind == "a dataset":
        _, name, *config = arguments.source[0].split(":")
        return HuggingFaceDataset(
            name, config[0] if config else None, arguments.split, arguments.text_key, arguments.revision
        )
    if kind == "JSON lines":
        return JSONLines(arguments.source, arguments.text_key)
    if kind == "parquet":
        return ParquetFiles(arguments.source, arguments.text_key)
    return TextFiles(arguments.source, arguments.skip_undecodable)


def _kind(source: str) -> str:
    if source == "stdlib":
        return "stdlib"
    if source.startswith("dataset:"):
        return "a dataset"
    if source.endswith(_JSON_ENDINGS):
        return "JSON lines"
    return "parquet" if source.endswith(".parquet") else "text files"


def make_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer that --tokenizer means.

    Raises:
        DataError: none of the known forms, or its file is missing or damaged.
    """
    from datamodules.pretrained import FileTokenizer, HubTokenizer, SentencePieceTokenizer
    from datamodules.tokenizers import BPETokenizer, ByteTokenizer

    given: str = arguments.tokenizer
    if given.startswith("hub:"):
        return HubTokenizer(given.removeprefix("hub:"), arguments.revision, arguments.bos_token)
    if given.endswith(".json"):
        return FileTokenizer(given, arguments.bos_token)
    if arguments.bos_token is not None:
        raise DataError(f"--bos-token is for a tokenizer.json, but the tokenizer is {given}")
    if given == "bytes":
        return ByteTokenizer()
    if given.endswith(".model"):
        return SentencePieceTokenizer(given)
    kind, _, size = given.partition(":")
    if kind == "bpe" and size.isdigit():
        return BPETokenizer(int(size))
    raise DataError(
        f"--tokenizer {given}: give bytes, bpe:VOCAB_SIZE, a tokenizer.json, a sentencepiece .model, or "
        "hub:NAME"
    )


def run_prepare(arguments: argparse.Namespace) -> int:
    """prepare: returns the exit status."""
    from datamodules.prepare import prepare
    from datamodules.report import summary
    from datamodules.settings import PrepareSettings

    settings = PrepareSettings(
        arguments.seq_len,
        arguments.val_fraction,
        arguments.cut_documents,
        arguments.packing_buffer,
        arguments.seed,
    )
    corpus, tokenizer = make_corpus(arguments), make_tokenizer(arguments)
    if arguments.out.exists():
        print("already there; the sources are not compared with what it was prepared from", file=sys.stderr)
    manifest = prepare(corpus, tokenizer, settings, arguments.out, arguments.workers)
    print(summary(arguments.out, manifest))
    return 0


def run_inspect(arguments: argparse.Namespace) -> int:
    """inspect: returns the exit status."""
    from datamodules import manifest as manifests
    from datamodules.report import shown_rows, summary

    manifest = manifests.read(arguments.folder)
    print(summary(arguments.folder, manifest))
    for line in shown_rows(arguments.folder, manifest, arguments.part, arguments.start, arguments.rows):
        print(line)
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """verify: returns the exit status, 1 when anything differs."""
    from datamodules import manifest as manifests

    manifest = manifests.read(arguments.folder)
    faults = manifests.check_files(arguments.folder, manifest, content=True)
    for fault in faults:
        print(f"{arguments.folder}: {fault}", file=sys.stderr)
    if faults:
        print("Restore the files named above, or prepare the data again.", file=sys.stderr)
        return 1
    chunks = sum(len(part["chunks"]) for part in manifest["splits"].values())
    print(f"{arguments.folder}: {chunks} chunks, index, tokenizer and manifest are as they were written")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run a command; errors of input or data are one message on stderr and exit status 1."""
    arguments = parser().parse_args(argv)
    command = {"prepare": run_prepare, "inspect": run_inspect, "verify": run_verify}[arguments.command]
    try:
        return command(arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: finished parts are kept, run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        pass
    return 1


if __name__ == "__main__":
    sys.exit(main())
