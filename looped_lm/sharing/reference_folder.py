"""Folders of the paper authors' public code: read as a checkpoint with its run record, and written from one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fitting.records import RunRecord
from looped_lm import __version__
from looped_lm.common.errors import UserError
from looped_lm.common.writing import failing_with, new_folder
from looped_lm.model.transformer import LoopedTransformer
from looped_lm.runs.checkpoint import compare_tensors, load_checkpoint
from looped_lm.sharing.load import load_model
from looped_lm.sharing.reference import (
    architecture_from_reference,
    config_to_reference,
    reference_name,
    tensors_from_reference,
)
from looped_lm.training.description import run_record
from looped_lm.training.lightning_module import LoopedLM
from looped_lm.training.schedules import Steps

_MODEL_FILE = re.compile(r"model_(\d+)\.pt")


def find_step(folder: Path, step: int | None) -> tuple[int, Path, Path]:
    """Step, model file and meta file; UserError if the folder lacks the step or its meta file."""
    files = {
        int(m.group(1)): f for f in sorted(folder.glob("model_*.pt")) if (m := _MODEL_FILE.fullmatch(f.name))
    }
    if not files:
        raise UserError(f"{folder} has no file model_<step>.pt: give a folder of the reference code.")
    step = max(files) if step is None else step
    if step not in files:
        raise UserError(f"{folder} has no step {step}; it has {', '.join(map(str, sorted(files)))}.")
    meta = files[step].with_name(files[step].name.replace("model_", "meta_")).with_suffix(".json")
    if not meta.is_file():
        raise UserError(f"{meta} is missing: it says what {files[step].name} holds.")
    return step, files[step], meta


def read_folder(folder: Path, step: int | None, batch_tokens: int) -> tuple[dict[str, Any], LoopedLM]:
    """A Lightning checkpoint with its run record, and the module that loads it.

    Raises:
        UserError: files are missing or cannot be read, or keys are missing or unknown.
    """
    step, model_file, meta_file = find_step(folder, step)
    if step < 1:
        raise UserError(f"{model_file} is of step {step}: there was no training to record.")
    try:
        tensors = torch.load(model_file, map_location="cpu", weights_only=True)
        meta = json.loads(meta_file.read_text(encoding="utf-8"))
        config = dict(meta["model_config"])
        if not (isinstance(tensors, dict) and all(isinstance(t, torch.Tensor) for t in tensors.values())):
            raise TypeError("the model file holds something other than a mapping of names to tensors")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        raise UserError(
            f"{model_file} and {meta_file.name} cannot be read ({reason}); "
            "the first must hold tensors only, the second JSON with a model_config."
        ) from error
    if meta.get("step", step) != step:
        raise UserError(f"{meta_file} says that it is of step {meta['step']}, but its name says {step}.")
    try:
        arguments = architecture_from_reference(config)
    except UserError as error:
        raise UserError(f"{meta_file}: {error}") from error
    if config["size"] != arguments["size"]:
        print(
            f"note: {meta_file} gives size {config['size']}; n_embd {config['n_embd']} decides, which is size "
            f"{arguments['size']} here and in what --to writes.",
            file=sys.stderr,
        )
    lm = LoopedLM(**arguments, horizon=Steps(step), batch_tokens=batch_tokens)
    state = tensors_from_reference(tensors, lm.model)
    compare_tensors(state, lm.model.state_dict(), f"{meta_file} does not describe {model_file.name}.")
    name = folder.resolve().name
    # What `validate`, `test` and `predict` take from a checkpoint. The files do not name the data; the user must.
    keys = {key: value for key, value in lm.hparams.items() if key not in ("vocab_size", "seq_len")}
    run = {"run_name": name, "model": keys, "data": {}, "trainer": {}}
    lm.provenance = {"run_name": name, "seed": 0, "config": run}
    checkpoint = {
        "state_dict": {f"model.{name}": tensor for name, tensor in state.items()},
        "hyper_parameters": dict(lm.hparams),
        "pytorch-lightning_version": L.__version__,
        "epoch": 0,
        "global_step": step,
        "run_record": converted_record(lm, step, model_file.name).to_dict(),
    }
    return checkpoint, lm


def converted_record(lm: LoopedLM, step: int, source: str) -> RunRecord:
    """The record of a converted run: what it is and how long it trained. The files do not hold its loss."""
    tokens = step * lm.batch_tokens
    return run_record(
        lm,
        seed=0,
        code_version=f"{__version__}, converted from the reference code",
        status="stopped",
        stop_reason=f"converted from {source}, which holds no validation loss and no seed",
        data_manifest_hash=None,
        tokenizer=None,
        unique_tokens=None,
        steps=step,
        steps_planned=step,
        tokens=tokens,
        tokens_target=float(tokens),
        training_flops=tokens * lm.flops_per_token,
        flops_budget=None,
        val_loss=None,
        val_tokens=None,
        val_step=None,
        wall_seconds=0.0,
        hardware="unknown",
        precision="unknown",
        world_size=1,
    )


def write_folder(checkpoint_file: Path, out: Path) -> tuple[int, LoopedTransformer]:
    """Write the model of a checkpoint as the reference code stores it; return its step and the model.

    Raises:
        UserError: it is not a checkpoint, the reference code lacks a component, or `out` cannot be written.
    """
    checkpoint = load_checkpoint(checkpoint_file, mmap=True)
    model = load_model(checkpoint_file)
    config, step = config_to_reference(model), int(checkpoint["global_step"])
    # From the file: the module may hold some tensors in another precision.
    own = ((n, t) for n, t in checkpoint["state_dict"].items() if n.startswith("model."))
    theirs = {reference_name(name.removeprefix("model.")): tensor for name, tensor in own}
    with failing_with("Make room, or name another folder.", out), new_folder(out) as folder:
        with (folder / f"model_{step:06d}.pt").open("wb") as file:
            torch.save(theirs, file)
        meta = json.dumps({"step": step, "model_config": config}, indent=2) + "\n"
        (folder / f"meta_{step:06d}.json").write_text(meta, encoding="utf-8")
    return step, model
