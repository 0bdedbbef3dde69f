"""A model trained on induction-head text alone solves the induction-head probe: the probe measures what it says."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules import ByteTokenizer
from looped_lm import LoopedTransformer
from looped_lm.accounting import parameter_roles
from looped_lm.evaluation.measuring import probe_rows
from looped_lm.evaluation.probes import PROBES
from looped_lm.evaluation.scoring import Encoder, Scorer
from looped_lm.optim import MuonH

LINE = len("abcd -> xyz\n")
LINES = 16
ROWS = 32
RATES = {"matrix": 0.03, "embedding": 0.03, "head": 0.01, "norm": 0.01}


def batch(rng: np.random.Generator, pairs: int) -> tuple[Tensor, Tensor]:
    """Rows (B,T) of BOS and 16 lines, and where (B,T) the answers " xyz" of lines stand whose key stood before.

    The first lines have new keys, the others repeat them in a random order.
    """
    text = np.full((ROWS, LINES, LINE), ord(" "))
    new = rng.integers(ord("a"), ord("z") + 1, (ROWS, pairs, LINE))
    again = np.argsort(rng.random((ROWS, LINES - pairs, pairs)), axis=-1)[..., 0]
    letters = np.concatenate([new, np.take_along_axis(new, again[..., None], axis=1)], axis=1)
    text[..., :4], text[..., 8:11] = letters[..., :4], letters[..., 8:11]
    text[..., 5:7], text[..., 11] = [ord("-"), ord(">")], ord("\n")
    answers = np.zeros_like(text, dtype=bool)
    answers[:, pairs:, 7:11] = True
    bos = np.full((ROWS, 1), ByteTokenizer.bos_id)
    rows = np.concatenate([bos, text.reshape(ROWS, -1)], axis=1)
    mask = np.concatenate([bos != bos, answers.reshape(ROWS, -1)], axis=1)
    return torch.from_numpy(rows), torch.from_numpy(mask)


def train(
    steps: int, seconds: float, every: int = 50, rates: dict[str, float] = RATES
) -> tuple[LoopedTransformer, list]:
    """A looped model of two layers, three passes deep; returns the curve (step, pairs, loss) of the answers, too."""
    torch.manual_seed(0)
    model = LoopedTransformer(
        ByteTokenizer.vocab_size,
        1 + LINES * LINE,
        size=1,
        head_dim=32,
        prelude_layers=1,
        recurrent_layers=1,
        coda_layers=0,
        num_recurrences=2,
    )
    roles = parameter_roles(model)
    groups = [
        {"params": [(n, p) for n, p in model.named_parameters() if roles[n] == role], "role": role, "lr": lr}
        for role, lr in rates.items()
    ]
    optimizer = MuonH(groups)
    rng, curve, start = np.random.default_rng(0), [], time.process_time()
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, rates.values(), strict=True):
            group["lr"] = lr * (1 - 0.9 * step / steps)
        # Few keys make the first step easier.
        pairs = (2, 4, 8)[step % 3] if step < steps // 2 else 8
        rows, mask = batch(rng, pairs)
        hidden = model.hidden(rows[:, :-1])
        loss = F.cross_entropy(model.logits(hidden[mask[:, 1:]]), rows[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % every < 3:
            curve.append((step, pairs, float(loss.detach())))
        if time.process_time() - start > seconds:
            break
    return model.eval(), curve


@pytest.mark.slow
def test_a_model_trained_on_induction_text_solves_the_probe() -> None:
    model, curve = train(steps=1500, seconds=600)
    scorer, encoder = Scorer(model), Encoder(ByteTokenizer(), model.seq_len)
    (row,) = probe_rows(PROBES[0], scorer, encoder, [2], 500, seed=0)
    assert row.accuracy is not None and row.accuracy > 0.9, (row, curve)
    (untaught,) = probe_rows(PROBES[0], scorer, encoder, [1], 500, seed=0)
    assert untaught.accuracy is not None and untaught.accuracy < row.accuracy
