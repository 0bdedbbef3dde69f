"""`python -m looped_lm COMMAND`. Help, wrong commands and their hints answer before torch is imported."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import select
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from looped_lm.common.errors import UserError
from looped_lm.runs.preemption import Preempted, report, stopped_before_training

HELP = """usage: python -m looped_lm COMMAND [--config FILE ...] [--key value ...]

Train looped (depth-recurrent) language models.

commands:
  fit        train a model, for example: python -m looped_lm fit --config r8_hc.yaml
  validate   validation loss of a checkpoint (--ckpt_path FILE)
  test       the same on the test split
  predict    loss of every token of the held-out rows
  plan       what a run would be: parameters, FLOPs, steps, learning rates, memory; trains nothing

These start from the shipped base.yaml; a --config changes it, and so does any --key. A config is found in the working
folder first, then among the shipped ones. `python -m looped_lm fit --help` documents every key.

commands with options of their own (--help lists them):
  sweep      many runs from one file: plan, run, status, retry, records (sweep plan iso_depth.yaml)
  generate   text from a checkpoint (--ckpt FILE --prompt TEXT)
  evaluate   loss over recurrences, probes and public tasks of a checkpoint (--ckpt FILE)
  export     a checkpoint's model as safetensors and config.json (--ckpt FILE --out FOLDER)
  convert    checkpoints of the paper authors' public code to ours, and back (--from reference FOLDER --out FILE)
"""
LIGHTNING = ("fit", "validate", "test", "predict")
#: Modules of looped_lm.commands with a parser of their own, `main(args)`, which may give an exit status.
OWN_OPTIONS = ("sweep", "generate", "evaluate", "export", "convert")
COMMANDS = (*LIGHTNING, "plan", *OWN_OPTIONS)
SIBLINGS = ("callbacks", "datamodules", "configs", "fitting")


def refuse_shadowing() -> None:
    """Refuse to run where a user's folder hides one of the project's packages, whose import would fail oddly.

    Raises:
        UserError: naming the folder in the way.
    """
    root = Path(__file__).resolve().parent.parent
    for name in SIBLINGS:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if spec is not None and found is not None and found != root / name:
            raise UserError(
                f"{spec.origin} hides the package {name!r} of looped_lm: rename it, or run from another folder."
            )


def run(args: list[str]) -> int:
    """Run one command; `args[0]` is its name. Its exit status."""
    from looped_lm.configuration.config_files import resolve_arguments

    refuse_shadowing()
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    if args[0] in OWN_OPTIONS:
        return importlib.import_module(f"looped_lm.commands.{args[0]}").main(args[1:]) or 0
    command, rest = args[0], resolve_arguments(args[1:])
    # Lightning's launcher starts the other processes of a run from sys.argv.
    sys.argv[1:] = [command, *rest]
    try:
        if command == "plan":
            from looped_lm.commands.plan import main
        else:
            from looped_lm.configuration.parser import main
    except RuntimeError as error:
        if "torchvision" not in str(error):
            raise
        raise UserError(
            f"torchvision does not match this torch ({error}). looped_lm does not need it: pip uninstall torchvision."
        ) from error
    main()
    return 0


def reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more; other pipes break, too."""
    try:
        there = select.poll()
        there.register(sys.stdout.fileno(), select.POLLOUT)
    except (OSError, ValueError):
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in there.poll(0))


def cli(args: list[str]) -> int:
    """Exit status of the command line."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if args[0] == "--version":
        from looped_lm import __version__

        print(__version__)
        return 0
    if args[0] not in COMMANDS:
        close = difflib.get_close_matches(args[0], COMMANDS, n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        print(f"error: unknown command {args[0]!r}.{guess} Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        with stopped_before_training() if args[0] == "fit" else nullcontext():
            return run(args)
    except Preempted as stop:
        return report(stop)
    except KeyboardInterrupt:
        print("error: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            # Lightning's way out; there was no training to save, or the user did not want to wait for it.
            print("error: interrupted.", file=sys.stderr)
            return 128 + signal.SIGINT
        # Lightning leaves on SIGTERM without a status, which a scheduler would take for success.
        if type(stop).__name__ != "SIGTERMException":
            raise
        print("error: stopped by SIGTERM; resume from the last checkpoint with --ckpt_path.", file=sys.stderr)
        return 128 + signal.SIGTERM
    except BrokenPipeError:
        if not reader_has_left():
            raise
        # The reader (head, less) has left. What Python flushes at its end must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if args[0] in LIGHTNING:
            print("error: standard output was closed, which ended the run.", file=sys.stderr)
        return 128 + signal.SIGPIPE
    except Exception as error:
        # Whatever else is raised is a fault in code, ours or a component's, and keeps its traceback.
        users = (ValueError, OSError, FloatingPointError, ImportError)
        if os.environ.get("LOOPED_LM_TRACEBACK") or not (
            isinstance(error, users) or type(error).__name__ == "MisconfigurationException"
        ):
            raise
        from looped_lm.configuration.hints import innermost

        print(f"error: {innermost(str(error))}\n(LOOPED_LM_TRACEBACK=1 shows where.)", file=sys.stderr)
        return 1
