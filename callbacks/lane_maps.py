"""The lanes' weights as pictures."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch

from callbacks.final_validation import in_training
from callbacks.telemetry import add_point, takers, write_image
from looped_lm import LoopedLM

#: Most validations that a picture shows; beyond that, every second of the earlier ones is dropped.
KEPT_COLUMNS = 128


class LaneMaps(L.Callback):
    """Draws what every recurrence does to the lanes as heat maps, `lanes/<name>`, at every validation.

    Names and weights are those of `Lanes.recurrence_weights`, such as M_i, alpha_i and beta_i of hyperconnection lanes.
    The upper map has the current weights, per recurrence a matrix (row: target lane, column: source lane) or a
    column; the lower map, how far every entry has moved since the first validation. Other loggers get nothing.
    """

    def __init__(self) -> None:
        #: For every validation, the step and the weights by name.
        self._past: list[tuple[int, dict[str, np.ndarray]]] = []

    def state_dict(self) -> dict[str, Any]:
        steps, weights = self._by_name()
        stacked = {name: torch.from_numpy(np.stack(past)) for name, past in weights.items()}
        return {"steps": steps, "weights": stacked}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        past = {name: weights.numpy() for name, weights in state_dict["weights"].items()}
        steps = enumerate(state_dict["steps"])
        self._past = [(step, {name: past[name][i] for name in past}) for i, step in steps]

    def on_train_start(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if trainer.global_step == 0:
            self._past = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: LoopedLM) -> None:
        if not (in_training(trainer) and trainer.is_global_zero and takers(trainer, "image")):
            return
        self._collect(trainer.global_step, pl_module)
        steps, weights = self._by_name()
        for name, past in weights.items():
            write_image(trainer, f"lanes/{name}", draw(name, steps, past))

    def _collect(self, step: int, pl_module: LoopedLM) -> None:
        weights = {}
        for name, weight in pl_module.model.lanes.recurrence_weights().items():
            now = np.array(weight.detach().float().cpu())
            weights[name] = now.reshape(len(now), -1) if now.ndim > 3 else now
        if weights:
            add_point(self._past, (step, weights), KEPT_COLUMNS)

    def _by_name(self) -> tuple[list[int], dict[str, list[np.ndarray]]]:
        names = self._past[-1][1] if self._past else ()
        return [step for step, _ in self._past], {name: [w[name] for _, w in self._past] for name in names}


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
    """Heat maps, uint8 (H,W,3), of weights (r,K,L), (r,K) or (r,); `past` has those after each of `steps`."""
    # matplotlib takes a second to import, and only drawing needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    now = strip(past[-1])
    moved = np.stack([(weights - past[0]).ravel() for weights in past], axis=1)  # (entries, validations)
    r = len(past[-1])
    each = len(moved) // r
    numbers = [str(i) for i in range(r)]
    heights = 0.25 * max(len(now), 2), min(0.6 + 0.08 * len(moved), 5.0)
    # Text stays readable in TensorBoard's small view. Margins are fixed: matplotlib takes long to find them.
    whole = 0.35 + heights[0] + 0.95 + heights[1] + 0.55
    figure = Figure(figsize=(5, whole), dpi=120)
    canvas = FigureCanvasAgg(figure)
    bottom = figure.add_axes((0.11, 0.55 / whole, 0.72, heights[1] / whole))
    top = figure.add_axes((0.11, 1 - (0.35 + heights[0]) / whole, 0.72, heights[0] / whole))
    _heat_map(top, now)
    top.set(title=f"{name} at step {steps[-1]:,}", xlabel="recurrence", ylabel="lane")
    width = past[-1].shape[2] + 1 if past[-1].ndim == 3 else 1
    top.set_xticks([width * i + max(width - 2, 0) / 2 for i in range(r)], numbers)
    top.set_yticks(range(len(now)))
    _heat_map(bottom, moved)
    bottom.set(title=f"change since step {steps[0]:,}", xlabel="step", ylabel="recurrence")
    shown = sorted({round(i) for i in np.linspace(0, len(steps) - 1, min(len(steps), 6))})
    bottom.set_xticks(shown, [f"{steps[i]:,}" for i in shown])
    bottom.set_yticks([each * i + (each - 1) / 2 for i in range(r)], numbers)
    for i in range(1, r):
        bottom.axhline(each * i - 0.5, color="grey", linewidth=0.5)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _heat_map(axes: Any, values: np.ndarray) -> None:
    """Blue below zero, white at zero, red above, with the scale beside the map."""
    largest = float(np.abs(values).max(initial=1e-6, where=np.isfinite(values)))
    colours = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
    picture = axes.imshow(values, aspect="auto", interpolation="nearest", **colours)
    place = axes.get_position()
    axes.figure.colorbar(picture, cax=axes.figure.add_axes((0.86, place.y0, 0.025, place.height)))
