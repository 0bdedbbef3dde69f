"""Text samples: what they continue, that training does not notice them, and who gets none."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import Samples
from callbacks.telemetry import as_markdown
from looped_lm import LinearInjection
from looped_lm.generation import Generated, Sampling, UncachedDecoder, stream
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import VOCAB, RandomRows, TinyData, perturb, tiny_lm, tiny_trainer


class TextLogger(RecordingLogger):
    """Takes texts, as W&B's does."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, int | None, dict[str, str]]] = []

    def log_text(self, key: str, columns: list[str], data: list[list[str]], step: int | None = None) -> None:
        self.texts += [(key, step, dict(zip(columns, row, strict=True))) for row in data]


class Numbers:
    """A tokenizer whose text is the ids."""

    vocab_size, bos_id = VOCAB - 1, 0

    def encode(self, texts: Any) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


class TextData(TinyData):
    def load_tokenizer(self) -> Numbers:
        return Numbers()


class NoisyInjection(LinearInjection):
    """Draws from all global generators, in evaluation too."""

    def forward(self, e: torch.Tensor, s: torch.Tensor, i: int) -> torch.Tensor:
        return super().forward(e, s, i) + 0.01 * (torch.rand(()) + random.random() + np.random.rand())


def fit(folder: Path, *callbacks: Any, data: Any = None, logger: Any = None, **model: Any) -> TextLogger:
    logger = TextLogger() if logger is None else logger
    lm = tiny_lm(val_every_steps=1, **model)
    perturb(lm.model)
    trainer = tiny_trainer(folder, list(callbacks), logger=logger)
    trainer.fit(lm, datamodule=data or TextData())
    return logger


def test_samples_continue_validation_rows_as_plain_generation_does(tmp_path: Path) -> None:
    logger = TextLogger()
    lm = tiny_lm(val_every_steps=4)
    perturb(lm.model)
    samples = Samples(rows=2, prompt_tokens=5, new_tokens=4, seed=3)
    tiny_trainer(tmp_path, [samples], logger=logger).fit(lm, datamodule=TextData())
    rows = [row[:5].tolist() for row, _ in (x for x, _ in zip(RandomRows(16), range(2), strict=False))]
    decoder = UncachedDecoder(lm.model.eval(), rows, 4)
    new = Generated.collect(stream(decoder, 4, Sampling(0.8, top_p=0.95, seed=3), 0, VOCAB - 1)).tokens
    assert len(new[0]) == 4
    assert logger.texts == [
        (
            f"samples/{i}",
            4,
            {
                "prompt": " ".join(map(str, rows[i])),
                "continuation": "".join(f" {t}" for t in new[i] if t != 0),
            },
        )
        for i in range(2)
    ]


def test_own_prompts_stay_within_a_row_and_come_every_other_validation(tmp_path: Path) -> None:
    logger = fit(tmp_path, Samples(prompts=["7 8 9"], new_tokens=100, temperature=0, every=3))
    assert [(key, step) for key, step, _ in logger.texts] == [("samples/0", 3), ("samples/0", 4)]
    for _, _, parts in logger.texts:
        assert parts["prompt"] == "0 7 8 9" and 1 <= len(parts["continuation"].split()) <= 12


def test_training_does_not_notice(tmp_path: Path) -> None:
    """Bit by bit, also with a component that draws from the global generators while text is generated."""
    seen = []
    for callbacks in ([], [Samples()]):
        random.seed(0)
        np.random.seed(0)
        logger = fit(tmp_path, *callbacks, injection=NoisyInjection)
        assert bool(logger.texts) == bool(callbacks)
        losses = [logger.series(name) for name in ("train/loss", "val/loss")]
        seen.append((losses, torch.rand(1).item(), random.random(), np.random.rand()))
    assert len(seen[0][0][0]) == 4 and seen[0] == seen[1]


class Broken(TinyData):
    def load_tokenizer(self) -> Any:
        raise OSError("it is gone")


class Fussy(LinearInjection):
    """Cannot run on single tokens."""

    def forward(self, e: torch.Tensor, s: torch.Tensor, i: int) -> torch.Tensor:
        if e.shape[1] < 8:
            raise ValueError("too short")
        return super().forward(e, s, i)


@pytest.mark.parametrize(
    "data, model, says",
    [
        (TinyData, {}, "No text samples: TinyData has no method load_tokenizer()."),
        (Broken, {}, "No text samples: the tokenizer cannot be loaded (it is gone)."),
        (TextData, {"injection": Fussy}, "No text samples: ValueError: too short"),
    ],
)
def test_what_stands_in_the_way_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: type, model: dict[str, Any], says: str
) -> None:
    logger = fit(tmp_path, Samples(), data=data(), **model)
    assert not logger.texts and len(logger.series("train/loss")) == 4
    assert capsys.readouterr().out.count(says) == 1


def test_loggers_without_place_for_texts_cost_nothing(tmp_path: Path) -> None:
    samples = Samples()
    samples._write = lambda *_: pytest.fail("written for nobody")  # type: ignore[method-assign]
    for logger in (RecordingLogger(), False):
        tiny_trainer(tmp_path, [samples], logger=logger).fit(tiny_lm(), datamodule=TextData())
    for wrong in ({"rows": 0}, {"every": 0}, {"new_tokens": -1}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.* is"):
            Samples(**wrong)  # type: ignore[arg-type]


def test_tensorboard_shows_text_as_it_stands(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    fit(tmp_path, Samples(rows=1, new_tokens=3), logger=logger)
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0}).Reload()
    shown = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/0/text_summary")]
    assert len(shown) == 4 and all("**continuation**\n\n    " in text for text in shown)
    assert as_markdown({"a": "x\n# y\n\tz"}) == "**a**\n\n    x\n    # y\n        z"
