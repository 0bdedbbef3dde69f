"""One evaluation, from what is asked to its results."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning as L

from looped_lm import __version__
from looped_lm.common.errors import UserError
from looped_lm.evaluation import measuring
from looped_lm.evaluation.probes import EXAMPLES
from looped_lm.evaluation.public import TaskLibrary, hub_problem, leave_hub_alone, measure, require_lm_eval
from looped_lm.evaluation.results import Results, TaskRow
from looped_lm.evaluation.scoring import Encoder, Scorer
from looped_lm.evaluation.suite import Selection, axis_of, select
from looped_lm.sharing.export import sha256
from looped_lm.sharing.load import load_data, load_lm, load_tokenizer, refuse_other_tokenizer
from looped_lm.training.lightning_module import LoopedLM


@dataclass
class Evaluation:
    """What is asked of a model; `run` fills the results row by row.

    Args:
        checkpoint: checkpoint or exported folder.
        names: tasks and groups of tasks, as `select` takes them.
        recurrences: at which everything is measured; None: the loss at r/2, r, 2r and 4r, the rest at r.
        examples: of every probe and task; None: the default of each.
        seed: of the probes and the choice of shots.
        batch_size: prompts of one pass.
        context: tokens that the model reads at once; None: as trained.
        data: data module as `load_data` takes it; None: that of training.
        tokenizer: as `load_tokenizer` takes it; None: that of training.
        device: such as cpu or cuda:0; None: a GPU where there is one.
        precision: as in `fit`; None: that of training.

    Raises:
        UserError: it cannot be met: an option without effect, no lm-eval for public tasks.
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
        about: dict[str, Any] = {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "looped_lm": __version__,
            "checkpoint": self.checkpoint,
            "asked": list(self.names),
            "seed": self.seed,
            "examples": self.examples,
        }
        self.results = Results(about)

    def run(self) -> None:
        """Measure everything.

        Raises:
            UserError: the model, its data or its tokenizer are not at hand, or do not belong together.
        """
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        library = None
        if self.selection.public:
            library = TaskLibrary()
            library.refuse_unknown(self.selection.public)
        lm, about = load_lm(self.checkpoint), self.results.about
        precision = self.precision or measuring.trained_precision(self.checkpoint)
        trainer = measuring.trainer_on(self.device, precision)
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
            measuring.place(lm, trainer)
            self._tasks(lm, scorer, encoder, library)
        self.results.finished = True

    def _losses(self, lm: LoopedLM, data: Any, trainer: L.Trainer) -> None:
        """Validation loss over recurrences."""
        if data.vocab_size > lm.model.vocab_size:
            raise UserError(
                f"The data has a vocabulary of {data.vocab_size}, the model one of {lm.model.vocab_size}: give "
                "--data prepared with the model's tokenizer."
            )
        saved = None if Path(self.checkpoint).is_dir() else self.checkpoint
        asked = self.recurrences is not None
        for count in self.recurrences or measuring.default_counts(lm.model.num_recurrences):
            print(f"validation loss, r = {count}", file=sys.stderr)
            self.results.losses.append(measuring.validation_loss(lm, data, trainer, count, asked, saved))

    def _tasks(self, lm: LoopedLM, scorer: Scorer, encoder: Encoder, library: TaskLibrary | None) -> None:
        """Probes and public tasks at each number of recurrences."""
        counts, rows = [], self.results.tasks
        names = [*(p.name for p in self.selection.probes), *(t.name for t in self.selection.public)]
        for count in self.recurrences or [lm.model.num_recurrences]:
            reason = measuring.refusal(lm, count)
            if reason is None:
                counts.append(count)
            else:
                rows += [TaskRow(name, axis_of(name), count, refused=reason) for name in names]
        examples = self.examples or EXAMPLES
        for probe in self.selection.probes:
            rows += measuring.probe_rows(probe, scorer, encoder, counts, examples, self.seed)
        if library is not None:
            from looped_lm.evaluation.harness import HarnessLM

            for count in counts:
                for task in self.selection.public:
                    model = HarnessLM(scorer, encoder, count, self.seed)
                    rows += measure(task, library, model, self.examples, self.seed)
