"""The induction probe measures induction: a small model trained on such text solves it, an untrained one does not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from datamodules import ByteTokenizer
from looped_lm import HyperP, LoopedLM, Steps
from looped_lm.evaluation.probes import PROBES, induction_head
from looped_lm.evaluation.results import TaskRow
from looped_lm.evaluation.scoring import Encoder, Scorer
from looped_lm.evaluation.session import probe_rows
from tests.support.tiny import tiny_lm, tiny_trainer

BYTES = ByteTokenizer()
LINES, STEPS, ROWS = 16, 500, 24
#: A line has 12 bytes, including its end.
SEQ_LEN = 12 * LINES
(INDUCTION, *_) = PROBES


class InductionText(IterableDataset):
    """Endless rows of lines "key -> value": two, four or eight new keys, then these again in any order.

    Rows with few keys start the learning: with eight only, a model learns nothing for a long time.
    """

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rng = random.Random(0)
        while True:
            lines = induction_head(rng).query.split("\n")[: rng.choice([2, 4, 8])]
            again = [rng.choice(lines) for _ in range(LINES - len(lines))]
            row = torch.tensor([BYTES.bos_id, *"".join(f"{line}\n" for line in lines + again).encode()])
            yield row[:-1], row[1:]


class InductionData(L.LightningDataModule):
    vocab_size, seq_len, batch_size = BYTES.vocab_size, SEQ_LEN, ROWS
    tokenizer_name, unique_tokens, val_unigram_entropy = "bytes", None, None

    def train_dataloader(self) -> DataLoader:
        return DataLoader(InductionText(), batch_size=ROWS)


def probed(lm: LoopedLM) -> TaskRow:
    """A hundred questions that no training row contains, since there are 26^7 pairs of key and value."""
    scorer, encoder = Scorer(lm.model.eval(), batch_size=50), Encoder(BYTES, SEQ_LEN)
    (row,) = probe_rows(INDUCTION, scorer, encoder, [lm.model.num_recurrences], 100, seed=1)
    lm.train()
    print(f"loss {row.loss:.3f}, accuracy {row.accuracy:.2f}")
    return row


@pytest.mark.slow
def test_a_small_looped_model_learns_induction(tmp_path: Path) -> None:
    rates = {"matrix": 0.03, "embedding": 0.03, "head": 0.01, "norm": 0.01}
    lm = tiny_lm(
        vocab_size=BYTES.vocab_size,
        seq_len=SEQ_LEN,
        horizon=Steps(STEPS),
        batch_tokens=ROWS * SEQ_LEN,
        size=2,
        head_dim=32,
        coda_layers=0,
        transfer=HyperP(**rates, width_exponent=0.0, batch_exponent=0.0, data_exponent=0.0),
    )
    before = probed(lm)
    assert before.accuracy == 0.0
    tiny_trainer(tmp_path, limit_val_batches=0).fit(lm, datamodule=InductionData())
    after = probed(lm)
    assert after.accuracy is not None and after.accuracy > 0.9
