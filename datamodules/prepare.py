"""How a corpus becomes packed rows on disk: restartable, and the same for any number of workers."""

from __future__ import annotations

import glob
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import AcquireReturnProxy, FileLock, Timeout
from tqdm.auto import tqdm

from datamodules import manifest as manifests
from datamodules.corpora import Corpus, Unit
from datamodules.errors import DataError, check_at_least
from datamodules.recipe import PrepareSettings, differ, recipe, sha256_of
from datamodules.stages import (
    SPLITS,
    Job,
    Summary,
    clean,
    document_digest,
    is_validation,
    pack_shard,
    read_counts,
    read_marker,
    shuffle_key,
    tokenize_unit,
)
from datamodules.storage import write_index, writing
from datamodules.tokenizers import Tokenizer
from datamodules.workers import run_jobs
from fitting.records import write_bytes_atomically

_PARTIAL = ".partial"

SHARD_TOKENS = 2**27
"""Tokens that one worker holds in memory and packs at once: 268 MB at two bytes each."""


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    settings: PrepareSettings,
    out: str | os.PathLike[str],
    workers: int = 1,
    progress: bool = True,
) -> dict[str, Any]:
    """Prepare `out` and return its manifest; if it is already prepared with this recipe, only return that.

    The work is done in a folder `<out>.<recipe>.partial` that is renamed at the end, so `out` exists only when
    it is whole; the next run with the same recipe and sources continues an interrupted one. A lock keeps
    two processes from preparing the same folder: the second waits and then finds it done.

    Args:
        corpus: where the documents come from.
        tokenizer: what turns them into ids; it is trained here if it needs training.
        settings: all else that decides the rows.
        out: the folder to create.
        workers: number of processes; with 1, this process does all the work.
        progress: show progress bars and a summary on stderr.

    Raises:
        DataError: the sources or settings are wrong, `out` exists and is something else, or it cannot be written.
    """
    check_at_least(1, workers=workers)
    out = Path(out).absolute()
    wanted = recipe(corpus, tokenizer, settings)
    if out.exists():
        # It is whole, so no lock is needed, nor the right to write one here.
        return _existing(out, wanted)
    with _locked(out, progress):
        if out.exists():
            return _existing(out, wanted)
        units = corpus.units()
        if not units:
            raise DataError(f"the corpus {corpus.name} is empty: {corpus.settings()}")
        plan = sha256_of([wanted, corpus.stamp(), [unit.name for unit in units]])
        work = out.with_name(f"{out.name}.{plan[:8]}{_PARTIAL}")
        manifest = _prepare(Job(corpus, tokenizer, settings, work), units, workers, progress)
        with writing(out):
            os.replace(work, out)
        # Now that `out` exists, nobody can continue the others.
        for other in out.parent.glob(f"{glob.escape(out.name)}.????????{_PARTIAL}"):
            shutil.rmtree(other, ignore_errors=True)
        return manifest


