"""One evaluation, from the request to the results."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning as L
import torch

from looped_lm import __version__
from looped_lm.common.errors import UserError
from looped_lm.evaluation.lens import Lens
from looped_lm.evaluation.probes import EXAMPLES, Example, Probe
from looped_lm.evaluation.public import TaskLibrary, hub_problem, leave_hub_alone, measure, require_lm_eval
from looped_lm.evaluation.results import LossRow, Results, TaskRow
from looped_lm.evaluation.scoring import Encoded, Encoder, Scorer
from looped_lm.evaluation.suite import Selection, axis_of, select
from looped_lm.sharing.export import sha256
from looped_lm.sharing.load import load_data, load_lm, load_tokenizer, recorded_config, refuse_other_tokenizer
from looped_lm.training.devices import keeps_embedding_in_bf16, usable_device
from looped_lm.training.lightning_module import LoopedLM


@dataclass
class Evaluation:
    """The options of `evaluate`, whose help says what None means; `run` fills the results.

    Raises:
        UserError: an option has no effect, or lm-eval is missing for public tasks.
    """

    checkpoint: str
    names: Sequence[str]
    recurrences: Sequence[int] | None = None
    examples: int | None = None
    seed: int = 0
    batch_size: int = 32
    context: int | None = None
    data: str | None = None
    tokenizer: str | None = None
    device: str | None = None
    precision: str | None = None
    selection: Selection = field(init=False)
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.selection = select(self.names)
        if not (self.selection.probes or self.selection.public):
            for option in ("examples", "context", "tokenizer"):
                if getattr(self, option) is not None:
                    raise UserError(f"--{option} is for probes and tasks, and --tasks asks for neither.")
        if self.examples is not None and self.examples < 1:
            raise UserError(f"--examples is {self.examples}; it must be at least 1.")
        if self.selection.public:
            require_lm_eval(self.selection.public)
            problem = hub_problem()
            if problem is not None:
                print(f"note: {problem}: public tasks need their data in the local cache.", file=sys.stderr)
                leave_hub_alone()
        about = {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "looped_lm": __version__,
            "checkpoint": self.checkpoint,
            "asked": list(self.names),
            "seed": self.seed,
            "examples": self.examples,
        }
        self.results = Results(about)

    def run(self) -> None:
        """Measure everything; a UserError says what is missing or does not belong together."""
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        library = None
        if self.selection.public:
            library = TaskLibrary()
            library.refuse_unknown(self.selection.public)
        lm, about = load_lm(self.checkpoint), self.results.about
        trained = recorded_config(self.checkpoint).get("trainer") or {}
        precision = self.precision or trained.get("precision") or "32-true"
        trainer = trainer_on(self.device, precision)
        scorer = Scorer(lm.model, self.batch_size, trainer.precision_plugin.forward_context)
        encoder = data = None
        if self.selection.probes or self.selection.public:
            tokenizer = load_tokenizer(self.checkpoint, self.tokenizer, self.data)
            about["tokenizer"] = {**tokenizer.settings(), "sha256": sha256(tokenizer)}
            encoder = Encoder(tokenizer, lm.seq_len if self.context is None else self.context)
        if self.selection.recurrences:
            data = load_data(self.checkpoint, self.data)
            refuse_other_tokenizer(self.checkpoint, data)
            about["data"] = {"given": self.data, "manifest_hash": getattr(data, "manifest_hash", None)}
        about.update(
            num_recurrences=lm.model.num_recurrences,
            context=None if encoder is None else encoder.context,
            device=str(trainer.strategy.root_device),
            precision=str(trainer.precision),
        )
        if data is not None:
            self._losses(lm, data, trainer)
        if encoder is not None:
            device = trainer.strategy.root_device
            trainer.precision_plugin.convert_module(lm)
            lm.model.to(device)
            if keeps_embedding_in_bf16(device, trainer.precision):
                lm.model.embedding.to(torch.bfloat16)
            lm.eval()
            self._tasks(lm, scorer, encoder, library)
        self.results.finished = True

    def _losses(self, lm: LoopedLM, data: Any, trainer: L.Trainer) -> None:
        if data.vocab_size > lm.model.vocab_size:
            raise UserError(
                f"The data has a vocabulary of {data.vocab_size}, the model one of {lm.model.vocab_size}: give "
                "--data prepared with the model's tokenizer."
            )
        # Given the checkpoint, the data module compares its own state with the stored one.
        saved = None if Path(self.checkpoint).is_dir() else self.checkpoint
        for count in self.recurrences or default_counts(lm.model.num_recurrences):
            print(f"validation loss, r = {count}", file=sys.stderr)
            reason = refusal(lm, count)
            if reason is None:
                lm.eval_recurrences = count
                with warnings.catch_warnings():
                    # The callbacks of training are not wanted here.
                    warnings.filterwarnings("ignore", r"(?s).*callbacks used to create the checkpoint.*")
                    lens = Lens(lm.model)
                    watching = [lens] if count == lm.model.num_recurrences else []
                    trainer.callbacks.extend(watching)  # type: ignore[attr-defined]
                    trainer.validate(lm, datamodule=data, ckpt_path=saved, verbose=False)
                    if watching:
                        trainer.callbacks.remove(lens)  # type: ignore[attr-defined]
                        self._read(lens)
                assert lm.evaluated is not None
                row = LossRow(count, *lm.evaluated)
            else:
                row = LossRow(count, refused=reason, expected=self.recurrences is None)
            self.results.losses.append(row)

    def _read(self, lens: Lens) -> None:
        # JSON holds no infinity; the loss above says what is wrong.
        if all(math.isfinite(row.loss) for row in lens.depths()):
            self.results.depths, self.results.exits = lens.depths(), lens.exits()

    def _tasks(self, lm: LoopedLM, scorer: Scorer, encoder: Encoder, library: TaskLibrary | None) -> None:
        counts, rows = [], self.results.tasks
        names = [*(p.name for p in self.selection.probes), *(t.name for t in self.selection.public)]
        for count in self.recurrences or [lm.model.num_recurrences]:
            reason = refusal(lm, count)
            if reason is None:
                counts.append(count)
            else:
                rows += [TaskRow(name, axis_of(name), count, refused=reason) for name in names]
        for probe in self.selection.probes:
            rows += probe_rows(probe, scorer, encoder, counts, self.examples or EXAMPLES, self.seed)
        if library is not None:
            from looped_lm.evaluation.harness import HarnessLM

            for count in counts:
                for task in self.selection.public:
                    model = HarnessLM(scorer, encoder, count, self.seed)
                    rows += measure(task, library, model, self.examples, self.seed)


def trainer_on(device: str | None, precision: str) -> L.Trainer:
    """A Trainer that validates on one device (None: a GPU if there is one) and leaves nothing behind."""
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


def fitted(example: Example, encoder: Encoder) -> tuple[Encoded, int]:
    """Ids of an example after as many of its solved ones as fit into the context, and their number.

    The query is never cut, since the answer needs all of it, so the result may still be too long.
    """
    for shots in range(len(example.shots), -1, -1):
        encoded = encoder.pair(example.prompt(shots), example.answer, example.end)
        if len(encoded) <= encoder.context:
            break
    return encoded, shots


def probe_rows(
    probe: Probe, scorer: Scorer, encoder: Encoder, counts: Sequence[int], examples: int, seed: int
) -> list[TaskRow]:
    """Results on the first `examples` of a seed, all refused if a query does not fit into the context."""
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
