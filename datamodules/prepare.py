"""Preparation: corpus -> tokens -> packed rows on disk, restartable, the same for any number of workers."""

from __future__ import annotations

import glob
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from datamodules import manifest as manifests
from datamodules.corpora import Corpus, Unit
from datamodules.errors import DataError
from datamodules.recipe import recipe
from datamodules.settings import PrepareSettings, sha256_of
from datamodules.stages import (
    SPLITS,
    Job,
    clean,
    document_digest,
    is_validation,
    pack_shard,
    read_counts,
    read_marker,
    shuffle_key,
    tokenize_unit,
)
from datamodules.storage import ASIDE, write_atomically, write_index
from datamodules.tokenizers import Tokenizer
from datamodules.workers import run_jobs

_PARTIAL = ".partial"

SHARD_TOKENS = 2**27
"""Tokens shuffled and packed in one piece (and held in memory by one worker): 134M, 268 MB at two bytes
each."""


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    settings: PrepareSettings,
    out: str | os.PathLike[str],
    workers: int = 1,
    progress: bool = True,
) -> dict[str, Any]:
    """Prepare `out` and return its manifest; where it is already prepared with this recipe, only return it.

    The work happens in `<out>.<recipe>.partial` and is renamed at the end, so `out` exists only when it is
    whole. A run that was interrupted leaves that folder, and the next one with the same recipe and sources goes
    on from its finished parts; once `out` is there, such folders are removed. A lock beside it keeps two
    processes from preparing the same folder: the second waits and then finds it done.

    Args:
        workers: processes; with 1 everything runs in this process (the tokenizer may still use threads).
        progress: show progress bars and a summary on stderr.

    Raises:
        DataError: anything wrong with the sources or settings, `out` taken by something else, or a full disk.
    """
    if workers < 1:
        raise DataError(f"workers is {workers}; it counts processes and must be at least 1")
    out = Path(out).absolute()
    if out.exists():
        # Whole, since it was renamed: nothing to wait for, and no need to be able to write here.
        return _existing(out, corpus, tokenizer, settings)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out, progress):
            if out.exists():
                return _existing(out, corpus, tokenizer, settings)
            return _prepare(corpus, tokenizer, settings, out, workers, progress)
    except OSError as error:
        raise DataError(
            f"cannot read or write {error.filename or out}: {error.strerror}. What was finished is kept; "
            "run again with room and rights to write, or choose another folder"
        ) from error


def _existing(out: Path, corpus: Corpus, tokenizer: Tokenizer, settings: PrepareSettings) -> dict[str, Any]:
    if not (out / manifests.MANIFEST).is_file():
        raise DataError(
            f"{out} exists and is no prepared data set: choose another folder, nothing was changed"
        )
    found = manifests.read(out)
    stored = {
        "format": found["format"],
        "corpus": found["corpus"],
        "tokenizer": found["tokenizer"]["settings"],
        "settings": found["settings"],
    }
    wanted = recipe(corpus, tokenizer, settings)
    if not manifests.same(stored, wanted):
        differing = [key for key in wanted if not manifests.same(stored[key], wanted[key])]
        details = "; ".join(f"{key}: {stored[key]} there, {wanted[key]} asked" for key in differing)
        raise DataError(f"{out} is already prepared with another recipe ({details}): choose another folder")
    return found


def _prepare(
    corpus: Corpus, tokenizer: Tokenizer, settings: PrepareSettings, out: Path, workers: int, progress: bool
) -> dict[str, Any]:
    units = corpus.units()
    if not units:
        raise DataError(f"the corpus {corpus.name} is empty: {corpus.settings()}")
    plan = [recipe(corpus, tokenizer, settings), corpus.stamp(), [unit.name for unit in units]]
    work = out.with_name(f"{out.name}.{sha256_of(plan)[:8]}{_PARTIAL}")
    for name in ("units", "shards", *SPLITS):
        (work / name).mkdir(parents=True, exist_ok=True)
    if not (work / manifests.MANIFEST).exists():
        if tokenizer.needs_training:
            tokenizer = _trained(corpus, tokenizer, settings, units, work, progress)
        job = Job(corpus, tokenizer, settings, work)
        sources = _tokenize(job, units, workers, progress)
        shards = _pack(job, sources, len(units), workers, progress)
        _finish(job, sources, shards)
    for name in ("units", "shards"):
        shutil.rmtree(work / name)
    for leftover in work.glob(f"*{ASIDE}"):
        leftover.unlink()
    manifest = manifests.read(work)
    os.replace(work, out)
    for other in out.parent.glob(f"{glob.escape(out.name)}.????????{_PARTIAL}"):
        shutil.rmtree(other, ignore_errors=True)
    return manifest


def _trained(
    corpus: Corpus,
    tokenizer: Tokenizer,
    settings: PrepareSettings,
    units: list[Unit],
    work: Path,
    progress: bool,
) -> Tokenizer:
    """The tokenizer trained on training documents; a restart takes the stored one."""
    marker = work / "tokenizer-trained"
    if not marker.exists():
        with _quiet_threads():
            tokenizer.train(_training_documents(corpus, tokenizer, settings, units, progress), progress)
        name, content = tokenizer.serialized()
        write_atomically(work / name, content)
        write_atomically(marker, b"")
    return type(tokenizer).load(work, tokenizer.settings())


