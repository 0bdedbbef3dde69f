"""Lane weights as pictures: what they show, for whom, when, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from callbacks import LaneMaps
from callbacks.lane_maps import draw, strip
from looped_lm import DoublyStochasticLanes, HyperConnectionLanes, PassthroughInjection, SingleLane
from looped_lm.loop.variants.doubly_stochastic_lanes import doubly_stochastic
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import TinyData, perturb, tiny_lm, tiny_model, tiny_trainer


class ImageLogger(RecordingLogger):
    """Takes images, as W&B's does."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[tuple[str, int | None, np.ndarray]] = []

    def log_image(self, key: str, images: list[np.ndarray], step: int | None = None) -> None:
        self.images += [(key, step, image) for image in images]


class FadingLane(SingleLane):
    """A lane with a weight of its own in every recurrence, told to nobody but by `recurrence_weights`."""

    def recurrence_weights(self) -> dict[str, Tensor]:
        return {"decay": torch.linspace(1, 0, self.num_recurrences)}


def test_the_weights_are_those_that_the_loop_uses() -> None:
    model = tiny_model(lanes=lambda d, r: DoublyStochasticLanes(d, r, 3), injection=PassthroughInjection)
    perturb(model)
    lanes = model.lanes
    weights = lanes.recurrence_weights()
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        "mixing": (2, 3, 3),
        "alpha": (2, 3),
        "beta": (2, 3),
    }
    state, y = torch.randn(3, 4, 5), torch.randn(4, 5)
    for i in range(2):
        assert torch.equal(weights["mixing"][i], doubly_stochastic(lanes.mixing[i], 20))
        assert torch.allclose(
            lanes.read(state, i), torch.einsum("k,kab->ab", weights["alpha"][i], state), atol=1e-6
        )
        written = torch.einsum("kl,lab->kab", weights["mixing"][i], state)
        written = written + weights["beta"][i][:, None, None] * y
        assert torch.allclose(lanes.write(state, y, i), written, atol=1e-6)
    assert tiny_model().lanes.recurrence_weights() == {}


def test_a_picture_at_every_validation_of_lanes_that_have_weights(tmp_path: Path) -> None:
    hyper: dict[str, Any] = {"lanes": HyperConnectionLanes, "injection": PassthroughInjection}
    cases = [(hyper, ["mixing", "alpha", "beta"]), ({}, []), ({"lanes": FadingLane}, ["decay"])]
    for overrides, names in cases:
        logger = ImageLogger()
        trainer = tiny_trainer(tmp_path, [LaneMaps()], logger=[RecordingLogger(), logger])
        trainer.fit(tiny_lm(val_every_steps=2, **overrides), datamodule=TinyData())
        assert [(k, s) for k, s, _ in logger.images] == [(f"lanes/{n}", s) for s in (2, 4) for n in names]
    maps = LaneMaps()
    maps._collect = lambda *_: pytest.fail("drawn for nobody")  # type: ignore[method-assign]
    for quiet in (False, RecordingLogger()):
        tiny_trainer(tmp_path, [maps], logger=quiet).fit(tiny_lm(**hyper), datamodule=TinyData())


def test_colours_are_those_of_the_weights() -> None:
    """Blue below, white at, red above zero; read back from the pixels, whatever stands around them."""
    past = [np.array([[0.0], [v]]) for v in (1.0, 2.0, -1.0)]
    image = draw("alpha", [10, 20, 30], past).astype(int)
    assert image.ndim == 3 and image.shape[2] == 3
    colours = (np.array(matplotlib.colormaps["RdBu_r"]([0.0, 0.75, 1.0]))[:, :3] * 255).round().astype(int)
    blue, half_red, red = (np.argwhere(np.abs(image - colour).max(axis=-1) <= 2) for colour in colours)
    middle, scale = image.shape[0] * 0.45, image.shape[1] * 0.8
    inside = [[p for p in pixels if p[1] < scale] for pixels in (blue, half_red, red)]
    # Above the newest weights alone, of which one is -1; below the second one has moved up by 1, then down by 2.
    assert [sum(p[0] < middle for p in pixels) > 500 for pixels in inside] == [True, False, False]
    assert [sum(p[0] > middle for p in pixels) > 500 for pixels in inside] == [True, True, False]
    below = [[p[1] for p in pixels if p[0] > middle] for pixels in inside]
    assert max(below[1]) <= min(below[0])
    assert draw("x", [1], [np.full((2, 2, 2), np.nan)]).dtype == np.uint8


def test_matrices_stand_side_by_side() -> None:
    side_by_side = strip(np.arange(8.0).reshape(2, 2, 2))
    assert np.array_equal(side_by_side, [[0, 1, np.nan, 4, 5], [2, 3, np.nan, 6, 7]], equal_nan=True)
    assert strip(np.arange(6.0).reshape(3, 2)).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert strip(np.arange(3.0)).tolist() == [[0, 1, 2]]


def test_the_past_survives_a_resume_and_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callbacks.lane_maps.KEPT_COLUMNS", 4)
    lm = tiny_lm(lanes=HyperConnectionLanes, injection=PassthroughInjection)
    maps = LaneMaps()
    for step in (1, 2, 3, 4, 5, 6):
        with torch.no_grad():
            lm.model.lanes.beta.fill_(float(step))
        maps._collect(step, lm)
    again = LaneMaps()
    again.load_state_dict(maps.state_dict())
    assert [(step, float(weights["beta"][0, 0])) for step, weights in again._past] == [
        (1, 1),
        (3, 3),
        (5, 5),
        (6, 6),
    ]
    again._collect(4, lm)
    assert [step for step, _ in again._past] == [1, 3, 4], "the run went back"


def test_tensorboard_stores_the_picture(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lm = tiny_lm(lanes=HyperConnectionLanes, injection=PassthroughInjection, val_every_steps=2)
    logger = TensorBoardLogger(tmp_path)
    tiny_trainer(tmp_path, [LaneMaps()], logger=logger).fit(lm, datamodule=TinyData())
    events = EventAccumulator(logger.log_dir).Reload()
    assert [e.step for e in events.Images("lanes/mixing")] == [2, 4]
    assert events.Images("lanes/mixing")[0].encoded_image_string.startswith(b"\x89PNG")
