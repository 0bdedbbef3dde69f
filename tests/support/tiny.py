"""Tiny models, modules and data for the tests: one factory each, with overrides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from looped_lm import LoopedLM, LoopedTransformer, Steps

VOCAB = 61
SEQ_LEN = 16


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> LoopedTransformer:
    """A LoopedTransformer of d_model 64 with four heads and a 1-1-1 layout run twice."""
    arguments: dict[str, Any] = dict(
        vocab_size=VOCAB,
        seq_len=SEQ_LEN,
        size=1,
        head_dim=16,
        prelude_layers=1,
        recurrent_layers=1,
        coda_layers=1,
        num_recurrences=2,
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return LoopedTransformer(**{**arguments, **overrides})
    finally:
        torch.set_default_dtype(before)


def perturb(model: torch.nn.Module, scale: float = 0.3, seed: int = 1) -> None:
    """Move every weight off its initial value: [I|0] and one-hot lanes hide what a recurrence does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.add_(scale * noise / math.sqrt(p.shape[-1]))


def tokens(rows: int = 3, seq_len: int = SEQ_LEN, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Random inputs and targets (rows, seq_len)."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(VOCAB, (rows, seq_len + 1), generator=generator)
    return row[:, :-1], row[:, 1:]


def tiny_lm(**overrides: Any) -> LoopedLM:
    """A LoopedLM around the tiny model: 4 steps of 128 tokens."""
    arguments: dict[str, Any] = dict(
        vocab_size=VOCAB,
        seq_len=SEQ_LEN,
        horizon=Steps(4),
        batch_tokens=8 * SEQ_LEN,
        size=1,
        head_dim=16,
        prelude_layers=1,
        recurrent_layers=1,
        coda_layers=1,
        num_recurrences=2,
    )
    torch.manual_seed(0)
    return LoopedLM(**{**arguments, **overrides})


class RandomRows(IterableDataset):
    """Endless rows, a function of their index alone."""

    def __init__(self, seq_len: int, limit: int | None = None) -> None:
        self.seq_len, self.limit = seq_len, limit

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        index = 0
        while self.limit is None or index < self.limit:
            generator = torch.Generator().manual_seed(index)
            row = torch.randint(VOCAB, (self.seq_len + 1,), generator=generator)
            yield row[:-1], row[1:]
            index += 1


class TinyData(L.LightningDataModule):
    """Random tokens as a data module, with the attributes that LoopedLM and the run record read."""

    manifest_hash = "0" * 8
    tokenizer_name = "random"
    unique_tokens = 10_000
    val_unigram_entropy = math.log(VOCAB)

    def __init__(self, batch_size: int = 8, seq_len: int = SEQ_LEN, vocab_size: int = VOCAB) -> None:
        super().__init__()
        self.batch_size, self.seq_len, self.vocab_size = batch_size, seq_len, vocab_size
        self.full_validation = False

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RandomRows(self.seq_len), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        rows = 12 if self.full_validation or self.trainer.state.fn != "fit" else 4
        return DataLoader(RandomRows(self.seq_len, rows), batch_size=4)


def tiny_trainer(folder: Any, callbacks: list[Any] | None = None, **overrides: Any) -> L.Trainer:
    """A quiet CPU trainer as base.yaml sets it up."""
    arguments: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
        default_root_dir=str(folder),
    )
    return L.Trainer(callbacks=callbacks or [], **{**arguments, **overrides})
