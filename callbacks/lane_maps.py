"""The lanes' weights as pictures."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch

from callbacks.media import takes_images, write_image
from looped_lm import LoopedLM

#: Validations that a picture shows at most; from there on every second one of the earlier ones.
KEPT_COLUMNS = 128
_DPI = 100


class LaneMaps(L.Callback):
    """Draws what every recurrence does to the lanes as heat maps, `lanes/<name>`, at every validation.

    The names and weights are those of `Lanes.recurrence_weights`: mixing matrices M_i, reads alpha_i and writes beta_i
    of hyperconnection lanes, or whatever lanes of your own return. Above the weights as they are now, one matrix for
    each recurrence (row: target lane, column: source lane), or one column where a recurrence has a vector; below, all
    entries over the validations so far. Lanes without such weights, and loggers that take no images, get nothing.
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._weights: dict[str, list[np.ndarray]] = {}

    def state_dict(self) -> dict[str, Any]:
        weights = {name: torch.from_numpy(np.stack(past)) for name, past in self._weights.items()}
        return {"steps": self._steps, "weights": weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = list(state_dict["steps"])
        self._weights = {name: list(past.numpy()) for name, past in state_dict["weights"].items()}

    def on_train_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if trainer.global_step == 0:
            self._steps, self._weights = [], {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or not trainer.is_global_zero:
            return
        if any(map(takes_images, trainer.loggers)) and self._collect(trainer.global_step, pl_module):
            for name, past in self._weights.items():
                write_image(trainer, f"lanes/{name}", draw(name, self._steps, past))

    def _collect(self, step: int, pl_module: LoopedLM) -> bool:
        """Add the weights as they are now; False if there are none."""
        weights = pl_module.model.lanes.recurrence_weights()
        if not weights:
            return False
        # After a rollback the run comes by the same steps again.
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
            for past in self._weights.values():
                past.pop()
        self._steps.append(step)
        for name, weight in weights.items():
            now = np.array(weight.detach().float().cpu())
            self._weights.setdefault(name, []).append(now.reshape(len(now), -1) if now.ndim > 3 else now)
        if len(self._steps) > KEPT_COLUMNS:
            del self._steps[1::2]
            for past in self._weights.values():
                del past[1::2]
        return True


def strip(weights: np.ndarray) -> np.ndarray:
    """Weights of all recurrences side by side: (r,K,L) as (K, r(L+1) - 1) with NaN between; (r,K) as (K,r)."""
    if weights.ndim < 3:
        return weights.reshape(len(weights), -1).T
    r, k, width = weights.shape
    columns = np.full((k, r * (width + 1) - 1), np.nan)
    for i, matrix in enumerate(weights):
        columns[:, i * (width + 1) : i * (width + 1) + width] = matrix
    return columns


def draw(name: str, steps: list[int], past: list[np.ndarray]) -> np.ndarray:
    """Heat maps of weights as an image (H,W,3) of uint8.

    Args:
        name: of the weights.
        steps: optimizer steps of the validations.
        past: weights (r,K,L), (r,K) or (r,) at each of them.
    """
    # It takes a second to import, and only drawing needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    now = strip(past[-1])
    rows = np.stack([weights.ravel() for weights in past], axis=1)  # (entries, validations)
    r = len(past[-1])
    each = len(rows) // r
    largest = float(np.nanmax(np.abs(rows), initial=1.0, where=np.isfinite(rows)))
    height = 0.9 + 0.3 * len(now), 0.9 + min(0.14 * len(rows), 6.0)
    figure = Figure(figsize=(8, sum(height)), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=height)
    colours: dict[str, Any] = dict(cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
    top.imshow(now, aspect="auto", **colours)
    top.set(title=f"{name} at step {steps[-1]:,}", xlabel="recurrence", ylabel="lane")
    width = now.shape[1] / r if past[-1].ndim < 3 else past[-1].shape[2] + 1
    top.set_xticks([width * i + (width - 2) / 2 if past[-1].ndim == 3 else i for i in range(r)], range(r))
    top.set_yticks(range(len(now)))
    picture = bottom.imshow(rows, aspect="auto", **colours)
    bottom.set(title="over the validations", xlabel="step", ylabel="recurrence, entry by entry")
    shown = sorted({round(i) for i in np.linspace(0, len(steps) - 1, min(len(steps), 8))})
    bottom.set_xticks(shown, [f"{steps[i]:,}" for i in shown])
    bottom.set_yticks([each * i + (each - 1) / 2 for i in range(r)], range(r))
    for i in range(1, r):
        bottom.axhline(each * i - 0.5, color="grey", linewidth=0.5)
    figure.colorbar(picture, ax=[top, bottom], fraction=0.04)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
