"""`python -m looped_lm sweep plan|run|status|retry|records FILE`: many runs from one file."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fitting.records import write_text_atomically
from looped_lm.common.errors import UserError
from looped_lm.common.text import aligned, duration
from looped_lm.sweeps import files, slurm
from looped_lm.sweeps.expansion import expand, shared_runs
from looped_lm.sweeps.place import Place, State, Status

# Jobs that an earlier version queued import it from here.
from looped_lm.sweeps.place import latest_record as latest_record
from looped_lm.sweeps.runs import Run, varying

if TYPE_CHECKING:
    from looped_lm.sweeps.planning import PlannedRun, Planner


def parser() -> argparse.ArgumentParser:
    """The parser with every command and option."""
    top = argparse.ArgumentParser(prog="python -m looped_lm sweep", description=__doc__, allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument("--out", type=Path, default="runs", metavar="DIR", help="folder of sweeps (runs)")
    place.add_argument(
        "--records", type=Path, metavar="DIR",
        help="folder of finished runs' records (default: records in the sweep's folder); a run with a record there "
        "is not run again. For runs shared with another sweep, the folder of its name beside DIR counts, too",
    )  # fmt: skip

    def add(name: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False, parents=parents)
        command.add_argument("file", metavar="FILE", help="sweep file, or the name of a shipped one")
        return command

    plan = add("plan", "size and cost of the runs: N, D, FLOPs, time, batch that fits; trains nothing")
    plan.add_argument("--device", metavar="NAME", help="device to give times for, such as 'h100 sxm'")
    plan.add_argument(
        "--peak-flops", type=float, metavar="X", help="peak FLOPs/s of a device not in the list"
    )
    plan.add_argument(
        "--mfu", type=float, default=0.4, help="share of the peak that training reaches (default 0.4)"
    )
    plan.add_argument("--devices", type=int, metavar="N", help="devices per run (default: as configured)")
    plan.add_argument("--memory", type=float, metavar="GIB", help="memory of a device, to size the batch")
    plan.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the runs as a design for `fitting plan`"
    )
    plan.add_argument(
        "--like", default="published", metavar="RUNS",
        help="runs of equal tokens: finished runs whose fit and scatter say how well matching will know phi "
        "(default: the paper's grid)",
    )  # fmt: skip
    plan.add_argument("--overwrite", action="store_true", help="let --csv replace a file")
    trained = {"run": "train all runs that are not finished", "retry": "train the failed runs again"}
    for name, text in trained.items():
        run = add(name, text, place)
        run.add_argument("--launcher", choices=("local", "slurm"), default="local", help="default: local")
        run.add_argument("--jobs", type=int, metavar="N", help="local: runs at a time (default 1)")
        run.add_argument("--devices", metavar="LIST", help="local: accelerators to share out, such as 0,1")
        run.add_argument("--profile", type=Path, metavar="FILE", help="slurm: settings of a cluster")
    add("status", "how far the runs are, and the last lines of failed ones", place)
    add("records", "collect the records of finished runs for `python -m fitting fit`", place)
    return top


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit status: 0, 1 if runs failed or are unfinished after `run`, 75 if a signal ended it.

    Raises:
        UserError: a mistake in the sweep file, an option or a run; nothing is run then.
    """
    options = parser().parse_args(arguments)
    if options.command == "plan":
        return _plan(options)
    if options.command in ("run", "retry"):
        for name in ("jobs", "devices") if options.launcher == "slurm" else ("profile",):
            if getattr(options, name) is not None:
                raise UserError(f"--{name} has no effect with --launcher {options.launcher}: leave it out.")
        if options.jobs is not None and options.jobs < 1:
            raise UserError(f"--jobs is {options.jobs}; it must be at least 1.")
        return Sweep(options).run()
    sweep = Sweep(options)
    return sweep.status() if options.command == "status" else sweep.collect()


