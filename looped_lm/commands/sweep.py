"""`python -m looped_lm sweep plan|run|status|retry|records FILE`: many runs from one file."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fitting.records import RECORD_SUFFIX, RecordError, RunRecord, architecture, write_text_atomically
from looped_lm.common.errors import UserError
from looped_lm.common.text import duration
from looped_lm.sweeps import files
from looped_lm.sweeps.expansion import expand, shared_runs
from looped_lm.sweeps.place import Place, State, Status
from looped_lm.sweeps.runs import Run

if TYPE_CHECKING:
    from looped_lm.sweeps.planning import PlannedRun, Planner

GIB = 2**30


def latest_record(path: Path) -> RunRecord | None:
    """The record at a path, or of the run in a folder: a completed one, else that of the latest step.

    Raises:
        RecordError: the path is a file that holds none.
    """
    if path.is_file():
        return RunRecord.load(path)
    records = []
    for found in sorted(path.glob(f"*/checkpoints/*{RECORD_SUFFIX}")):
        try:
            records.append(RunRecord.load(found))
        except RecordError:
            # Being written, or removed with its checkpoint, at this moment; or damaged, and then it counts for nothing.
            continue
    return max(records, key=lambda record: (record.finished, record.steps), default=None)


def parser() -> argparse.ArgumentParser:
    """The parser with every command and option."""
    top = argparse.ArgumentParser(prog="python -m looped_lm sweep", description=__doc__, allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("file", metavar="FILE", help="sweep file, or the name of a shipped one")
        return command

    plan = add("plan", "what the runs would be: N, D, FLOPs, time, batch that fits; trains nothing")
    plan.add_argument("--device", metavar="NAME", help="device for the time, such as 'h100 sxm' or a100")
    plan.add_argument(
        "--peak-flops", type=float, metavar="X", help="peak FLOPs/s of a device not in the list"
    )
    plan.add_argument(
        "--mfu", type=float, default=0.4, help="share of the peak that training reaches (default 0.4)"
    )
    plan.add_argument("--devices", type=int, metavar="N", help="devices per run (default: as configured)")
    plan.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of a device: the largest batch that fits"
    )
    plan.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the runs as a design for `fitting plan`"
    )
    plan.add_argument("--overwrite", action="store_true", help="let --csv replace a file")
    for name, text in (
        ("run", "train all runs that are not finished"),
        ("retry", "train the failed runs again"),
    ):
        run = add(name, text)
        run.add_argument("--launcher", choices=("local", "slurm"), default="local", help="default: local")
        run.add_argument("--jobs", type=int, metavar="N", help="local: runs at a time (default 1)")
        run.add_argument("--devices", metavar="LIST", help="local: accelerators to share out, such as 0,1")
        run.add_argument("--profile", type=Path, metavar="FILE", help="slurm: settings of a cluster")
        _place_options(run)
    _place_options(add("status", "how far the runs are, and the last lines of failed ones"))
    _place_options(add("records", "collect the records of finished runs for `python -m fitting fit`"))
    return top


def _place_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="folder of sweeps (runs)"
    )
    command.add_argument(
        "--records", type=Path, metavar="DIR",
        help="folder of finished runs' records (DIR/SWEEP/records); a run with a record there is not run again. "
        "Records of another sweep's shared runs are looked for there and in the folder of its name beside it",
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit status: 0, 1 if runs failed or are unfinished after `run`, 75 if a signal ended it.

    Raises:
        UserError: a sweep file, option or run that cannot be right; nothing is run then.
    """
    options = parser().parse_args(arguments)
    sweep = files.load(files.find(options.file))
    runs = expand(sweep)
    return {"plan": _plan, "run": _run, "retry": _run, "status": _status, "records": _records}[
        options.command
    ](options, sweep, runs)