def _training_documents(
    corpus: Corpus, tokenizer: Tokenizer, settings: PrepareSettings, units: list[Unit], progress: bool
) -> Iterator[str]:
    order = sorted(range(len(units)), key=lambda i: shuffle_key(b"tokenizer", settings.seed, i, 0))
    given = 0  # counted here, since a bar that is not shown does not count
    with _bar(tokenizer.train_characters, "read for the tokenizer", "char", progress) as bar:
        for index in order:
            for text in corpus.documents(units[index]):
                text = clean(text)
                if is_validation(document_digest(text), settings.val_fraction):
                    continue
                yield text
                given += len(text)
                bar.update(len(text))
                if given >= tokenizer.train_characters:
                    return


def _tokenize(job: Job, units: list[Unit], workers: int, progress: bool) -> list[dict[str, Any]]:
    summaries = [read_marker(job.unit_marker(index)) for index in range(len(units))]
    todo = [index for index, summary in enumerate(summaries) if summary is None]
    begin = time.perf_counter()
    with _bar(len(units), "tokenize", "part", progress, done=len(units) - len(todo)) as bar, _quiet_threads():
        calls = [(index, (job, units[index], index)) for index in todo]
        for index, summary in run_jobs(tokenize_unit, calls, workers):
            summaries[index] = summary
            bar.update()
            bar.set_postfix_str(f"{sum(s['tokens'] for s in summaries if s):,} tokens")
    finished = [summary for summary in summaries if summary is not None]
    if progress and todo:
        _report_speed([finished[index] for index in todo], time.perf_counter() - begin)
    if not sum(summary["documents"] for summary in finished):
        empty = sum(summary["empty"] for summary in finished)
        raise DataError(
            f"the corpus {job.corpus.name} gave no document with any text ({empty} empty ones): "
            f"{job.corpus.settings()}"
        )
    return finished


def _report_speed(done: list[dict[str, Any]], seconds: float) -> None:
    tokens, work, tokenizer = (
        sum(summary[key] for summary in done) for key in ("tokens", "seconds", "seconds_in_tokenizer")
    )
    tqdm.write(
        f"tokenized {tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s, "
        f"{tokenizer / work:.0%} of the work in the tokenizer",
        file=sys.stderr,
    )


def _pack(
    job: Job, sources: list[dict[str, Any]], num_units: int, workers: int, progress: bool
) -> dict[str, list[dict[str, Any]]]:
    total = sum(source["tokens"] for source in sources)
    share = {"train": 1.0 - job.settings.val_fraction, "val": job.settings.val_fraction}
    # Decided by the expected size, not the actual one: any function of the data would do, but not of the
    # workers.
    num_shards = {split: max(1, round(total * share[split] / SHARD_TOKENS)) for split in SPLITS}
    places = [(split, shard) for split in SPLITS for shard in range(num_shards[split])]
    summaries = {place: read_marker(job.shard_marker(*place)) for place in places}
    todo = [place for place, summary in summaries.items() if summary is None]
    with _bar(len(places), "pack", "shard", progress, done=len(places) - len(todo)) as bar:
        calls = [(place, (job, *place, num_shards[place[0]], num_units)) for place in todo]
        # A process takes seconds to start (litdata loads torch): not worth it for one shard per split.
        for place, summary in run_jobs(pack_shard, calls, workers if len(places) > len(SPLITS) else 1):
            summaries[place] = summary
            bar.update()
            bar.set_postfix_str(f"{sum(s['rows'] for s in summaries.values() if s):,} rows")
    return {split: [summaries[split, i] or {} for i in range(num_shards[split])] for split in SPLITS}


def _finish(job: Job, sources: list[dict[str, Any]], shards: dict[str, list[dict[str, Any]]]) -> None:
    """Write index, tokenizer and, last of all, the manifest."""
    for split in SPLITS:
        chunks = [chunk for part in shards[split] for chunk in part["chunks"]]
        if not chunks:
            documents, tokens = (
                sum(part[key] for part in shards[split]) for key in ("documents", "tokens_in")
            )
            raise DataError(
                f"the {split} split has no full row: {documents} documents with {tokens} tokens do not fill "
                f"one row of {job.settings.row_length}. Documents are held out whole, each with probability "
                f"val_fraction (--val-fraction, now {job.settings.val_fraction}), and a text file is one "
                "document: give more documents (JSON lines hold one a line), another val_fraction, or a "
                "smaller seq_len"
            )
        write_index(job.work / split, chunks)
    name, content = job.tokenizer.serialized()
    write_atomically(job.work / name, content)
    (job.work / "tokenizer-trained").unlink(missing_ok=True)
    counts = np.sum([read_counts(job.shard_marker("val", i)) for i in range(len(shards["val"]))], axis=0)
    content_manifest = manifests.build(
        job.corpus.settings(), job.tokenizer, job.settings, sources, shards, counts
    )
    manifests.write(job.work, content_manifest)


@contextmanager
def _locked(out: Path, progress: bool) -> Iterator[None]:
    lock = FileLock(f"{out}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            tqdm.write(f"another process is preparing {out}: waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _bar(total: int, what: str, unit: str, progress: bool, done: int = 0) -> Any:
    return tqdm(
        total=total, desc=what, unit=unit, initial=done, disable=not progress, unit_scale=unit == "char"
    )


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Let the tokenizer use threads inside, and keep it from warning about processes that are forked
    later."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = before or "true"
    try:
        yield
    finally:
        os.environ[name] = before or "false"
