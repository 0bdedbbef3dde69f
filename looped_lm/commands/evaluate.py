"""`python -m looped_lm evaluate`: loss over recurrences, probes and public tasks of a trained model."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from looped_lm.common.errors import UserError

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
    from fitting.records import write_text_atomically
    from looped_lm.common.writing import failing_with
    from looped_lm.configuration.command_line import quiet
    from looped_lm.evaluation.results import parsed
    from looped_lm.evaluation.session import Evaluation

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
    quiet()
    evaluation = Evaluation(
        given.ckpt,
        given.tasks or default_tasks(Path(given.ckpt), given.data),
        given.recurrences and list(dict.fromkeys(given.recurrences)),
        given.examples,
        given.seed,
        given.batch_size,
        given.context,
        given.data,
        given.tokenizer,
        given.device,
        given.precision,
    )
    results = evaluation.results
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        evaluation.run()
    finally:
        signal.signal(signal.SIGTERM, before)
        # An evaluation that is interrupted keeps what it has found.
        if results.losses or results.tasks:
            if whole and not results.finished:
                out = out.with_name(f"{out.name}.partial")
            print(f"\n{results.table()}\n")
            with failing_with(
                "The table above is all there is: make room, or name another file by --out.", out
            ):
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
