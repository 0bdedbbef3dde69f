"""Scaling laws of looped language models, from run records: `python -m fitting COMMAND --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from fitting.errors import FitError
from fitting.records import RecordError

# The matrices here are tiny: threads of the linear algebra library would only wait for each other. The
# library reads this when numpy is first imported, which no command has done yet.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

COMMANDS = {
    "fit": "Fit a scaling law to runs, with intervals, diagnostics and allocation.",
    "compare": "Compare a case study with its baseline: delta phi three ways, the rival shift, and the channels.",
    "match": "Match looped runs with r = 1 runs: phi by r, width, tokens or budget, almost without the law, beside "
    "the joint fit.",
    "plan": "How well a planned grid would determine phi (or delta phi), and which added run helps most per FLOP.",
    "predict": "What a fitted law says about budgets: size, tokens, loss with prediction interval, and the best r.",
    "published": "Fit the shipped grid of the paper and print every value beside the published one.",
    "verify": "Derive the numbers of a report from its runs again and say which differ.",
}
"""Command -> the first line of its module in `fitting.commands`, which is loaded for that command alone."""


def build_parser(asked: str | None = None) -> argparse.ArgumentParser:
    """The parser, with the options of the command that is `asked` for, or of every command."""
    parser = argparse.ArgumentParser(prog="python -m fitting", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if asked in (None, name):
            module = import_module(f"fitting.commands.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 for a fit that is not to be trusted, 2 for bad input, 130 if interrupted."""
    from fitting.commands import common

    words = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser(words[0] if words else "").parse_args(words)
    try:
        common.check_numbers(options)
        return import_module(f"fitting.commands.{options.command}").run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return common.INTERRUPTED
    except (FitError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return common.BAD_INPUT
    except BrokenPipeError:
        # The reader (head, less) has gone, so nobody would see a message.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error}. Check the path, the permissions and the free space", file=sys.stderr)
        return common.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