# ---- plan -----------------------------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace, sweep: files.SweepFile, runs: list[Run]) -> int:
    from looped_lm.sweeps.planning import Planner, peak_flops
    from looped_lm.sweeps.table import design, plan_table

    given = {"--mfu": options.mfu, "--memory": options.memory, "--devices": options.devices}
    for name, value in (given | {"--peak-flops": options.peak_flops}).items():
        if value is not None and not value > 0:
            raise UserError(f"{name} is {value}; it must be positive.")
    if options.mfu > 1:
        raise UserError(f"--mfu is {options.mfu}; it is a share, at most 1.")
    if options.device and options.peak_flops:
        raise UserError("--device and --peak-flops both say how fast a device is: leave one out.")
    if options.csv and options.csv.exists() and not options.overwrite:
        raise UserError(f"{options.csv} exists: name another file by --csv, or give --overwrite.")
    shared = shared_runs(sweep)
    planner = Planner(None if options.memory is None else options.memory * GIB, options.devices)
    planned = _planned(planner, [*runs, *shared])
    own = planned[: len(runs)]
    rate = None
    if options.device or options.peak_flops:
        rate = options.mfu * (options.peak_flops or peak_flops(options.device, own[0].precision))
    print(plan_table(own, rate))
    total = sum(p.flops for p in own)
    print(
        f"\n{len(own)} runs, {total:.4g} training FLOPs (convention paper), {sum(p.tokens for p in own):.4g} tokens"
    )
    if rate:
        told = options.device or f"a device of {options.peak_flops:.3g} FLOPs/s"
        print(
            f"{total / rate / 3600:,.1f} device hours ({duration(total / rate)}) on {told} at MFU {options.mfu:g}, "
            f"{rate:.3g} FLOPs/s; the longest run takes {max(p.flops for p in own) / rate / 3600:,.1f}"
        )
    else:
        print("Time: add --device NAME (or --peak-flops X) and --mfu.")
    if options.memory:
        print(
            "rows: the most per device and micro-batch whose estimate, fp32 throughout, is below "
            f"{options.memory:g} GiB"
        )
    for name in dict.fromkeys(run.sweep for run in shared):
        hashes = [run.hash for run in shared if run.sweep == name]
        print(f"Shared, trained by the sweep {name}: {len(hashes)} runs")
    if options.csv:
        write_text_atomically(options.csv, design(planned, architecture))
        print(f"Design with {len(planned)} runs: {options.csv}")
    return 0


def _planned(planner: Planner, runs: list[Run]) -> list[PlannedRun]:
    from looped_lm.configuration.parser import quiet

    quiet()
    planned, told = [], sys.stderr.isatty() and len(runs) > 20
    for i, run in enumerate(runs):
        if told:
            print(f"\rplanning {i + 1} of {len(runs)}", end="", file=sys.stderr, flush=True)
        planned.append(planner.plan(run))
    if told:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return planned


# ---- run and retry --------------------------------------------------------------------------------------------------


def _place(options: argparse.Namespace, sweep: str) -> Place:
    return Place(options.out, sweep, latest_record, options.records)


def _run(options: argparse.Namespace, sweep: files.SweepFile, runs: list[Run]) -> int:
    from looped_lm.sweeps.planning import Planner

    others = ("jobs", "devices") if options.launcher == "slurm" else ("profile",)
    for name in others:
        if getattr(options, name) is not None:
            raise UserError(f"--{name} has no effect with --launcher {options.launcher}: leave it out.")
    options.jobs = 1 if options.jobs is None else options.jobs
    if options.jobs < 1:
        raise UserError(f"--jobs is {options.jobs}; it must be at least 1.")
    place = _place(options, sweep.name)
    planner = Planner()
    # All of them before the first one starts: a mistake in the last line must not cost the runs before it.
    flops = {p.run.hash: p.flops for p in _planned(planner, runs)}
    statuses = [place.status(run) for run in runs]
    by_state = {state: [s.run for s in statuses if s.state is state] for state in State}
    wanted = by_state[State.FAILED]
    if options.command == "run":
        wanted = [*by_state[State.INTERRUPTED], *by_state[State.WAITING], *by_state[State.RUNNING]]
    for run in by_state[State.FINISHED]:
        place.keep_record(run)
    print(f"{sweep.name}: {_counts(statuses)}")
    attempts = {s.run.hash: s.attempts for s in statuses}
    if options.launcher == "slurm":
        _tell_failed(options, place, by_state[State.FAILED])
        return _submit(options, sweep, place, wanted, attempts)
    return _run_here(options, sweep, place, planner, flops, wanted, by_state[State.FAILED], attempts)


def _run_here(
    options: argparse.Namespace,
    sweep: files.SweepFile,
    place: Place,
    planner: Planner,
    flops: dict[str, float],
    wanted: list[Run],
    failed: list[Run],
    attempts: dict[str, int],
) -> int:
    from looped_lm.sweeps.local import LocalLauncher, visible_devices

    if wanted:
        planner.warm_up()
    devices = options.devices.split(",") if options.devices else visible_devices()
    launcher = LocalLauncher(place, options.jobs, devices, flops, attempts)
    began = time.monotonic()
    outcome = launcher.run(wanted)
    elapsed = time.monotonic() - began
    if outcome.trained:
        rest = duration(outcome.run_seconds - outcome.fit_seconds)
        print(
            f"{outcome.trained} runs in {duration(elapsed)}: training {duration(outcome.fit_seconds)} in all, start "
            f"and end of their processes {rest}, {options.jobs} at a time."
        )
    left_failed = [run for run in failed if options.command == "run"]
    _tell_failed(options, place, left_failed)
    if outcome.failed:
        print(f"{len(outcome.failed)} failed; after mending: sweep retry {options.file}")
    if outcome.interrupted or outcome.elsewhere or outcome.signum is not None:
        print(f"Unfinished runs go on with the same command: sweep run {options.file}")
    else:
        print(f"Records: {place.records}")
    _tell_shared(options, sweep)
    return outcome.exit_status or int(bool(left_failed))


