"""Text that the model writes, at validations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.utilities.seed import isolate_rng

from callbacks.final_validation import in_training, is_over
from callbacks.telemetry import takers, write_texts
from looped_lm import LoopedLM
from looped_lm.common.errors import UserError
from looped_lm.common.text import say
from looped_lm.generation import CachedDecoder, Generated, Sampling, continuation, known_ids, stream, with_bos
from looped_lm.sharing.load import TextTokenizer


class Samples(L.Callback):
    """Writes continuations of the same prompts at validations, `samples/<i>`, to loggers that take texts.

    The data module's method `load_tokenizer()` returns the tokenizer, a `looped_lm.sharing.load.TextTokenizer`; without
    one there are no samples, and the run says so once.

    Training draws the same random numbers with and without samples. Rank zero writes while the others wait.

    Args:
        prompts: texts to continue; None: beginnings of validation rows.
        rows: validation rows to continue, at most those of one batch.
        prompt_tokens: tokens of a validation row's beginning, at most half a row.
        new_tokens: tokens of a continuation, which ends earlier with a row's length or the model's document.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: sample among the fewest tokens that together have this probability; None: all.
        seed: seed of the draws, the same at every validation.
        every: validations from one writing to the next; the one after the last step always writes.

    Raises:
        UserError: a number out of range.
    """

    def __init__(
        self,
        prompts: Sequence[str] | None = None,
        rows: int = 3,
        prompt_tokens: int = 32,
        new_tokens: int = 48,
        temperature: float = 0.8,
        top_p: float | None = 0.95,
        seed: int = 0,
        every: int = 1,
    ) -> None:
        numbers = {"rows": rows, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "every": every}
        for name, value in numbers.items():
            if value < 1:
                raise UserError(f"{name} of callbacks.Samples is {value}; it must be at least 1.")
        self.prompts, self.rows, self.every = None if prompts is None else list(prompts), rows, every
        self.prompt_tokens, self.new_tokens = prompt_tokens, new_tokens
        # Without a temperature there is nothing for top_p to choose from.
        self.sampling = Sampling(temperature, top_p=top_p if temperature else None, seed=seed)
        self._validations = 0
        self._beginnings: list[list[int]] = []
        self._tokenizer: TextTokenizer | None = None
        self._looked = False

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validations = state_dict["validations"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._tokenizer, self._looked, self._beginnings = None, False, []

    def on_train_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if trainer.global_step == 0:
            self._validations = 0

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: LoopedLM, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if not self._beginnings and self.prompts is None and batch_idx == 0:
            length = min(self.prompt_tokens, max(1, pl_module.seq_len // 2))
            self._beginnings = batch[0][: self.rows, :length].tolist()

    def on_validation_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if not in_training(trainer):
            return
        self._validations += 1
        due = is_over(trainer) or self._validations % self.every == 0
        if not (due and trainer.is_global_zero and takers(trainer, "text")):
            return
        if tokenizer := self._load(trainer):
            # The decoder has its own generators; a user's component may draw from the global ones.
            with isolate_rng():
                try:
                    self._write(trainer, pl_module, tokenizer)
                except Exception as error:
                    # Some component may be unable to run on one token at a time.
                    self._tokenizer = None
                    say(trainer, f"No text samples: {type(error).__name__}: {error}")

    def _load(self, trainer: L.Trainer) -> TextTokenizer | None:
        if not self._looked:
            self._looked = True
            data = trainer.datamodule  # type: ignore[attr-defined]
            if not hasattr(data, "load_tokenizer"):
                say(trainer, f"No text samples: {type(data).__name__} has no method load_tokenizer().")
                return None
            try:
                self._tokenizer = data.load_tokenizer()
            except Exception as error:
                # Training does not need a tokenizer, so nothing wrong with it may end a run.
                say(trainer, f"No text samples: the tokenizer cannot be loaded ({error}).")
        return self._tokenizer

    def _write(self, trainer: L.Trainer, pl_module: LoopedLM, tokenizer: TextTokenizer) -> None:
        rows = self._beginnings if self.prompts is None else with_bos(tokenizer, self.prompts)
        new_tokens = max(1, min(self.new_tokens, pl_module.seq_len - max(map(len, rows))))
        known = known_ids(pl_module.model, tokenizer)
        with trainer.precision_plugin.forward_context():
            decoder = CachedDecoder(pl_module.model, rows, new_tokens)
            steps = stream(decoder, new_tokens, self.sampling, tokenizer.bos_id, known)
            written = Generated.collect(steps).tokens
        for i, (row, new) in enumerate(zip(rows, written, strict=True)):
            text = continuation(tokenizer, row, new)
            write_texts(trainer, f"samples/{i}", {"prompt": tokenizer.decode(row), "continuation": text})
