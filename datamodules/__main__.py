"""python -m datamodules prepare | inspect | verify"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.errors import DataError

if TYPE_CHECKING:
    from datamodules.corpora import Corpus
    from datamodules.tokenizers import Tokenizer


def parser() -> argparse.ArgumentParser:
    """The argument parser of all three commands."""
    top = argparse.ArgumentParser(
        prog="python -m datamodules", description="Prepare text for training, inspect it, and verify it."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="{prepare,inspect,verify}")

    prepare = commands.add_parser(
        "prepare",
        help="text -> packed rows of tokens",
        description="Tokenize and pack a corpus into a folder that `data.data_dir` reads. When an interrupted "
        "run is started again, it continues where it stopped. The result is the same for any number of workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = prepare.add_argument
    option(
        "--source",
        nargs="+",
        required=True,
        help="stdlib (Python's own source); or dataset:NAME[:CONFIG] of the Hugging Face hub; or files, folders, "
        "globs or URLs (s3://, gs://, hf://), whose ending says what they are: JSON lines (.jsonl .ndjson .json, "
        "also with .gz or .zst), .parquet, or otherwise one text per file",
    )
    option("--text-key", default="text", help="key or column that holds the text")
    option("--split", default="train", help="split of a Hugging Face dataset")
    option("--revision", help="commit or tag of a Hugging Face dataset or tokenizer")
    option("--skip-undecodable", action="store_true", help="leave out text files that are not UTF-8")
    option(
        "--tokenizer",
        default="bpe:1024",
        help="bytes, bpe:VOCAB_SIZE (trained on the source), a tokenizer.json, a sentencepiece .model, or "
        "hub:NAME",
    )
    option(
        "--bos-token", help="token to put before documents, if a tokenizer.json has none of the usual ones"
    )
    option("--seq-len", type=int, default=256, help="T; rows hold T + 1 tokens")
    option("--out", type=Path, required=True, help="folder to create")
    option("--workers", type=int, default=1, help="number of processes")
    option("--seed", type=int, default=0, help="seed of the document shuffle")
    option("--val-fraction", type=float, default=0.05, help="share of documents held out")
    option("--packing-buffer", type=int, default=1000, help="documents that wait for a row at once")
    option(
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
    """The corpus that --source names."""
    from datamodules.corpora import StdlibCorpus, TextFiles
    from datamodules.tabular import HuggingFaceDataset, JSONLines, ParquetFiles

    def kind_of(source: str) -> str:
        if source.startswith("dataset:"):
            return "a dataset"
        if source.endswith(JSONLines.SUFFIXES):
            return "JSON lines"
        if source.endswith(".parquet"):
            return "parquet"
        return "stdlib" if source == "stdlib" else "text files"

    sources, key = arguments.source, arguments.text_key
    kind, *others = sorted({kind_of(source) for source in sources})
    if others:
        raise DataError(
            f"--source mixes {' and '.join([kind, *others])}: give sources of one kind, or prepare them one by one"
        )
    if arguments.skip_undecodable and kind != "text files":
        raise DataError(f"--skip-undecodable is for text files, but the source is {kind}")
    if kind in ("stdlib", "a dataset") and len(sources) > 1:
        raise DataError(f"--source {' '.join(sources)}: only one {kind.removeprefix('a ')} can be given")
    if kind == "stdlib":
        return StdlibCorpus()
    if kind == "a dataset":
        _, name, *config = sources[0].split(":")
        return HuggingFaceDataset(
            name, config[0] if config else None, arguments.split, key, arguments.revision
        )
    if kind == "text files":
        return TextFiles(sources, arguments.skip_undecodable)
    return JSONLines(sources, key) if kind == "JSON lines" else ParquetFiles(sources, key)


def make_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer that --tokenizer names."""
    from datamodules.tokenizer_files import FileTokenizer, HubTokenizer, SentencePieceTokenizer
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
        f"--tokenizer {given}: give bytes, bpe:VOCAB_SIZE, a tokenizer.json, a sentencepiece .model, or hub:NAME"
    )


