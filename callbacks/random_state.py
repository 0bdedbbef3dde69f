"""The state of the global random generators, saved and restored."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist

from looped_lm.common.text import say

CHECKPOINT_KEY = "random_state"


class RandomState(L.Callback):
    """Lets a resumed run draw from Python's, numpy's and torch's generators what an uninterrupted one draws.

    Every rank has its own state. With another number of processes the generators start anew, and the run says so.
    """

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] | None = None
        self._before_validation: dict[str, Any] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._loaded = self._before_validation = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # A validation that is broken off will run again from its beginning.
        own = self._before_validation or collect(trainer.strategy.root_device)
        states = [own]
        if trainer.world_size > 1:
            states = [{} for _ in range(trainer.world_size)]
            dist.all_gather_object(states, own)
        checkpoint[CHECKPOINT_KEY] = states

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before_validation = collect(trainer.strategy.root_device)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before_validation = None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get(CHECKPOINT_KEY)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        states, self._loaded = self._loaded, None
        if states is None:
            return
        if len(states) != trainer.world_size:
            then = f"the checkpoint has the states of {len(states)} process(es)"
            say(trainer, f"The random generators start anew: {then}, this run has {trainer.world_size}.")
            return
        state, device = states[trainer.global_rank], trainer.strategy.root_device
        torch.set_rng_state(state["torch"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        version, words, next_gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), next_gauss))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], device)


def collect(device: torch.device) -> dict[str, Any]:
    """State of all generators of this process, in types that can be loaded with weights_only."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, gauss = numpy_state
    version, words, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": [version, torch.tensor(words), next_gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state