def _existing(out: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    if not (out / manifests.MANIFEST).is_file():
        raise DataError(
            f"{out} exists and is not a prepared data set: choose another folder, nothing was changed"
        )
    found = manifests.read(out)
    stored = {**found, "tokenizer": found["tokenizer"]["settings"]}
    differing = [key for key in wanted if differ(stored[key], wanted[key])]
    if differing:
        details = "; ".join(f"{key}: {stored[key]} there, {wanted[key]} asked for" for key in differing)
        raise DataError(f"{out} is already prepared with another recipe ({details}): choose another folder")
    return found


def _prepare(job: Job, units: list[Unit], workers: int, progress: bool) -> dict[str, Any]:
    with writing(job.work):
        for name in ("units", "shards", *SPLITS):
            (job.work / name).mkdir(parents=True, exist_ok=True)
    if not (job.work / manifests.MANIFEST).exists():
        if job.tokenizer.needs_training:
            job = replace(job, tokenizer=_trained(job, units, progress))
        sources = _tokenize(job, units, workers, progress)
        with writing(job.work):
            _finish(job, sources, _pack(job, sources, workers, progress))
    with writing(job.work):
        for name in ("units", "shards"):
            shutil.rmtree(job.work / name)
        for leftover in job.work.rglob("*.tmp"):  # of a run that was killed while it wrote a file
            leftover.unlink()
    return manifests.read(job.work)


def _trained(job: Job, units: list[Unit], progress: bool) -> Tokenizer:
    marker = job.work / "tokenizer-trained"
    if not marker.exists():
        with _quiet_threads():
            job.tokenizer.train(_training_documents(job, units, progress), progress)
        name, content = job.tokenizer.serialized()
        with writing(job.work):
            write_bytes_atomically(job.work / name, content)
            write_bytes_atomically(marker, b"")
    return type(job.tokenizer).load(job.work, job.tokenizer.settings())


def _training_documents(job: Job, units: list[Unit], progress: bool) -> Iterator[str]:
    order = sorted(range(len(units)), key=lambda i: shuffle_key(b"tokenizer", job.settings.seed, i, 0))
    wanted = job.tokenizer.train_characters
    given = 0  # counted here, since a bar that is not shown does not count
    with tqdm(
        desc="read for the tokenizer", total=wanted, unit="char", unit_scale=True, disable=not progress
    ) as bar:
        for index in order:
            for text in job.corpus.documents(units[index]):
                text = clean(text)
                if is_validation(document_digest(text), job.settings.val_fraction):
                    continue
                yield text
                given += len(text)
                bar.update(len(text))
                if given >= wanted:
                    return


def _tokenize(job: Job, units: list[Unit], workers: int, progress: bool) -> list[Summary]:
    summaries = [read_marker(job.unit_marker(index)) for index in range(len(units))]
    todo = [index for index, summary in enumerate(summaries) if summary is None]
    begin = time.perf_counter()
    with _bar("tokenize", "part", progress, len(units), len(todo)) as bar, _quiet_threads():
        calls = [(index, (job, units[index], index)) for index in todo]
        for index, summary in run_jobs(tokenize_unit, calls, workers):
            summaries[index] = summary
            bar.update()
            bar.set_postfix_str(f"{sum(s['tokens'] for s in summaries if s):,} tokens")
    finished = [summary for summary in summaries if summary is not None]
    if progress and todo:
        seconds = time.perf_counter() - begin
        done = [finished[index] for index in todo]
        tokens = sum(summary["tokens"] for summary in done)
        share = sum(s["seconds_in_tokenizer"] for s in done) / sum(s["seconds"] for s in done)
        tqdm.write(
            f"tokenized {tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s, "
            f"{share:.0%} of the work in the tokenizer",
            file=sys.stderr,
        )
    if not sum(summary["documents"] for summary in finished):
        empty = sum(summary["empty"] for summary in finished)
        raise DataError(
            f"the corpus {job.corpus.name} gave no document with any text ({empty} empty ones): "
            f"{job.corpus.settings()}"
        )
    return finished


def _pack(job: Job, sources: list[Summary], workers: int, progress: bool) -> dict[str, list[Summary]]:
    total = sum(source["tokens"] for source in sources)
    share = {"train": 1.0 - job.settings.val_fraction, "val": job.settings.val_fraction}
    # Any function of the data that ignores the number of workers will do: here, of expected sizes.
    num_shards = {split: max(1, round(total * share[split] / SHARD_TOKENS)) for split in SPLITS}
    places = [(split, shard) for split in SPLITS for shard in range(num_shards[split])]
    summaries = {place: read_marker(job.shard_marker(*place)) for place in places}
    todo = [place for place, summary in summaries.items() if summary is None]
    with _bar("pack", "shard", progress, len(places), len(todo)) as bar:
        calls = [(place, (job, *place, num_shards[place[0]], len(sources))) for place in todo]
        # A process takes seconds to start, which is too long for one shard per split.
        for place, summary in run_jobs(pack_shard, calls, workers if len(places) > len(SPLITS) else 1):
            summaries[place] = summary
            bar.update()
            bar.set_postfix_str(f"{sum(s['rows'] for s in summaries.values() if s):,} rows")
    return {split: [summaries[split, i] or {} for i in range(num_shards[split])] for split in SPLITS}


def _bar(what: str, unit: str, progress: bool, total: int, todo: int) -> Any:
    return tqdm(desc=what, unit=unit, total=total, initial=total - todo, disable=not progress)


def _finish(job: Job, sources: list[Summary], shards: dict[str, list[Summary]]) -> None:
    for split in SPLITS:
        chunks = [chunk for part in shards[split] for chunk in part["chunks"]]
        if not chunks:
            documents = sum(part["documents"] for part in shards[split])
            tokens = sum(part["tokens_in"] for part in shards[split])
            raise DataError(
                f"the {split} split has no full row: {documents} documents with {tokens} tokens do not fill "
                f"one row of {job.settings.row_length}. Documents are held out whole, each with probability "
                f"val_fraction (--val-fraction, now {job.settings.val_fraction}), and a text file is one "
                "document: give more documents (JSON lines hold one per line), another val_fraction, or a "
                "smaller seq_len"
            )
        write_index(job.work / split, chunks)
    name, content = job.tokenizer.serialized()
    write_bytes_atomically(job.work / name, content)
    (job.work / "tokenizer-trained").unlink(missing_ok=True)
    counts = np.sum([read_counts(job.shard_marker("val", i)) for i in range(len(shards["val"]))], axis=0)
    # The manifest comes last, so where it is, everything is.
    corpus = job.corpus.settings()
    manifests.write(job.work, corpus, job.tokenizer, job.settings, sources, shards, counts)


def _locked(out: Path, progress: bool) -> AcquireReturnProxy:
    lock = FileLock(f"{out}.lock")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            if progress:
                tqdm.write(f"another process is preparing {out}: waiting for it", file=sys.stderr)
            return lock.acquire()


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Let the tokenizer use threads within, and keep it from warning about later forks."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = before or "true"
    try:
        yield
    finally:
        os.environ[name] = before or "false"
