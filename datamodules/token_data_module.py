"""TokenDataModule: batches from prepared rows of tokens, from any position in their order."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

import datamodules.tabular
import datamodules.tokenizer_files  # noqa: F401  the command line lists imported classes only
from datamodules.corpora import Corpus, StdlibCorpus
from datamodules.errors import DataError, check_at_least
from datamodules.position import EndlessBatches, RowOrder, ShardedBatches
from datamodules.prepared import CachedCorpus, PreparedFolder
from datamodules.recipe import PrepareSettings, default_cache_dir
from datamodules.remote import PreparedURL
from datamodules.storage import split_batch
from datamodules.tokenizers import BPETokenizer, Tokenizer, load_tokenizer
from datamodules.workers import leave_signals_to_parent

log = logging.getLogger(__name__)


class TokenDataModule(LightningDataModule):
    """Rows of tokens from a corpus, prepared on first use and cached, or from a folder prepared beforehand.

    Training batches are endless: int64 `(inputs, targets)`, each (B, T), in an order that depends only on the
    seed and the epoch of the data. The position in it counts rows over all processes and is saved with the
    checkpoint. Validation rows are shared out over the processes without padding or repetition.

    Args:
        tokenizer: what turns text into ids. None: `BPETokenizer()`.
        corpus: where the documents come from. None: `StdlibCorpus()`.
        seq_len: T. Rows of T + 1 tokens give T inputs and T targets.
        batch_size: B, rows per process and micro-batch.
        val_batch_size: rows per process and validation batch. None: `batch_size`.
        vocab_size: the model's vocabulary, if it must not depend on the tokenizer at hand (the paper's is
            32001). A larger tokenizer is refused, a smaller one leaves ids unused. None: the tokenizer's.
        val_rows: validation rows during `fit`; if there are fewer, all of them.
        final_val_rows: the same outside `fit`, and during it if `full_validation` is set.
        val_fraction: expected share of documents held out, by their hash. None: 0.05.
        cut_documents: cut documents longer than a row into pieces first. None: True.
        packing_buffer: documents that wait at once in best-fit packing. None: 1000.
        prepare_seed: seed of the document shuffle before packing. None: 0.
        seed: seed of the order in which rows are read.
        num_workers: processes that read; the order does not depend on them.
        cache_dir: where prepared data is kept. None: see `default_cache_dir`.
        data_dir: a folder written by `python -m datamodules prepare`, or a URL of one (s3://, gs://, ...), whose
            chunks are fetched into `cache_dir` when they are first read. The tokenizer, the corpus and the
            settings of preparation are then only compared with those of the data; None accepts any.
        progress: show progress bars while preparing.

    Attributes:
        full_validation: set it before the validation dataloader is built, to read `final_val_rows` during `fit`.
        manifest: after `setup`, the data's manifest (see manifest.py); `manifest_hash` names it.

    Raises:
        DataError: a value is out of range; from `prepare_data` and `setup`, data is missing, damaged or prepared
            with other settings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        corpus: Corpus | None = None,
        seq_len: int = 256,
        batch_size: int = 16,
        val_batch_size: int | None = None,
        vocab_size: int | None = None,
        val_rows: int = 256,
        final_val_rows: int = 1024,
        val_fraction: float | None = None,
        cut_documents: bool | None = None,
        packing_buffer: int | None = None,
        prepare_seed: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size, val_batch_size=val_batch_size, vocab_size=vocab_size)
        check_at_least(1, val_rows=val_rows, final_val_rows=final_val_rows)
        check_at_least(0, seed=seed, num_workers=num_workers)
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size or batch_size
        self.val_rows = val_rows
        self.final_val_rows = final_val_rows
        self.seed = seed
        self.num_workers = num_workers
        self.progress = progress
        self.full_validation = False
        asked = {
            "val_fraction": val_fraction,
            "cut_documents": cut_documents,
            "packing_buffer": packing_buffer,
            "seed": prepare_seed,
        }
        given = {key: value for key, value in asked.items() if value is not None}
        settings = PrepareSettings(seq_len=seq_len, **given)  # type: ignore[arg-type]
        given["seq_len"] = seq_len
        cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        self._data: PreparedFolder
        if data_dir is None:
            self._data = CachedCorpus(corpus or StdlibCorpus(), tokenizer or BPETokenizer(), settings, cache)
        elif "://" in str(data_dir):
            self._data = PreparedURL(str(data_dir), cache, given, tokenizer, corpus)
        else:
            self._data = PreparedFolder(Path(data_dir).expanduser(), given, tokenizer, corpus)
        self.vocab_size = vocab_size if vocab_size is not None else self._data.vocab_size
        self.manifest: dict[str, Any] = {}
        self._order: RowOrder | None = None
        # Rows consumed = _start_row + (micro-batches processed - _start_batches) · B · W processes.
        self._start_row = 0
        self._start_batches = 0
        self._position_trainer: Trainer | None = None
        self._loaded_by_hand = False

    # ---- data

    def prepare_data(self) -> None:
        """Prepare the cache if needed. Lightning calls this in one process per machine."""
        self._data.prepare(self.progress)

    def setup(self, stage: str | None = None) -> None:
        """Open the data. DataError: it is missing, damaged or prepared with other settings."""
        if not self.manifest:
            self.manifest = self._data.open(self.vocab_size)
            train_chunks = self.manifest["splits"]["train"]["chunks"]
            self._order = RowOrder([chunk["rows"] for chunk in train_chunks], self.seed)
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            # A new trainer begins at the start, unless a position was loaded for it by hand.
            if self.trainer is not self._position_trainer and not self._loaded_by_hand:
                self._start_row = self._start_batches = 0
            self._position_trainer = self.trainer
            self._loaded_by_hand = False

    def _opened(self) -> dict[str, Any]:
        if not self.manifest:
            raise DataError("the data is not open yet: call prepare_data() and setup() first")
        return self.manifest

    @property
    def manifest_hash(self) -> str:
        """SHA-256 that names the prepared data."""
        return self._opened()["hash"]

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer that the data was prepared with."""
        return self._opened()["tokenizer"]["name"]

    @property
    def bos_id(self) -> int:
        """Id of the token that begins a document."""
        return self._opened()["tokenizer"]["bos_id"]

    @property
    def unique_tokens(self) -> int:
        """Number of training targets in the data: rows · T, the tokens of one epoch."""
        return self._opened()["splits"]["train"]["rows"] * self.seq_len

    @property
    def val_unigram_entropy(self) -> float:
        """Entropy (nats/token) of the unigram distribution of all validation targets."""
        return self._opened()["val_unigram_entropy"]

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that the data was prepared with, ready to encode and decode."""
        return load_tokenizer(self._data.folder, self._opened()["tokenizer"]["settings"])

    # ---- position

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _batches_processed(self) -> int:
        if self.trainer is None:
            return 0
        # Not `completed`: checkpoints are saved after `processed` is counted and before `completed` is.
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]

    @property
    def rows_consumed(self) -> int:
        """The global row counter: rows that all processes have trained on so far."""
        # Lightning may build the dataloader before it restores its own counters.
        batches = max(self._batches_processed() - self._start_batches, 0)
        return self._start_row + batches * self.batch_size * self._world_size

    def state_dict(self) -> dict[str, Any]:
        """The position and what it refers to, in plain types."""
        return {
            "rows_consumed": self.rows_consumed,
            "batches_processed": self._batches_processed(),
            "seed": self.seed,
            "manifest_hash": self.manifest_hash,
            "tokenizer_sha256": self.manifest["tokenizer"]["sha256"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the position of a checkpoint; the batch size and the number of processes may differ.

        DataError: it was trained with another tokenizer or, if training continues, other data or another seed.
        """
        trainer = self.trainer
        # It is sound to evaluate a checkpoint on other data, but not with another tokenizer.
        evaluating = trainer is not None and trainer.state.fn not in (None, TrainerFn.FITTING)
        here = self.state_dict()
        for key in ("tokenizer_sha256",) if evaluating else ("tokenizer_sha256", "manifest_hash", "seed"):
            if state_dict[key] != here[key]:
                raise DataError(
                    f"the checkpoint was trained with {key} {state_dict[key]}, but the data at hand has "
                    f"{here[key]}: give the run the data and seed it was started with"
                )
        self._start_row = state_dict["rows_consumed"]
        # A running trainer's counters continue; those of a later trainer start at 0.
        restoring = trainer is not None and trainer.state.fn is not None
        self._start_batches = state_dict["batches_processed"] if restoring else 0
        self._loaded_by_hand = not restoring

    # ---- dataloaders

    def _loader(self, split: str, batches: Iterable[list[int]]) -> DataLoader[Any]:
        rows = self._data.rows(self._opened(), split)
        # Without a generator, a DataLoader draws from the global random state.
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(
            rows,  # type: ignore[arg-type]  # a map-style dataset by its methods
            batch_sampler=batches,
            collate_fn=split_batch,  # type: ignore[arg-type]  # rows come as one tensor, not as a list
            num_workers=self.num_workers,
            generator=generator,
            worker_init_fn=leave_signals_to_parent,
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Endless int64 (inputs, targets), each (B, T), from the current position on."""
        assert self._order is not None, "setup() comes first"
        batches = EndlessBatches(
            self._order, lambda: self.rows_consumed, self.batch_size, self._rank, self._world_size
        )
        return self._loader("train", batches)

    def _validation_loader(self, num_rows: int) -> DataLoader[Any]:
        available = self._opened()["splits"]["val"]["rows"]
        used = min(num_rows, available)
        if used < self._world_size:
            raise DataError(
                f"{used} validation rows ({available} in the data) for {self._world_size} processes: each "
                "needs at least one. Raise val_rows, or prepare data with a larger val_fraction"
            )
        if used < num_rows:
            log.warning("%d validation rows were asked for; the %d that exist are used", num_rows, available)
        return self._loader("val", ShardedBatches(used, self.val_batch_size, self._rank, self._world_size))

    def val_dataloader(self) -> DataLoader[Any]:
        """`val_rows` rows during `fit`; `final_val_rows` outside it, or if `full_validation` is set."""
        fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        few = fitting and not self.full_validation
        return self._validation_loader(self.val_rows if few else self.final_val_rows)

    def test_dataloader(self) -> DataLoader[Any]:
        """`final_val_rows` validation rows."""
        return self._validation_loader(self.final_val_rows)

    predict_dataloader = test_dataloader
