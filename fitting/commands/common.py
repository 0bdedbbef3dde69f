"""What the commands share: options for runs and laws, progress, output, exit statuses. Nothing heavy is loaded here."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fitting.data.reading import Reading
from fitting.errors import FitError

if TYPE_CHECKING:
    from fitting.data.runs import Runs
    from fitting.data.splits import Split
    from fitting.estimation.results import FitResult
    from fitting.laws import Law
    from fitting.report.document import Section
    from fitting.report.report import Reported

T = TypeVar("T")
OK, NOT_TRUSTED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

LARGEST_PHI = 10
"""Beyond it r^phi means nothing, and soon overflows."""

LAW_NAMES = {
    "joint": ("Power", "phi free (default)"),
    "chinchilla": ("", "one architecture, no r"),
    "equal-exponents": ("", "Chinchilla's with alpha = beta"),
    "one-token": ("", "runs of one token count: E + A·M^-alpha, without beta"),
    "per-r": ("PerRecurrence", "a free multiplier for each r"),
    "saturating": ("Saturating", "1 + c(1 - r^-k)"),
    "log": ("LogGrowth", "1 + c·log r"),
    "drift-flops": ("DriftingPower", "phi linear in log C"),
    "drift-tokens": ("TokenDriftingPower", "phi linear in log D"),
}
"""Short names of the shipped laws: the joint law's multiplier (none for other laws), and what help says. Any other
value of --law is a class path."""


def add_run_options(parser: argparse.ArgumentParser, with_and_without: bool = True) -> None:
    """Which runs are used, and how the injection is counted."""
    both = ", and the parameter of interest is also given with them" if with_and_without else ""
    listed = f"leave runs out by a rule such as 'val_loss>4'; they are listed{both}"
    for option, what in (("--where", "use only runs with, e.g., 'budget<=4.64e18'"), ("--exclude", listed)):
        parser.add_argument(option, action="append", default=[], metavar="RULE", help=what)
    parser.add_argument("--split", default="paper", help="where the injection is counted (default: paper)")
    text = "what N counts: all parameters but embedding and head (default), those that one token uses (mixtures of "
    text += "experts), or all with embedding and head"
    parser.add_argument("--count", choices=("total", "active", "with-embedding"), default="total", help=text)
    text = "fit runs that differ in tokenizer, vocabulary, data or row length, and say so"
    parser.add_argument("--allow-mixed", action="store_true", help=text)
    text = "unit of the losses of tables: nats per token (default), bits, or bits-per-byte with --bytes-per-token"
    parser.add_argument("--loss-unit", metavar="UNIT", help=text)
    parser.add_argument(
        "--bytes-per-token", type=float, metavar="X", help="of the tokenizer, for bits-per-byte"
    )
    text = "names of a table's columns, such as tokens=D,val_loss=L"
    parser.add_argument("--columns", default="", metavar="OURS=THEIRS,...", help=text)


def add_law_options(parser: argparse.ArgumentParser) -> None:
    """The runs to fit, and which law."""
    what = "run records, folders, CSV files, or published"
    parser.add_argument("runs", nargs="+", metavar="RUNS", help=what)
    add_run_options(parser)
    listed = ", ".join(f"{name} ({what})" for name, (_, what) in LAW_NAMES.items())
    parser.add_argument("--law", default="joint", help=f"{listed}, or the class path of a law of your own")
    parser.add_argument("--phi", type=float, help="fix phi of the joint law to this value")


def add_search_options(
    parser: argparse.ArgumentParser, starts: int = 500, resamples: int | None = 1000
) -> None:
    """How hard to search and how often to resample (None: without that option)."""
    parser.add_argument("--starts", type=int, default=starts, help=f"starts of every fit (default: {starts})")
    if resamples is not None:
        parser.add_argument(
            "--bootstrap", dest="resamples", type=int, default=resamples, metavar="N",
            help=f"resamples of every bootstrap, 0 for none (default: {resamples})",
        )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of starts and of draws (default: 0)")
    add_thread_options(parser)


def add_grid_option(parser: argparse.ArgumentParser) -> None:
    """How many grids are simulated for each claim about rival laws and matching."""
    text = "simulated grids behind each claim about rival laws and matching; 0: AICc alone, no errors (default: 200)"
    parser.add_argument("--grids", type=int, default=200, metavar="N", help=text)


def add_thread_options(parser: argparse.ArgumentParser) -> None:
    """How many threads, and whether progress is shown."""
    parser.add_argument("--workers", type=int, help="threads (default: all cores; results are the same)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def add_output_options(parser: argparse.ArgumentParser, report: bool = True) -> None:
    """Where results go."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    if report:
        text = "write a report to this folder: the numbers as JSON, report.md, figures"
        parser.add_argument("--report", type=Path, metavar="DIR", help=text)
        parser.add_argument("--overwrite", action="store_true", help="let --report replace an earlier report")


