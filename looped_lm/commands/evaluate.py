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
#: Exit status if something that was asked for could not be measured.
INCOMPLETE = 3

TASKS = """\
--tasks takes, in any number:
  recurrences           validation loss at r/2, r, 2r and 4r recurrences, as far as the components allow them; at r also
                        what the model would predict after each recurrence, and its losses if it left the loop early
  probes                induction head and variable assignment, made from the seed; each also has its own name
  AXIS                  parametric_knowledge, reading_comprehension, math_word_problems, compositional_symbolic: the
                        public tasks of an axis, through lm-eval; reasoning_primitives: the probes
  public, all           the four axes of public tasks; everything
  NAME, FILE.yaml       a task or group of lm-eval, or a task file in its format

Public tasks fetch their data from the Hugging Face Hub, or take it from the local cache. The exit status is 3 if
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
    add = p.add_argument
    add("--ckpt", "--ckpt_path", required=True, help="checkpoint, or a folder written by `export`")
    add("--tasks", nargs="+", help="see below; default: recurrences (where data is known) and probes")
    add(
        "--recurrences",
        type=int,
        nargs="+",
        help="measure everything at these; default: the loss at r/2, r, 2r, 4r, the rest at r, as trained",
    )
    add("--examples", type=int, help="number per probe and task; default: 1,000 of a probe, all of a task")
    add("--seed", type=int, default=0, help="seed of probes and choice of shots; default: %(default)s")
    add("--batch-size", type=int, default=32, help="prompts per pass; default: %(default)s")
    add("--context", type=int, help="tokens that the model reads at once; default: as trained")
    add("--out", type=Path, help=f"file to write; default: the checkpoint's name with {SUFFIX}")
    add("--overwrite", action="store_true", help="replace a file of that name")
    add("--data", help="data module, class_path and init_args as YAML; default: that of training")
    add("--tokenizer", help="class path, or class_path and init_args as YAML; default: that of training")
    add("--device", help="such as cpu or cuda:0; default: a GPU if there is one")
    add("--precision", help="as in fit; default: that of training, or 32-true")
    return p


def main(args: Sequence[str]) -> int:
    """Run the command; its exit status."""
    given = parser().parse_args(args)
    from fitting.records import write_text_atomically
    from looped_lm.common.writing import failing_with
    from looped_lm.configuration.command_line import quiet
    from looped_lm.evaluation.results import parsed
    from looped_lm.evaluation.session import Evaluation

    checkpoint = Path(given.ckpt)
    # "." and ".." have no name to add to.
    stem = checkpoint.resolve() if checkpoint.is_dir() else checkpoint.with_suffix("")
    out = given.out or stem.with_name(stem.name + SUFFIX)
    # Results of an interrupted evaluation may be replaced; whole ones only on request, and by whole ones.
    there = parsed(out.read_text(encoding="utf-8", errors="replace")) if out.exists() else {"finished": False}
    if there is None:
        raise UserError(f"{out} holds something other than results: name another file by --out.")
    whole = there.get("finished") is not False
    if whole and not given.overwrite:
        raise UserError(f"{out} exists: name another file by --out, or give --overwrite.")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(f"{out} cannot be written: {out.parent} is not a writable folder. Give --out.")
    quiet()
    tasks = given.tasks or default_tasks(checkpoint, given.data)
    recurrences = given.recurrences and list(dict.fromkeys(given.recurrences))
    names = ("examples", "seed", "batch_size", "context", "data", "tokenizer", "device", "precision")
    options = {name: getattr(given, name) for name in names}
    evaluation = Evaluation(given.ckpt, tasks, recurrences, **options)
    results = evaluation.results
    before = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        evaluation.run()
    finally:
        signal.signal(signal.SIGTERM, before)
        # An evaluation that is interrupted, by Ctrl-C or SIGTERM, keeps what it has found.
        if results.losses or results.tasks:
            if whole and not results.finished:
                out = out.with_name(f"{out.name}.partial")
            print(f"\n{results.table()}\n")
            way_out = "The table above is all there is: make room, or name another file by --out."
            with failing_with(way_out, out):
                write_text_atomically(out, results.to_json())
            print(f"results  {out}")
    return 0 if results.complete else INCOMPLETE


def default_tasks(checkpoint: Path, data: str | None) -> list[str]:
    """Tasks that run offline. Exported folders and converted checkpoints do not know their data."""
    from looped_lm.sharing.load import names_data

    if data is None and checkpoint.exists() and not names_data(checkpoint):
        print(
            f"note: {checkpoint} names no data: only the probes run, with its tokenizer or that of --tokenizer. Give "
            "--data for the validation loss.",
            file=sys.stderr,
        )
        return ["probes"]
    return ["recurrences", "probes"]
