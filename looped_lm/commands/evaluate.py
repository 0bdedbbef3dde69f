"""`python -m looped_lm evaluate`: loss over recurrences, probes and public tasks of a trained model."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from looped_lm.common.errors import UserError

if TYPE_CHECKING:
    import lightning as L

    from looped_lm.evaluation.public import TaskLibrary
    from looped_lm.evaluation.results import Results
    from looped_lm.evaluation.scoring import Encoder, Scorer
    from looped_lm.evaluation.suite import Selection
    from looped_lm.training.lightning_module import LoopedLM

SUFFIX = ".eval.json"
#: Exit status where something that was asked for could not be measured.
INCOMPLETE = 3

TASKS = """\
--tasks takes, in any number:
  recurrences           validation loss at r/2, r, 2r and 4r recurrences, as far as the components allow them
  probes                induction head and variable assignment, made from the seed; each has a name of its own, too
  AXIS                  parametric_knowledge, reading_comprehension, math_word_problems, compositional_symbolic: the
                        public tasks of an axis, through lm-eval; reasoning_primitives: the probes
  public, all           the four axes of public tasks; everything
  NAME, FILE.yaml       a task or group of lm-eval, or a task file in its format

Public tasks fetch their data from the Hugging Face Hub, or take it from the local cache. The exit status is 3 where
something that was asked for could not be measured.
"""


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog="python -m looped_lm evaluate",
        description="Measure a trained model, print a table and write a JSON file beside the checkpoint.",
        epilog=TASKS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--ckpt", "--ckpt_path", required=True, help="checkpoint, or a folder written by `export`")
    p.add_argument(
        "--tasks", nargs="+", help="see below; default: recurrences (where data is known) and probes"
    )
    p.add_argument(
        "--recurrences",
        type=int,
        nargs="+",
        help="measure everything at these; default: the loss at r/2, r, 2r, 4r, the rest at r, as trained",
    )
    p.add_argument(
        "--examples", type=int, help="of every probe and task; default: 1,000 of a probe, all of a task"
    )
    p.add_argument(
        "--seed", type=int, default=0, help="of the probes and the choice of shots; default: %(default)s"
    )
    p.add_argument("--batch-size", type=int, default=32, help="prompts of one pass; default: %(default)s")
    p.add_argument("--context", type=int, help="tokens that the model reads at once; default: as trained")
    p.add_argument("--out", type=Path, help=f"file to write; default: the checkpoint's name with {SUFFIX}")
    p.add_argument("--overwrite", action="store_true", help="replace a file of that name")
    p.add_argument("--data", help="data module, class_path and init_args as YAML; default: that of training")
    p.add_argument(
        "--tokenizer", help="class path, or class_path and init_args as YAML; default: that of training"
    )
    p.add_argument("--device", help="such as cpu or cuda:0; default: a GPU where there is one")
    p.add_argument("--precision", help="as in fit; default: that of training, or 32-true")
    return p


def main(args: Sequence[str]) -> int:
    """Run the command; its exit status."""
    given = parser().parse_args(args)
    given.recurrences = given.recurrences and list(dict.fromkeys(given.recurrences))
    from fitting.records import write_text_atomically
    from looped_lm.evaluation.results import parsed
    from looped_lm.evaluation.suite import select

    out = given.out or beside(Path(given.ckpt))
    # What an interrupted evaluation left may go; a whole one is replaced when asked for, and by a whole one.
    there = parsed(out.read_text(encoding="utf-8", errors="replace")) if out.exists() else {"finished": False}
    if there is None:
        raise UserError(f"{out} holds something other than results, and stays: name another file by --out.")
    whole = there.get("finished") is not False
    if whole and not given.overwrite:
        raise UserError(f"{out} exists: name another file by --out, or give --overwrite.")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(f"{out} cannot be written: {out.parent} is no folder open to you. Give --out.")
    names = given.tasks or default_tasks(Path(given.ckpt), given.data)
    selection = select(names)
    results = start(given, names, selection)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        run(given, selection, results)
    finally:
        signal.signal(signal.SIGTERM, before)
        # An evaluation that is interrupted keeps what it has found.
        if results.losses or results.tasks:
            if whole and not results.finished:
                out = out.with_name(f"{out.name}.partial")
            print(f"\n{results.table()}\n")
            write_text_atomically(out, results.to_json())
            print(f"results  {out}")
    return 0 if results.complete else INCOMPLETE


def _leave(signum: int, frame: object) -> None:
    """As on Ctrl-C: what has been found is written."""
    raise SystemExit(128 + signum)


def beside(checkpoint: Path) -> Path:
    """Where results of a checkpoint, or of an exported folder, are written."""
    # "." and ".." have no name to add to.
    checkpoint = checkpoint.resolve() if checkpoint.is_dir() else checkpoint.with_suffix("")
    return checkpoint.with_name(checkpoint.name + SUFFIX)


def default_tasks(checkpoint: Path, data: str | None) -> list[str]:
    """What runs offline: exported folders and converted checkpoints do not know their data."""
    from looped_lm.sharing.load import names_data

    if data is None and checkpoint.exists() and not names_data(checkpoint):
        print(
            f"note: {checkpoint} names no data (--data does): only the probes run, with its tokenizer or the one of "
            "--tokenizer.",
            file=sys.stderr,
        )
        return ["probes"]
    return ["recurrences", "probes"]


def start(given: argparse.Namespace, names: Sequence[str], selection: Selection) -> Results:
    """Empty results of a request, once it is known that it can be met at all."""
    import looped_lm
    from looped_lm.evaluation.results import Results

    if not (selection.probes or selection.public):
        for option in ("examples", "context", "tokenizer"):
            if getattr(given, option) is not None:
                raise UserError(f"--{option} is for probes and tasks, and --tasks asks for neither.")
    if given.examples is not None and given.examples < 1:
        raise UserError(f"--examples is {given.examples}; it must be at least 1.")
    if selection.public:
        from looped_lm.evaluation.public import hub_problem, leave_hub_alone, require_lm_eval

        require_lm_eval(selection.public)
        problem = hub_problem()
        if problem is not None:
            print(f"note: {problem}: public tasks need their data in the local cache.", file=sys.stderr)
            leave_hub_alone()
    about = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "looped_lm": looped_lm.__version__,
        "checkpoint": str(given.ckpt),
        "asked": list(names),
        "seed": given.seed,
        "examples": given.examples,
    }
    return Results(about)


def run(given: argparse.Namespace, selection: Selection, results: Results) -> None:
    """Measure everything, row by row into the results."""
    from looped_lm.configuration.command_line import quiet
    from looped_lm.evaluation.measuring import place, trained_precision, trainer_on
    from looped_lm.evaluation.scoring import Encoder, Scorer
    from looped_lm.sharing.export import sha256
    from looped_lm.sharing.load import load_data, load_lm, load_tokenizer, refuse_other_tokenizer

    quiet()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    library = None
    if selection.public:
        from looped_lm.evaluation.public import TaskLibrary

        library = TaskLibrary()
        library.refuse_unknown(selection.public)
    lm = load_lm(given.ckpt)
    trainer = trainer_on(given.device, given.precision or trained_precision(given.ckpt))
    scorer = Scorer(lm.model, given.batch_size, trainer.precision_plugin.forward_context)
    encoder = data = None
    if selection.probes or selection.public:
        tokenizer = load_tokenizer(given.ckpt, given.tokenizer, given.data)
        results.about["tokenizer"] = {**tokenizer.settings(), "sha256": sha256(tokenizer)}
        encoder = Encoder(tokenizer, lm.seq_len if given.context is None else given.context)
    if selection.recurrences:
        data = load_data(given.ckpt, given.data)
        refuse_other_tokenizer(given.ckpt, data)
        results.about["data"] = {
            "given": given.data, "manifest_hash": getattr(data, "manifest_hash", None)
        }  # fmt: skip
    results.about.update(
        num_recurrences=lm.model.num_recurrences,
        context=None if encoder is None else encoder.context,
        device=str(trainer.strategy.root_device),
        precision=str(trainer.precision),
    )
    if data is not None:
        losses(given, lm, data, trainer, results)
    if encoder is not None:
        place(lm, trainer)
        tasks(given, selection, lm, scorer, encoder, library, results)
    results.finished = True


def losses(
    given: argparse.Namespace, lm: LoopedLM, data: L.LightningDataModule, trainer: L.Trainer, results: Results
) -> None:
    """Validation loss over recurrences."""
    from looped_lm.evaluation.measuring import default_counts, validation_loss

    if data.vocab_size > lm.model.vocab_size:  # type: ignore[attr-defined]  # every data module of ours has one
        raise UserError(
            f"The data has a vocabulary of {data.vocab_size}, the model one of {lm.model.vocab_size}: give "  # type: ignore[attr-defined]
            "--data prepared with the model's tokenizer."
        )
    saved = None if Path(given.ckpt).is_dir() else given.ckpt
    asked = given.recurrences is not None
    for count in given.recurrences or default_counts(lm.model.num_recurrences):
        print(f"validation loss, r = {count}", file=sys.stderr)
        results.losses.append(validation_loss(lm, data, trainer, count, asked, saved))


def tasks(
    given: argparse.Namespace,
    selection: Selection,
    lm: LoopedLM,
    scorer: Scorer,
    encoder: Encoder,
    library: TaskLibrary | None,
    results: Results,
) -> None:
    """Probes and public tasks at each number of recurrences."""
    from looped_lm.evaluation.measuring import probe_rows, refusal
    from looped_lm.evaluation.probes import EXAMPLES
    from looped_lm.evaluation.results import TaskRow
    from looped_lm.evaluation.suite import axis_of

    counts = []
    for count in given.recurrences or [lm.model.num_recurrences]:
        reason = refusal(lm, count)
        if reason is None:
            counts.append(count)
            continue
        names = [*(p.name for p in selection.probes), *(t.name for t in selection.public)]
        results.tasks += [TaskRow(name, axis_of(name), count, refused=reason) for name in names]
    for probe in selection.probes:
        results.tasks += probe_rows(probe, scorer, encoder, counts, given.examples or EXAMPLES, given.seed)
    if library is not None:
        from looped_lm.evaluation.harness import HarnessLM
        from looped_lm.evaluation.public import measure

        for count in counts:
            for task in selection.public:
                model = HarnessLM(scorer, encoder, count, given.seed)
                results.tasks += measure(task, library, model, given.examples, given.seed)