def reading(options: argparse.Namespace) -> Reading:
    """How tables are read. Raises `FitError`."""
    pairs = tuple(pair for pair in options.columns.split(",") if pair.strip())
    return Reading(options.allow_mixed, options.loss_unit, options.bytes_per_token, pairs)


def load(paths: Iterable[str], count: str, how: Reading | None = None, with_loss: bool = True) -> Runs:
    """Load runs, named as `sources.named` reads them, with N as --count says, so that every rule sees the same N."""
    from fitting.commands.sources import named
    from fitting.data.loading import load_runs

    return load_runs(*named(paths), with_loss=with_loss, reading=how).counting(count)


def check_unit(options: argparse.Namespace, result: FitResult, runs: Runs) -> None:
    """Refuse losses whose fitted E shows that they are bits, unless their unit was given. Raises `FitError`."""
    from fitting.data.comparable import refuse_bits

    if options.loss_unit is None and "E" in result.parameters and result.r_squared > 0.9:
        refuse_bits(result["E"], float(runs.n_total.max()), span(runs))


def span(runs: Runs) -> float:
    """Ratio of the largest training FLOPs to the smallest."""
    return float(runs.training_flops.max() / runs.training_flops.min())


def choices(kind: Callable[..., T], options: argparse.Namespace) -> T:
    """A `kind` (a dataclass) made from the options named like its fields, with lists as tuples."""
    values = (getattr(options, name) for name in inspect.signature(kind).parameters)
    return kind(*(tuple(value) if isinstance(value, list) else value for value in values))


def stated(chosen: Any) -> dict[str, Any]:
    """The options that a report holds, without those that reports from before them had by default."""
    later = {"count": "total", "reading": Reading()}
    return {name: value for name, value in vars(chosen).items() if later.get(name, MISSING) != value}


def select(runs: Runs, chosen: Any) -> tuple[Runs, Runs]:
    """The runs to fit, and those before --exclude. `chosen` has the rules `where` and `exclude`. Raises `FitError`."""
    before = runs.where(*chosen.where)
    kept = before.exclude(*chosen.exclude)
    if not len(kept):
        raise FitError(f"No run is left of {len(runs)} after --where and --exclude. Loosen the rules")
    return kept, before


def check_numbers(options: argparse.Namespace) -> None:
    """Refuse counts that are too small, whatever the command. Raises `FitError`."""
    named = {"bootstrap": "resamples"}
    for name, least in (
        ("seed", 0),
        ("bootstrap", 0),
        ("simulate", 0),
        ("grids", 0),
        ("candidates", 0),
        ("workers", 1),
    ):
        value = getattr(options, named.get(name, name), None)
        if value is not None and value < least:
            raise FitError(f"--{name} {value} is too small. Give {least} or more")


def check_report(options: argparse.Namespace, kind: str) -> None:
    """Refuse, before any work, a --report that cannot be written and --overwrite alone. Raises `FitError`."""
    from fitting.report.report import check_folder

    if options.report:
        check_folder(options.report, options.overwrite, kind)
    elif options.overwrite:
        raise FitError("--overwrite lets --report replace a report. Add --report DIR, or leave it out")


