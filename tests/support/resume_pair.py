"""Two processes that stop and resume runs together; they start once for many cases."""

from __future__ import annotations

import json
import os
import socket
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.resume_runs import STOPS, Outcome, Trace, assert_equal, fit

#: (stop, variant, workers, rank that is sent the signal)
Case = tuple[str, str, int, int]
PAIR = {"devices": 2, "strategy": "ddp"}


def run_pair(folder: Path, data_dir: Path, cases: list[Case], resume: str | None) -> dict[str, Any]:
    """Run the cases on two processes.

    Args:
        folder: for checkpoints.
        data_dir: prepared data.
        cases: stops, each of which is compared with an uninterrupted run on two processes.
        resume: a checkpoint of a run of one process, to be resumed as well; None: no such run.

    Returns:
        `cases`, each with `name` and `equal`; with `resume` also `resumed_from_one`, the rows by step of that run, and
        a `checkpoint` of two processes at `step`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_run, (port, folder, data_dir, cases, resume), nprocs=2)
    return json.loads((folder / "report.json").read_text())


def _run(rank: int, port: int, folder: Path, data_dir: Path, cases: list[Case], resume: str | None) -> None:
    # What torchrun would set.
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "pair",
    }  # fmt: skip
    torch.set_num_threads(1)
    # A spawned process would spawn its readers, too, each of which would import everything.
    mp.set_start_method("fork", force=True)
    whole: dict[str, Outcome] = {}
    report: dict[str, Any] = {"cases": []}
    for stop, variant, workers, target in cases:
        if variant not in whole:
            whole[variant] = fit(folder / f"pair-whole-{variant}", data_dir, variant, trainer_options=PAIR)
        where, step = STOPS[stop]
        place = folder / f"pair-{variant}-{workers}-{stop}"
        problem = None
        trace = Trace(**where) if rank == target else None
        first = fit(place, data_dir, variant, workers, trace=trace, trainer_options=PAIR)
        try:
            assert first.stopped is not None and first.stopped.step == step
            assert bool(first.stopped.code) == (rank == 0)
            checkpoint = first.stopped.checkpoint
            second = fit(place, data_dir, variant, workers, ckpt_path=checkpoint, trainer_options=PAIR)
            assert_equal(first.then(second), whole[variant])
        except AssertionError:
            problem = traceback.format_exc()
        problems = _gather(problem)
        name = f"{variant}, {workers} workers, signal to rank {target} {stop}"
        report["cases"].append({"name": name, "equal": problems == [None, None], "problems": problems})
    if resume is not None:
        stop_at = Trace(at=(12, 0)) if rank == 1 else None
        gone_on = fit(
            folder / "pair-resumed",
            data_dir,
            ckpt_path=resume,
            accumulate=1,
            trace=stop_at,
            trainer_options=PAIR,
            keep=-1,
        )
        assert gone_on.trace is not None and gone_on.stopped is not None
        end = fit(
            folder / "pair-resumed", data_dir, ckpt_path=gone_on.stopped.checkpoint, accumulate=1,
            trainer_options=PAIR, keep=-1,
        )  # fmt: skip
        assert end.trace is not None
        own, other = _gather({**gone_on.trace.samples, **end.trace.samples})
        report["resumed_from_one"] = {step: own[step] + other[step] for step in own}
        report["checkpoint"], report["step"] = gone_on.stopped.checkpoint, gone_on.stopped.step
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return values
