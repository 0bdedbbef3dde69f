"""What a model would predict after each recurrence: its state read through coda and head, as the last one is.

B batch rows, T sequence length, V vocabulary, r recurrences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from looped_lm.loop.variants.halting import Halting
from looped_lm.model.loss import chunk_tokens
from looped_lm.model.transformer import LoopedTransformer

#: Cumulative exit probabilities at which tokens leave, for models with an exit distribution.
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)


@dataclass(frozen=True)
class DepthRow:
    """Means over tokens of a reading after so many recurrences, in nats per token.

    `agreement` is the share of tokens whose most likely successor is that of the last reading, and `kl` is
    KL(last ‖ this).
    """

    recurrences: int
    loss: float
    agreement: float
    kl: float


@dataclass(frozen=True)
class ExitRow:
    """Loss (nats per token) if each token is read where its cumulative exit probability reaches the threshold."""

    threshold: float
    mean_exit: float
    loss: float


def exit_steps(log_p: Tensor, threshold: float) -> Tensor:
    """First recurrence (...), from 0, at which the sum of exp(log_p) (r,...) reaches the threshold; else the last."""
    reached = log_p.exp().cumsum(0) >= threshold
    reached[-1] = True
    return reached.to(torch.uint8).argmax(0)


class Lens(L.Callback):
    """Adds up what every validation batch says; runs the model once more on each, for all readings together."""

    def __init__(self, model: LoopedTransformer, thresholds: Sequence[float] = THRESHOLDS) -> None:
        self.model, self.tokens = model, 0
        self.thresholds = tuple(thresholds) if isinstance(model.objective, Halting) else ()
        r = model.num_recurrences
        self._depths = torch.zeros(r, 3, dtype=torch.float64)
        self._exits = torch.zeros(len(self.thresholds), 2, dtype=torch.float64)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *given: Any) -> None:
        with trainer.precision_plugin.forward_context():
            self.add(*given[1])

    @torch.no_grad()
    def add(self, tokens: Tensor, targets: Tensor) -> None:
        """Take in a batch of int64 tokens and targets, both (B,T)."""
        states = self.model.states(tokens)
        read = [self.model.read_out(state, tokens).flatten(0, 1) for state in states]
        losses = []  # (r,) for every chunk of tokens
        # The logits of a chunk only, of two readings at a time.
        for start in range(0, targets.numel(), size := chunk_tokens(self.model.vocab_size)):
            part, wanted = slice(start, start + size), targets.flatten()[start : start + size, None]
            last = self.model.logits(read[-1][part]).log_softmax(dim=-1)
            chunk = []
            for i, hidden in enumerate(read):
                log_p = last if i == len(read) - 1 else self.model.logits(hidden[part]).log_softmax(dim=-1)
                loss = -log_p.gather(-1, wanted)[:, 0]
                same = log_p.argmax(dim=-1) == last.argmax(dim=-1)
                kl = (last.exp() * (last - log_p)).sum(dim=-1).clamp_min(0)  # Rounding may leave it below.
                self._depths[i] += torch.stack([x.double().sum() for x in (loss, same, kl)]).cpu()
                chunk.append(loss)
            losses.append(torch.stack(chunk))
        self.tokens += targets.numel()
        if not self.thresholds:
            return
        assert isinstance(self.model.objective, Halting)
        exits = self.model.objective.log_probabilities(dict(enumerate(states))).flatten(1)
        every = torch.cat(losses, dim=1)
        for at, threshold in enumerate(self.thresholds):
            steps = exit_steps(exits, threshold)
            found = (steps + 1).double().sum(), every.gather(0, steps[None]).double().sum()
            self._exits[at] += torch.stack(found).cpu()

    def depths(self) -> list[DepthRow]:
        """A row for each recurrence."""
        return [DepthRow(i + 1, *row) for i, row in enumerate((self._depths / self.tokens).tolist())]

    def exits(self) -> list[ExitRow]:
        """A row for each threshold; none for a model without an exit distribution."""
        rows = (self._exits / max(1, self.tokens)).tolist()
        return [ExitRow(threshold, *row) for threshold, row in zip(self.thresholds, rows, strict=True)]
