"""Kills and restarts launchers of one tiny sweep, from a process that imports everything once.

`python tests/support/sweep_drive.py FOLDER SWEEP KILLS SEED`: starts a launcher, two runs at a time; kills it and KILLS
runs with SIGKILL at random moments; then starts two launchers at once and prints what they made of it as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from looped_lm.commands import sweep
from looped_lm.sweeps import files
from looped_lm.sweeps.expansion import expand
from looped_lm.sweeps.place import Place


def launch(file: str, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (
        open(1, "w", buffering=1, closefd=False),
        open(2, "w", buffering=1, closefd=False),
    )
    sys.exit(sweep.main(["run", file, "--jobs", "2"]))


def running(place: Place, runs: list[Any]) -> list[int]:
    """Processes of runs that began and did not end."""
    last = [(place.attempts(run) or [{"exit_status": 0}])[-1] for run in runs]
    return [event["process"] for event in last if "exit_status" not in event]


def main(folder: str, file: str, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    os.chdir(folder)
    fork = multiprocessing.get_context("fork")
    loaded = files.load(Path(file))
    runs = expand(loaded)
    place = Place(Path("runs"), loaded.name)
    # Once here, for all launchers that are forked from this process.
    from looped_lm.sweeps.planning import Planner

    Planner().plan(runs[0])

    first = fork.Process(target=launch, args=(file, "first.log"))
    first.start()
    killed = 0
    while killed < kills + 1:
        while not (there := running(place, runs)):
            assert first.is_alive(), Path("first.log").read_text()
            time.sleep(0.02)
        time.sleep(chance.uniform(0.2, 1.5))
        there = running(place, runs)
        if killed < kills and there:
            os.kill(chance.choice(there), signal.SIGKILL)
            killed += 1
        elif killed == kills:
            os.kill(first.pid, signal.SIGKILL)  # type: ignore[arg-type]
            killed += 1
    first.join()
    before = {run.hash: place.status(run).state.value for run in runs}
    others = [fork.Process(target=launch, args=(file, f"{name}.log")) for name in ("second", "third")]
    for process in others:
        process.start()
    for process in others:
        process.join()
    print(
        json.dumps(
            {
                "before": before,
                "exits": [first.exitcode, *(process.exitcode for process in others)],
                "states": [place.status(run).state.value for run in runs],
                "attempts": {place.name(run): place.attempts(run) for run in runs},
                "begun": {
                    place.name(run): len(list(place.folder(run).glob("version_*/checkpoints")))
                    for run in runs
                },
                "records": sorted(path.name for path in place.records.iterdir()),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
