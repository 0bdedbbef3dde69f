"""Fill the fields of a Markdown template with values from reports, or check that its page still says the same.

A field is {FILE#PATH:FORMAT}, such as {nano/fit.json#fit.parameters.phi:.3f}; files are named as seen from the
template. Exit status: 0; 1 if --check finds a difference; 2 for bad input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fitting.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m fitting page`."""
    parser.add_argument("template", type=Path, metavar="TEMPLATE", help="Markdown with fields, named PAGE.in")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: TEMPLATE without .in)")
    parser.add_argument("--check", action="store_true", help="write nothing; name the lines that differ")
    parser.add_argument("--overwrite", action="store_true", help="replace a page that differs")


def run(options: argparse.Namespace) -> int:
    """Write or check a page. Raises `FitError` for bad input."""
    from fitting.errors import FitError
    from fitting.records import write_text_atomically
    from fitting.report.page import changed_lines, fill, page_of

    out = options.out or page_of(options.template)
    if out.resolve() == options.template.resolve():
        raise FitError(f"--out {out} is the template itself. Name another file")
    expected = fill(options.template)
    there = out.read_bytes().decode("utf-8", errors="replace") if out.exists() else None
    if options.check and options.overwrite:
        raise FitError("--check writes nothing, and --overwrite replaces the page: leave one out")
    if options.check:
        if there is None:
            raise FitError(f"There is no page {out}. Write it: python -m fitting page {options.template}")
        found = list(changed_lines(there, expected))
        for line in found:
            print(f"{out}: {line}")
        print(f"{out}: {len(found)} lines differ" if found else f"{out}: what {options.template} gives")
        return common.NOT_TRUSTED if found else common.OK
    if there == expected:
        print(f"{out}: unchanged")
        return common.OK
    if there is not None and not options.overwrite:
        raise FitError(
            f"{out} is there and says something else; --check names the lines. Add --overwrite to replace it"
        )
    write_text_atomically(out, expected)
    print(f"wrote {out}")
    return common.OK
