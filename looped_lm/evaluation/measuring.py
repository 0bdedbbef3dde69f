"""The measurements that need no network: validation loss over recurrences, and probes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch

from looped_lm.common.errors import UserError
from looped_lm.evaluation.probes import Example, Probe
from looped_lm.evaluation.results import LossRow, TaskRow
from looped_lm.evaluation.scoring import Encoded, Encoder, Scorer
from looped_lm.evaluation.suite import axis_of
from looped_lm.sharing.load import recorded_config
from looped_lm.training.devices import keeps_embedding_in_bf16, usable_device
from looped_lm.training.lightning_module import LoopedLM

DEFAULT_PRECISION = "32-true"


def trained_precision(path: str | Path) -> str:
    """Precision of the run that wrote a checkpoint; fp32 if nothing records it."""
    return (recorded_config(path).get("trainer") or {}).get("precision") or DEFAULT_PRECISION


def trainer_on(device: str | None, precision: str) -> L.Trainer:
    """A Trainer that validates on one device, in a precision as `fit` takes it, and leaves nothing behind.

    The device is one such as cpu or cuda:1; None means a GPU if there is one.

    Raises:
        UserError: there is no such device.
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
    """Put the model on the Trainer's device, in the Trainer's precision."""
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
    """Why the model cannot run this number of recurrences; None if it can."""
    try:
        lm.model.check_recurrences(count)
    except UserError as error:
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
    """The loss as `python -m looped_lm validate` computes it, over the same rows, with `count` recurrences.

    `asked` says whether the user asked for this number of recurrences. The data state of `checkpoint`, if there is one,
    is compared with that of `data`.
    """
    refused = refusal(lm, count)
    if refused is not None:
        return LossRow(count, refused=refused, expected=not asked)
    lm.eval_recurrences = count
    path = None if checkpoint is None else str(checkpoint)
    with warnings.catch_warnings():
        # The callbacks of training are not wanted here.
        warnings.filterwarnings("ignore", message=r"(?s).*callbacks used to create the checkpoint.*")
        trainer.validate(lm, datamodule=data, ckpt_path=path, verbose=False)
    assert lm.evaluated is not None
    loss, tokens = lm.evaluated
    return LossRow(count, loss, tokens)


def fitted(example: Example, encoder: Encoder) -> tuple[Encoded, int]:
    """Ids of an example that fits into the context, and how many of its solved examples are left.

    An example that does not fit loses whole solved examples, from the left. The query itself is never cut, since
    without all of its lines the answer would differ, or there would be none. So the result may still be too long.
    """
    for shots in range(len(example.shots), -1, -1):
        encoded = encoder.pair(example.prompt(shots), example.answer, example.end)
        if len(encoded) <= encoder.context:
            break
    return encoded, shots


def probe_rows(
    probe: Probe, scorer: Scorer, encoder: Encoder, counts: Sequence[int], examples: int, seed: int
) -> list[TaskRow]:
    """Results of a probe at several numbers of recurrences, each of which the model must be able to run.

    The `examples` are the first ones of the seed. If a query does not fit into the context, all rows are refused.
    """
    pairs = [fitted(example, encoder) for example in probe.examples(examples, seed)]
    rows, axis = [row for row, _ in pairs], axis_of(probe.name)
    longest = max(map(len, rows))
    if longest > encoder.context:
        reason = (
            f"a query takes up to {longest} tokens, and the context has {encoder.context}. --context lets the model "
            "read more than it was trained on"
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