def split_of(chosen: Any, *tables: Runs) -> Split:
    """The split that `chosen.split` names. It says what N counts if that matters to the tables. Raises `FitError`."""
    from fitting.data.splits import split_named

    # Once the active parameters are N, a table no longer shows that its runs are mixtures.
    matters = chosen.count != "total" or any(runs.mixtures for runs in tables)
    return split_named(chosen.split).saying(chosen.count if matters else "")


def law_of(chosen: Any, *tables: Runs) -> Law:
    """The law that `chosen.law`, `chosen.phi` and `chosen.split` describe, for these runs. Raises `FitError`."""
    from fitting import laws

    split = split_of(chosen, *tables)
    if chosen.phi is not None:
        if chosen.law != "joint":
            raise FitError(
                f"--phi belongs to the joint law, not to --law {chosen.law}. Leave one of them out"
            )
        if not abs(chosen.phi) <= LARGEST_PHI:
            raise FitError(f"--phi is {chosen.phi:g}; it must lie between -{LARGEST_PHI} and {LARGEST_PHI}")
        return laws.JointLaw(laws.FixedPower(chosen.phi), split)
    if chosen.law == "chinchilla":
        return laws.ChinchillaLaw(split.count)
    if chosen.law == "equal-exponents":
        return laws.EqualExponentsLaw(split.count)
    if chosen.law == "one-token":
        return laws.OneTokenLaw(split=split)
    if chosen.law in LAW_NAMES:
        multiplier: laws.Multiplier = getattr(laws, LAW_NAMES[chosen.law][0])()
        return laws.JointLaw(multiplier, split)
    return _user_law(chosen.law, split)


def _user_law(path: str, split: Split) -> Law:
    """A law by class path. An error inside the user's module is a bug there and passes through."""
    from fitting.laws import Law

    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise FitError(
            f"There is no law {path!r}. Use one of {', '.join(LAW_NAMES)}, or a class path like mylaws.MyLaw"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise FitError(
            f"--law {path}: {error}. Check the class path; the working folder is searched first"
        ) from None
    found = getattr(module, class_name, None)
    if found is None:
        raise FitError(f"--law {path}: the module {module_name} has no {class_name}")
    if not (isinstance(found, type) and issubclass(found, Law)):
        raise FitError(f"--law {path} is not a subclass of fitting.Law")
    needed = [p.name for p in inspect.signature(found).parameters.values() if p.default is p.empty]
    if needed:
        raise FitError(f"--law {path} cannot be made without {', '.join(needed)}. Give them defaults")
    law = found()
    law.split = split
    law.name = law.name or class_name
    return law


def progress(options: argparse.Namespace) -> Callable[[str], None]:
    """A function that prints a line to stderr with the seconds so far; stdout is for results alone."""
    start = time.monotonic()

    def say(what: str) -> None:
        if not options.quiet:
            print(f"[{time.monotonic() - start:5.1f} s] {what}", file=sys.stderr, flush=True)

    return say


def show(options: argparse.Namespace, numbers: Any, sections: Iterable[Section]) -> None:
    """Print the numbers as JSON (dataclasses become objects, NaN becomes null), or the sections."""
    from fitting.data.plain import plain

    if options.json:
        print(json.dumps(plain(numbers), indent=2, allow_nan=False))
    else:
        print("\n\n".join(section.text() for section in sections))


def deliver(result: Reported, options: argparse.Namespace, progress: Callable[[str], None]) -> None:
    """Show a result, and write its report if one is asked for."""
    from fitting.report.report import sections_of, write_report

    show(options, result.to_dict(), sections_of(result))
    if options.report:
        for path in write_report(result, options.report, progress):
            progress(f"wrote {path}")


def verdict(doubts: Iterable[str]) -> int:
    """Print every reason for doubt to stderr. Returns the exit status."""
    found = list(doubts)
    for doubt in found:
        print(f"not to be trusted: {doubt}", file=sys.stderr)
    return NOT_TRUSTED if found else OK
