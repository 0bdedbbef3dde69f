"""How a command runs and ends in this process. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import importlib.util
import os
import re
import select
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from looped_lm.common.errors import UserError, for_users

#: Commands of LightningCLI, whose options are the keys of the configuration.
LIGHTNING = ("fit", "validate", "test", "predict")
SIBLINGS = ("callbacks", "datamodules", "configs", "fitting")


def run_as_command_line(command: Sequence[str]) -> int:
    """Do in this process what `python -m looped_lm fit ARGS` does in a new one; return its exit status.

    For a process that was started as something else, such as a worker of a sweep. Sets sys.argv and `__main__`, from
    which Lightning's launcher starts the other processes of a run. Raises nothing: a fault in code is printed with its
    traceback, and gives 1.
    """
    spec = importlib.util.find_spec("looped_lm.__main__")
    assert spec is not None
    sys.modules["__main__"] = importlib.util.module_from_spec(spec)
    sys.argv[:1] = [str(spec.origin)]
    try:
        return exit_status(command[0], lambda: run_lightning(command))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def run_lightning(command: Sequence[str]) -> int:
    """Run one of LIGHTNING with its arguments; its exit status. UserError if torchvision does not match torch."""
    from looped_lm.configuration.config_files import resolve_arguments

    # Lightning's launcher starts the other processes of a run from sys.argv.
    sys.argv[1:] = [command[0], *resolve_arguments(list(command[1:]))]
    try:
        from looped_lm.configuration.parser import main
    except RuntimeError as error:
        if "torchvision" not in str(error):
            raise
        raise UserError(
            f"torchvision does not match this torch ({error}). looped_lm does not need it: pip uninstall torchvision."
        ) from error
    quiet()
    main()
    return 0


def exit_status(name: str, run: Callable[[], int | None]) -> int:
    """Run the command of this name; its exit status, where None counts as 0.

    Raises:
        SystemExit: as the command raised it, with its own status.
        Exception: a fault in code, ours or a component's, which keeps its traceback.
    """
    from looped_lm.runs.preemption import Preempted, report, stopped_before_training

    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    try:
        with stopped_before_training() if name == "fit" else nullcontext():
            refuse_shadowing()
            return run() or 0
    except Preempted as stop:
        return report(stop)
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning leaves on Ctrl-C by SystemExit: nothing to save, or the user did not want to wait for it.
        if isinstance(stop, KeyboardInterrupt) or isinstance(stop.__context__, KeyboardInterrupt):
            print("error: interrupted.", file=sys.stderr)
            return 128 + signal.SIGINT
        # It leaves on SIGTERM without a status, which a scheduler would take for success.
        if type(stop).__name__ != "SIGTERMException":
            raise
        print("error: stopped by SIGTERM; resume from the last checkpoint with --ckpt_path.", file=sys.stderr)
        return 128 + signal.SIGTERM
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        # The reader (head, less) has left. What Python flushes on exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if name in LIGHTNING:
            print("error: standard output was closed, which ended the run.", file=sys.stderr)
        return 128 + signal.SIGPIPE
    except Exception as error:
        if os.environ.get("LOOPED_LM_TRACEBACK") or not for_users(error):
            raise
        print(f"error: {message_of(error)}\n(LOOPED_LM_TRACEBACK=1 shows where.)", file=sys.stderr)
        return 1


def message_of(error: BaseException) -> str:
    """The message of an error, without what torch wraps around an error in a data-loading process."""
    worker = re.match(r"Caught (\w+) in DataLoader worker process", str(error))
    # torch puts the worker's whole traceback into the message; the exception itself comes at its end.
    return str(error).rpartition(f"{worker.group(1)}: ")[2].strip() if worker else str(error)


def refuse_shadowing() -> None:
    """Raise a UserError where a user's folder hides one of our packages, whose import would fail oddly."""
    root = Path(__file__).resolve().parents[2]
    for name in SIBLINGS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and Path(spec.origin).resolve().parent != root / name:
            raise UserError(
                f"{spec.origin} hides the package {name!r} of looped_lm: rename it, or run from another folder."
            )


def _reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more; other pipes break, too."""
    try:
        there = select.poll()
        there.register(sys.stdout.fileno(), select.POLLOUT)
    except (OSError, ValueError):
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in there.poll(0))


def quiet() -> None:
    """Silence warnings that do not concern a user of the command line."""
    import logging

    for message in (
        r".*isinstance\(treespec, LeafSpec\)",
        # LoopedLM logs sums over all processes.
        r"It is recommended to use `self\.log\(.*sync_dist=True",
        r".*The dirpath has changed from",
        # Each run has its own folder, or goes on in it and keeps the rows that are there.
        r"Experiment logs directory .* exists and is not empty",
        r".*Checkpoint directory .* exists and is not empty",
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda r: "litlogger" not in r.getMessage()
    )
