"""`python -m looped_lm COMMAND`: runs a command. Help and unknown commands do not wait for torch."""

from __future__ import annotations

import importlib
import sys

from looped_lm.common.text import did_you_mean
from looped_lm.configuration.command_line import LIGHTNING, exit_status, run_lightning

HELP = """usage: python -m looped_lm COMMAND [--config FILE ...] [--key value ...]

Train looped (depth-recurrent) language models.

commands:
  fit        train a model, for example: python -m looped_lm fit --config r8_hc.yaml
  validate   validation loss of a checkpoint (--ckpt_path FILE)
  test       the same on the test split
  predict    loss of every token of the held-out rows
  plan       size and cost of a run: parameters, FLOPs, steps, learning rates, memory; trains nothing

These start from the shipped base.yaml; a --config changes it, and so does any --key. A config is looked up in the
working folder first, then among the shipped ones. `python -m looped_lm fit --help` documents every key.

commands with their own options (--help lists them):
  sweep      many runs from one file: plan, run, status, retry, records (sweep plan iso_depth.yaml)
  generate   text from a checkpoint (--ckpt FILE --prompt TEXT)
  evaluate   loss over recurrences, probes and public tasks of a checkpoint (--ckpt FILE)
  export     a checkpoint's model as safetensors and config.json (--ckpt FILE --out FOLDER)
  convert    checkpoints of the paper authors' public code to ours, and back (--from reference FOLDER --out FILE)
"""
#: Modules of looped_lm.commands with their own parser; each has a `main(args)` that may return an exit status.
OWN_OPTIONS = ("sweep", "generate", "evaluate", "export", "convert")
COMMANDS = (*LIGHTNING, "plan", *OWN_OPTIONS)


def run(args: list[str]) -> int | None:
    """Run the command named `args[0]` and return its exit status; None means 0."""
    if args[0] in LIGHTNING:
        return run_lightning(args)
    return importlib.import_module(f"looped_lm.commands.{args[0]}").main(args[1:])


def cli(args: list[str]) -> int:
    """Run the command line and return its exit status."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if args[0] == "--version":
        from looped_lm import __version__

        print(__version__)
        return 0
    if args[0] not in COMMANDS:
        guess = did_you_mean(args[0], COMMANDS)
        print(f"error: unknown command {args[0]!r}.{guess} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    return exit_status(args[0], lambda: run(args))