def run_prepare(arguments: argparse.Namespace) -> int:
    """Prepare a folder and say what it holds."""
    import dataclasses

    from datamodules.prepare import prepare
    from datamodules.recipe import PrepareSettings

    names = [field.name for field in dataclasses.fields(PrepareSettings)]
    settings = PrepareSettings(**{name: getattr(arguments, name) for name in names})
    corpus, tokenizer = make_corpus(arguments), make_tokenizer(arguments)
    if arguments.out.exists():
        print("already prepared; whether the sources have changed is not checked", file=sys.stderr)
    manifest = prepare(corpus, tokenizer, settings, arguments.out, arguments.workers)
    print(summary(arguments.out, manifest))
    return 0


def run_inspect(arguments: argparse.Namespace) -> int:
    """Say what a folder holds, and show some of its rows as text."""
    from datamodules import manifest as manifests
    from datamodules.storage import Rows
    from datamodules.tokenizers import load_tokenizer

    folder, split, start, count = arguments.folder, arguments.part, arguments.start, arguments.rows
    manifest = manifests.read(folder)
    print(summary(folder, manifest))
    available = manifest["splits"][split]["rows"]
    if count < 0 or not 0 <= start < available:
        raise DataError(
            f"--start {start} --rows {count}: {split} has rows 0 to {available - 1}; give some of those"
        )
    tokenizer = load_tokenizer(folder, manifest["tokenizer"]["settings"])
    rows = Rows(folder / split, manifest["settings"]["seq_len"] + 1, available)
    for number in range(start, min(start + count, available)):
        row = rows[number]
        begins = [i for i, token in enumerate(row) if token == tokenizer.bos_id]
        print(f"--- {split} row {number}: documents begin at {begins or 'none'}")
        print(tokenizer.decode(row.tolist()))
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Compare a folder with its manifest; exit status 1 when anything differs."""
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


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """Counts, fill, entropy and hash of a prepared folder, one line each."""
    settings, tokenizer = manifest["settings"], manifest["tokenizer"]
    cut = "cut to rows" if settings["cut_documents"] else "not cut"
    lines = [
        f"{folder}",
        f"  hash       {manifest['hash']}",
        f"  tokenizer  {tokenizer['name']}, {tokenizer['vocab_size']} ids, BOS {tokenizer['bos_id']}",
        f"  rows       of {settings['seq_len']} + 1 tokens; documents {cut}, buffer "
        f"{settings['packing_buffer']}, seed {settings['seed']}",
        f"  entropy    {manifest['val_unigram_entropy']:.4f} nats/token (unigram, validation targets; uniform "
        f"{math.log(tokenizer['vocab_size']):.4f})",
    ]
    for split, part in manifest["splits"].items():
        lines.append(
            f"  {split:<10} {part['documents']:,} documents, {part['tokens_in']:,} tokens -> "
            f"{part['rows']:,} rows, {part['tokens']:,} tokens ({part['fill']:.2%} kept, "
            f"{part['tokens_cropped']:,} cropped, {part['tokens_unfilled']:,} in a last unfilled row), "
            f"chunks: {len(part['chunks'])}"
        )
    if manifest["documents_empty"]:
        lines.append(f"  left out   {manifest['documents_empty']:,} documents without a token")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run a command; a DataError is one message on stderr and exit status 1."""
    arguments = parser().parse_args(argv)
    command = {"prepare": run_prepare, "inspect": run_inspect, "verify": run_verify}[arguments.command]
    try:
        return command(arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(
            "interrupted: what was finished is kept; run the same command again to continue", file=sys.stderr
        )
        return 130
    except BrokenPipeError:
        pass
    return 1


if __name__ == "__main__":
    sys.exit(main())
