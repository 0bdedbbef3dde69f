"""One of the two processes that test_ddp.py starts: python -m tests.support.ddp_worker FOLDER DATA_DIR.

It trains every architecture twice (from scratch, and from the checkpoint of a run of one process), steps optimizers on
random gradients, and writes what it saw to FOLDER/rank<n>.json. Runs of one process use the same functions.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.flop_counter import FlopCounterMode

from callbacks import FlopsMonitor
from datamodules import TokenDataModule
from looped_lm import LoopedLM, MuonH, Steps
from looped_lm.configuration.config_files import SHIPPED
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import tiny_trainer

ARCHITECTURES = ("r4", "r8_hc", "r8_truncated")
STEPS, STOP, SEQ_LEN, ROWS = 20, 10, 16, 8


def shipped(name: str, shard: bool = True) -> LoopedLM:
    """A LoopedLM with the architecture of a shipped config, d_model 64, 20 steps of 8 rows."""
    architecture = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())["model"]
    specs = {k: {"class_path": v} if isinstance(v, str) else v for k, v in architecture.items()}
    torch.manual_seed(0)
    return LoopedLM(
        vocab_size=257, seq_len=SEQ_LEN, size=1, head_dim=16, horizon=Steps(STEPS),
        batch_tokens=ROWS * SEQ_LEN, optimizer=partial(MuonH, shard=shard), **specs,
    )  # fmt: skip


class AtStart(L.Callback):
    """Largest differences between what was loaded and the checkpoint: weights, optimizer state, initial norms."""

    def __init__(self, path: Path) -> None:
        self.path, self.differences = path, {"weights": -1.0, "state": -1.0, "norms": -1.0}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stored = torch.load(self.path, weights_only=True)
        own, saved = pl_module.state_dict(), stored["state_dict"]
        self.differences["weights"] = max(float((own[k] - saved[k]).abs().max()) for k in saved)
        mine, (theirs,) = trainer.optimizers[0].state_dict(), stored["optimizer_states"]
        pairs = [(mine["state"][i][k], v) for i, state in theirs["state"].items() for k, v in state.items()]
        assert any(bool(v.any()) for _, v in pairs)
        self.differences["state"] = max(float((a - b).abs().max()) for a, b in pairs)
        norms = zip(mine["param_groups"], theirs["param_groups"], strict=True)
        assert any("initial_norms" in b for _, b in norms)
        same = all(a.get("initial_norms") == b.get("initial_norms") for a, b in norms)
        self.differences["norms"] = 0.0 if same else 1.0


def train(
    name: str, folder: Path, data_dir: Path, rows: int = ROWS, resume: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Train an architecture, with a checkpoint in the middle; returns losses by step and counts.

    A resumed run also changes MuonH's `shard`, as it may change any part of the recipe.
    """
    lm, logger, monitor = shipped(name, shard=resume is None), RecordingLogger(), FlopsMonitor()
    save = ModelCheckpoint(folder, filename=name + "-{step}", every_n_train_steps=STOP, save_top_k=-1)
    callbacks: list[Any] = [monitor, save] + ([AtStart(resume)] if resume else [])
    trainer = tiny_trainer(folder, callbacks, logger=logger, enable_checkpointing=True, **options)
    data = TokenDataModule(
        data_dir=data_dir, seq_len=SEQ_LEN, batch_size=rows, vocab_size=257, val_rows=4, progress=False
    )
    trainer.fit(lm, datamodule=data, ckpt_path=resume)
    return {
        "losses": logger.series("train/loss"),
        "steps": trainer.global_step,
        "tokens": monitor.tokens,
        "flops": monitor.flops,
        "loaded": callbacks[2].differences if resume else None,
    }


def half_way(folder: Path, name: str) -> Path:
    return folder / f"{name}-step={STOP}.ckpt"


def steps_on_random_gradients(name: str) -> dict[str, Any]:
    """Sharded and replicated MuonH on equal gradients, one of them missing in one step."""
    lms = [shipped(name) for _ in range(2)]
    optimizers = [
        MuonH(lm.parameter_groups(), shard=shard) for lm, shard in zip(lms, (True, False), strict=True)
    ]
    flops: list[list[int]] = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(*(lm.parameters() for lm in lms), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        if step == 2:
            for lm in lms:
                lm.model.block[0].attn.out.weight.grad = None
        counted = []
        for optimizer in optimizers:
            with FlopCounterMode(display=False) as counter:
                optimizer.step()
            counted.append(counter.get_total_flops())
        flops.append(counted)
    pairs = zip(*(lm.parameters() for lm in lms), strict=True)
    return {"flops": flops, "difference": max(float((a - b).detach().abs().max()) for a, b in pairs)}


def step_with_a_gradient_missing_on_one_process(rank: int) -> str:
    """What MuonH says when process 1 lacks a gradient that process 0 has."""
    params = [torch.nn.Parameter(torch.eye(4)) for _ in range(3)]
    for i, p in enumerate(params):
        p.grad = None if rank == 1 and i == 2 else torch.eye(4)
    try:
        MuonH([{"params": params, "role": "matrix", "lr": 0.1}]).step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def main(folder: Path, data_dir: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    two: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    seen: dict[str, Any] = {}
    for name in ARCHITECTURES:
        seen[name] = train(name, folder / "two", data_dir, ROWS // 2, **two)
        resume = half_way(folder / "one", name)
        seen[f"{name} resumed"] = train(name, folder / "resumed", data_dir, ROWS // 2, resume, **two)
        seen[f"{name} optimizer"] = steps_on_random_gradients(name)
    seen["missing"] = step_with_a_gradient_missing_on_one_process(rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