def _submit(
    options: argparse.Namespace,
    sweep: files.SweepFile,
    place: Place,
    wanted: list[Run],
    attempts: dict[str, int],
) -> int:
    from looped_lm.sweeps import slurm

    there = slurm.queued(place, wanted)
    new = [run for run in wanted if run.hash not in there]
    if there:
        print(f"{len(there)} are in SLURM's queue already.")
    if not new:
        return 0
    chosen = slurm.settings(sweep.slurm, options.profile, sweep.path)
    made = slurm.executor(place.root / "slurm", sweep.name, chosen)
    jobs = slurm.submit(made, place, new, slurm.machine_arguments(chosen), attempts)
    print(
        f"Submitted {len(jobs)} runs, jobs {jobs[0]} to {jobs[-1]}. How far they are: sweep status {options.file}"
    )
    return 0


def _tell_failed(options: argparse.Namespace, place: Place, failed: list[Run]) -> None:
    for run in failed:
        print(f"\nfailed: {place.name(run)}, log {place.log(run)}")
        for line in place.last_lines(run):
            print(f"  | {line}")
    if failed:
        print(f"\n{len(failed)} failed before; after mending: sweep retry {options.file}")


def _shared_status(options: argparse.Namespace, run: Run) -> Status:
    """State of another sweep's run, whose record may lie among this sweep's or among its own."""
    status = _place(options, run.sweep).status(run)
    if status.state is State.FINISHED or options.records is None:
        return status
    beside = Place(options.out, run.sweep, latest_record, options.records.resolve().parent / run.sweep)
    return beside.status(run)


def _tell_shared(options: argparse.Namespace, sweep: files.SweepFile) -> list[Status]:
    """State of the shared runs; tells which are still to be trained."""
    statuses = [_shared_status(options, run) for run in shared_runs(sweep)]
    missing = [s for s in statuses if s.state is not State.FINISHED]
    for name in dict.fromkeys(s.run.sweep for s in missing):
        count = sum(s.run.sweep == name for s in missing)
        print(f"{count} shared runs are not finished; the sweep {name} trains them.")
    return statuses


def _tell_foreign(place: Place, runs: list[Run], shared: list[Status]) -> None:
    """Name records beside those of the sweep: `fitting fit` of the folder would take them for some of it."""
    foreign = place.foreign([run.hash for run in (*runs, *(s.run for s in shared))])
    if foreign:
        print(f"{len(foreign)} records in {place.records} are of no run of this sweep:")
        for path in foreign:
            print(f"  {path.name}")


# ---- status and records ---------------------------------------------------------------------------------------------


def _counts(statuses: list[Status]) -> str:
    counts = {state: sum(s.state is state for s in statuses) for state in State}
    return f"{len(statuses)} runs: " + ", ".join(f"{n} {state.value}" for state, n in counts.items() if n)


def _status(options: argparse.Namespace, sweep: files.SweepFile, runs: list[Run]) -> int:
    from looped_lm.sweeps import slurm
    from looped_lm.sweeps.table import status_table

    place = _place(options, sweep.name)
    there = slurm.queued(place, runs)
    statuses = []
    for run in runs:
        status = place.status(run)
        waits = run.hash in there and status.state in (State.WAITING, State.INTERRUPTED, State.FAILED)
        statuses.append(Status(**{**vars(status), "state": State.QUEUED}) if waits else status)
    print(status_table(statuses))
    print(f"\n{_counts(statuses)}")
    _tell_failed(options, place, [s.run for s in statuses if s.state is State.FAILED])
    _tell_foreign(place, runs, _tell_shared(options, sweep))
    return 0


def _records(options: argparse.Namespace, sweep: files.SweepFile, runs: list[Run]) -> int:
    place = _place(options, sweep.name)
    kept = [path for run in runs if (path := place.keep_record(run))]
    print(f"{len(kept)} of {len(runs)} runs are finished; their records: {place.records}")
    shared = _tell_shared(options, sweep)
    kept += [path for status in shared if (path := place.keep_record(status.run, status.record))]
    _tell_foreign(place, runs, shared)
    if len(kept) >= 7:
        print(f"Fit them: python -m fitting fit {place.records}")
    return 0 if kept else 1
