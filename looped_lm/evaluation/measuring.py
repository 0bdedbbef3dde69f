"""Runs the parts of an evaluation that need no network: validation loss over recurrences, and probes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch

from looped_lm.evaluation.axes import axis_of
from looped_lm.evaluation.probes import Example, Probe
from looped_lm.evaluation.results import LossRow, TaskRow
from looped_lm.evaluation.scoring import Encoded, Encoder, Scorer
from looped_lm.sharing.load import recorded_config
from looped_lm.training.devices import keeps_embedding_in_bf16, usable_device
from looped_lm.training.lightning_module import LoopedLM

DEFAULT_PRECISION = "32-true"


def trained_precision(path: str | Path) -> str:
    """Precision of the run that wrote a checkpoint; fp32 where nothing says so."""
    return (recorded_config(path).get("trainer") or {}).get("precision") or DEFAULT_PRECISION


def trainer_on(device: str | None, precision: str) -> L.Trainer:
    """A Trainer that validates on one device and leaves nothing behind.

    Args:
        device: such as cpu or cuda:1; None: a GPU where there is one.
        precision: as in `fit`.

    Raises:
        ValueError: no such device.
    """
    where = usable_device(device)
    return L.Trainer(
        accelerator={"cuda": "gpu"}.get(where.type, where.type),
        devices=[where.index or 0] if where.type == "cuda" else 1,
        precision=precision,  # type: ignore[arg-type]  # Lightning refuses what it does not know
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def place(lm: LoopedLM, trainer: L.Trainer) -> None:
    """Put the model where the Trainer would, in its precision."""
    device = trainer.strategy.root_device
    trainer.precision_plugin.convert_module(lm)
    lm.model.to(device)
    if keeps_embedding_in_bf16(device, trainer.precision):
        lm.model.embedding.to(torch.bfloat16)
    lm.eval()


def default_counts(num_recurrences: int) -> list[int]:
    """r/2 (rounded down, at least 1), r, 2r and 4r, each once."""
    r = num_recurrences
    return sorted({max(1, r // 2), r, 2 * r, 4 * r})


def refusal(lm: LoopedLM, count: int) -> str | None:
    """Why the model cannot run a number of recurrences; None if it can."""
    try:
        lm.model.check_recurrences(count)
    except ValueError as error:
        return str(error)
    return None


def validation_loss(
    lm: LoopedLM,
    data: L.LightningDataModule,
    trainer: L.Trainer,
    count: int,
    asked: bool,
    checkpoint: str | Path | None,
) -> LossRow:
    """The loss as `python -m looped_lm validate` computes it, over the same rows.

    Args:
        lm: the model.
        data: its data module.
        trainer: the Trainer.
        count: recurrences of every pass.
        asked: whether the user asked for this number.
        checkpoint: whose data state is compared with the data at hand; None: there is none.
    """
    refused = refusal(lm, count)
    if refused is not None:
        return LossRow(count, refused=refused, expected=not asked)
    lm.eval_recurrences = count
    path = None if checkpoint is None else str(checkpoint)
    with warnings.catch_warnings():
        # The callbacks of training have nothing to do here.
        warnings.filterwarnings("ignore", message=r"(?s).*callbacks used to create the checkpoint.*")
        trainer.validate(lm, datamodule=data, ckpt_path=path, verbose=False)
    assert lm.evaluated is not None
    loss, tokens = lm.evaluated
    return LossRow(count, loss, tokens)


def fitted(example: Example, encoder: Encoder) -> tuple[Encoded, int]:
    """Ids of an example that fits into the context, and how many of its solved examples are left.

    What does not fit loses whole solved examples, those on the left first. The query itself is never cut: without all
    of its lines there would be another answer, or none. So the result may still be too long.
    """
    for shots in range(len(example.shots), -1, -1):
        encoded = encoder.pair(example.prompt(shots), example.answer, example.end)
        if len(encoded) <= encoder.context:
            break
    return encoded, shots


def probe_rows(
    probe: Probe, scorer: Scorer, encoder: Encoder, counts: Sequence[int], examples: int, seed: int
) -> list[TaskRow]:
    """Results of a probe at several numbers of recurrences; refused rows if its queries do not fit into the context.

    Args:
        probe: the probe.
        scorer: scores continuations.
        encoder: text to ids, and how long prompts may be.
        counts: recurrences, each one that the model can run.
        examples: how many.
        seed: of the examples.
    """
    pairs = [fitted(example, encoder) for example in probe.examples(examples, seed)]
    rows, axis = [row for row, _ in pairs], axis_of(probe.name)
    longest = max(map(len, rows))
    if longest > encoder.context:
        reason = (
            f"a query takes up to {longest} tokens, and the context has {encoder.context}. --context lets the "
            "model read more than it was trained on"
        )
        return [TaskRow(probe.name, axis, r, shots=probe.shots, refused=reason) for r in counts]
    found = []
    for r in counts:
        scores = scorer.score(rows, r, f"{probe.name}, r = {r}")
        tokens = sum(score.tokens for score in scores)
        found.append(
            TaskRow(
                task=probe.name,
                axis=axis,
                recurrences=r,
                loss=sum(score.nats for score in scores) / tokens,
                accuracy=sum(score.greedy for score in scores) / len(scores),
                metric="greedy match",
                examples=len(rows),
                tokens=tokens,
                shots=probe.shots,
                cut=sum(shots < probe.shots for _, shots in pairs),
                metrics={"mean_shots": sum(shots for _, shots in pairs) / len(pairs)},
            )
        )
    return found
