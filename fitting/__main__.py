"""Scaling laws of looped language models, from run records: `python -m fitting COMMAND --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fitting.commands import common, compare, fit, page, plan, predict, published, verify
from fitting.errors import FitError
from fitting.records import RecordError

# The matrices here are tiny: threads of the linear algebra library would only wait for each other. It reads
# this when numpy is first imported, which no command has done yet.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_COMMANDS = {
    "fit": fit,
    "compare": compare,
    "plan": plan,
    "predict": predict,
    "published": published,
    "verify": verify,
    "page": page,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command and option."""
    parser = argparse.ArgumentParser(prog="python -m fitting", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").strip().split("\n")[0]
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 1 for a fit that is not to be trusted, 2 for bad input, 130 if interrupted."""
    options = build_parser().parse_args(arguments)
    try:
        common.check_numbers(options)
        return _COMMANDS[options.command].run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return common.INTERRUPTED
    except (FitError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return common.BAD_INPUT
    except BrokenPipeError:
        # The reader (head, less) has left; there is nobody to tell.
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"error: {error}. Check the path, the permissions and the free space", file=sys.stderr)
        return common.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