def _plan(options: argparse.Namespace) -> int:
    from looped_lm.sweeps.planning import GIB, Planner, design, matching, peak_flops, plan_table

    sweep = files.load(files.find(options.file))
    for name in ("mfu", "memory", "devices", "peak_flops"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be positive.")
    if options.mfu > 1:
        raise UserError(f"--mfu is {options.mfu}; it is a share, at most 1.")
    if options.device and options.peak_flops:
        raise UserError("--device and --peak-flops both say how fast a device is: leave one out.")
    if options.csv and options.csv.exists() and not options.overwrite:
        raise UserError(f"{options.csv} exists: name another file by --csv, or give --overwrite.")
    runs, shared = expand(sweep), shared_runs(sweep)
    planner = Planner(None if options.memory is None else options.memory * GIB, options.devices)
    planned = _planned(planner, [*runs, *shared])
    own = planned[: len(runs)]
    rate = None
    if options.device or options.peak_flops:
        rate = options.mfu * (options.peak_flops or peak_flops(options.device, own[0].precision))
    print(plan_table(own, rate))
    total = sum(p.flops for p in own)
    tokens = sum(p.model.plan.tokens for p in own)
    print(f"\n{len(own)} runs, {total:.4g} training FLOPs (convention paper), {tokens:.4g} tokens")
    if rate:
        told = options.device or f"a device of {options.peak_flops:.3g} FLOPs/s"
        longest = max(p.flops for p in own)
        print(
            f"{total / rate / 3600:,.1f} device hours ({duration(total / rate)}) on {told} "
            f"at MFU {options.mfu:g}, {rate:.3g} FLOPs/s; "
            f"the longest run takes {longest / rate / 3600:,.1f}"
        )
    else:
        print("Time: add --device NAME (or --peak-flops X) and --mfu.")
    if options.memory:
        print(
            "rows: the most per device and micro-batch whose estimate, fp32 throughout, "
            f"is below {options.memory:g} GiB"
        )
    for name, count in Counter(run.sweep for run in shared).items():
        print(f"Shared, trained by the sweep {name}: {count} runs")
    if (tellable := matching(planned, options.like)) is not None:
        print(f"\n{tellable}")
    if options.csv:
        write_text_atomically(options.csv, design(planned))
        print(f"Design with {len(planned)} runs: {options.csv}")
    return 0


def _planned(planner: Planner, runs: list[Run]) -> list[PlannedRun]:
    from looped_lm.configuration.command_line import quiet

    quiet()
    planned, told = [], sys.stderr.isatty() and len(runs) > 20
    for i, run in enumerate(runs):
        if told:
            print(f"\rplanning {i + 1} of {len(runs)}", end="", file=sys.stderr, flush=True)
        planned.append(planner.plan(run))
    if told:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return planned


class Sweep:
    """A sweep, and one command with its options that trains the runs or looks at them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.file = files.load(files.find(options.file))
        self.runs = expand(self.file)
        self.place = Place(options.out, self.file.name, options.records)

    def run(self) -> int:
        """Train what is not finished, or for `retry` what failed."""
        from looped_lm.sweeps.planning import Planner

        retry = self.options.command == "retry"
        # All are planned before the first one starts: a mistake in the last must not cost the others.
        flops = {p.run.hash: p.flops for p in _planned(Planner(), self.runs)}
        statuses = [self.place.status(run) for run in self.runs]
        for run in _in_state(statuses, State.FINISHED):
            self.place.keep_record(run)
        print(f"{self.file.name}: {_counts(statuses)}")
        failed = _in_state(statuses, State.FAILED)
        wanted = failed if retry else _in_state(statuses, State.INTERRUPTED, State.WAITING, State.RUNNING)
        attempts = {s.run.hash: s.attempts for s in statuses}
        if self.options.launcher == "slurm":
            self._tell_failed(failed)
            return self._submit(wanted, attempts)
        return self._run_here(wanted, flops, attempts, [] if retry else failed)

    def _run_here(
        self, wanted: list[Run], flops: dict[str, float], attempts: dict[str, int], failed_before: list[Run]
    ) -> int:
        from looped_lm.sweeps.local import LocalLauncher, visible_devices

        devices = self.options.devices.split(",") if self.options.devices else visible_devices()
        launcher = LocalLauncher(self.place, self.options.jobs or 1, devices, flops, attempts)
        began = time.monotonic()
        outcome = launcher.run(wanted)
        if outcome.trained:
            rest = duration(outcome.run_seconds - outcome.fit_seconds)
            print(
                f"{outcome.trained} runs in {duration(time.monotonic() - began)}: training "
                f"{duration(outcome.fit_seconds)} in all, start and end of their processes {rest}, "
                f"{launcher.jobs} at a time."
            )
        self._tell_failed(failed_before)
        if outcome.failed:
            print(f"{len(outcome.failed)} failed; once mended: sweep retry {self.options.file}")
        if outcome.interrupted or outcome.elsewhere or outcome.signum is not None:
            print(f"Unfinished runs go on with the same command: sweep run {self.options.file}")
        else:
            print(f"Records: {self.place.records}")
        self._tell_shared()
        return outcome.exit_status or int(bool(failed_before))

    def _submit(self, wanted: list[Run], attempts: dict[str, int]) -> int:
        there = slurm.queued(self.place, wanted)
        new = [run for run in wanted if run.hash not in there]
        if there:
            print(f"{len(there)} are in SLURM's queue already.")
        if not new:
            return 0
        chosen = slurm.settings(self.file.slurm, self.options.profile, self.file.path)
        made = slurm.executor(self.place.root / "slurm", self.file.name, chosen)
        jobs = slurm.submit(made, self.place, new, slurm.machine_arguments(chosen), attempts)
        print(f"Submitted {len(jobs)} runs, jobs {jobs[0]} to {jobs[-1]}.", end=" ")
        print(f"How far they are: sweep status {self.options.file}")
        return 0

    def status(self) -> int:
        """Print how far the runs are."""
        there = slurm.queued(self.place, self.runs)
        statuses = []
        for status in map(self.place.status, self.runs):
            if status.run.hash in there and status.state not in (State.FINISHED, State.RUNNING):
                status = replace(status, state=State.QUEUED)
            statuses.append(status)
        print(_table(statuses))
        print(f"\n{_counts(statuses)}")
        self._tell_failed(_in_state(statuses, State.FAILED))
        self._tell_foreign(self._tell_shared())
        return 0

    def collect(self) -> int:
        """Put the records of finished runs into one folder."""
        kept = [path for run in self.runs if (path := self.place.keep_record(run))]
        print(f"{len(kept)} of {len(self.runs)} runs are finished; their records: {self.place.records}")
        shared = self._tell_shared()
        kept += [path for s in shared if (path := self.place.keep_record(s.run, s.record))]
        self._tell_foreign(shared)
        if len(kept) >= 7:
            print(f"Fit them: python -m fitting fit {self.place.records}")
        return 0 if kept else 1

    def _tell_failed(self, failed: list[Run]) -> None:
        for run in failed:
            print(f"\nfailed: {self.place.name(run)}, log {self.place.log(run)}")
            for line in self.place.last_lines(run):
                print(f"  | {line}")
        if failed:
            print(f"\n{len(failed)} failed before; once mended: sweep retry {self.options.file}")

    def _tell_shared(self) -> list[Status]:
        """States of the shared runs; prints how many of them are not finished."""
        runs, out, records = shared_runs(self.file), self.options.out, self.options.records
        statuses = []
        for name in dict.fromkeys(run.sweep for run in runs):
            # A shared run's record may be among this sweep's or among its own sweep's.
            places = [Place(out, name, records)]
            places += [Place(out, name, records.resolve().parent / name)] if records else []
            for run in (run for run in runs if run.sweep == name):
                found = [place.status(run) for place in places]
                done = [s for s in found if s.state is State.FINISHED]
                statuses.append((done or found[-1:])[0])
        missing = Counter(s.run.sweep for s in statuses if s.state is not State.FINISHED)
        for name, count in missing.items():
            print(f"{count} shared runs are not finished; the sweep {name} trains them.")
        return statuses

    def _tell_foreign(self, shared: list[Status]) -> None:
        """Name records of other runs: `fitting fit` would read them from the folder, too."""
        foreign = self.place.foreign([*self.runs, *(s.run for s in shared)])
        if foreign:
            print(f"{len(foreign)} records in {self.place.records} belong to no run of this sweep:")
            for path in foreign:
                print(f"  {path.name}")


def _in_state(statuses: Sequence[Status], *states: State) -> list[Run]:
    return [s.run for state in states for s in statuses if s.state is state]


def _counts(statuses: Sequence[Status]) -> str:
    counts = Counter(s.state for s in statuses)
    told = (f"{counts[state]} {state.value}" for state in State if counts[state])
    return f"{len(statuses)} runs: {', '.join(told)}"


def _table(statuses: Sequence[Status]) -> str:
    """One line per run: its state, steps, loss, training time and attempts."""
    axes, headings = varying([s.run for s in statuses])
    rows = []
    for s in statuses:
        far = ["", "", ""]
        if (record := s.record) is not None:
            loss = "" if record.val_loss is None else f"{record.val_loss:.4f}"
            steps = f"{record.steps:,}/{record.steps_planned:,}"
            far = [steps, loss, duration(record.wall_seconds)]
        rows.append([s.hash, *s.run.label(axes), s.state.value, *far, str(s.attempts)])
    header = ["hash", *headings, "state", "steps", "val loss", "time", "attempts"]
    return aligned(header, rows, left=2 + len(axes))
