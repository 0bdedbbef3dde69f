"""Runs killed with SIGKILL at random moments and resumed: `python -m tests.support.kill_loop --runs 50 --seed 0`.

Every run is `fit --resume auto`, killed one to three times and then left to finish. Its last checkpoint must equal that
of an undisturbed run: weights, optimizer, schedule, data position, losses. Half of the kills come at a moment drawn
uniformly over a run, half around the writing of a checkpoint. After each kill, every checkpoint in the folder must be
whole.

A process takes seconds to start, so runs are forked from this one, which has loaded everything and has no threads:
OMP_NUM_THREADS and OPENBLAS_NUM_THREADS must be 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

import callbacks.run_record  # loaded here so that no run loads it again
import callbacks.summary  # noqa: F401
import looped_lm.configuration.parser  # noqa: F401
from datamodules import ByteTokenizer, PrepareSettings, TextFiles
from datamodules.prepare import prepare
from looped_lm.cli import cli
from looped_lm.configuration.config_files import BASE
from looped_lm.runs.checkpoint import load_checkpoint, verify
from looped_lm.runs.folder import newest_of_run
from tests.support.cli_options import tiny_options

STEPS = 24
SAVE_EVERY = 2
PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "TokenDataModule")
RESULTS = ("status", "steps", "tokens", "training_flops", "val_loss", "val_tokens", "val_step")


@dataclass
class Run:
    """One run in a folder of its own, and what was done to it."""

    folder: Path
    log: list[str] = field(default_factory=list)
    partials: int = 0

    @property
    def root(self) -> Path:
        return self.folder / "runs" / "killed"

    def start(self, command: list[str]) -> int:
        """Fork `python -m looped_lm COMMAND`; the child's process id."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        try:
            os.chdir(self.folder)
            output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = ["looped_lm", *command]
            status = cli(command)
        except SystemExit as stop:
            status = int(stop.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 70
        sys.stdout.flush()
        os._exit(status)

    def check(self) -> None:
        """Every checkpoint that has its name is whole, and so is the record beside it."""
        for path in self.root.glob("*/checkpoints/*.ckpt"):
            verify(path)
        self.partials += len(list(self.root.glob("*/checkpoints/*.partial")))

    def final(self) -> dict[str, Any]:
        found, damaged = newest_of_run(self.root)
        assert found is not None and not damaged, f"no whole checkpoint in {self.root}: {damaged}"
        return load_checkpoint(found.path)


def same(a: Any, b: Any) -> bool:
    """Bit-identical tensors, equal everything else."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def differing(got: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of the parts in which two final checkpoints differ."""
    parts = [part for part in PARTS if not same(got[part], expected[part])]
    return parts + [name for name in RESULTS if got["run_record"][name] != expected["run_record"][name]]


def ended(child: int) -> int | None:
    """Exit status of a child; None while it runs, minus the signal's number if a signal ended it."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def kill_at(child: int, moment: float) -> int:
    """Kill a child after `moment` seconds; returns its exit status."""
    end = time.monotonic() + moment
    while time.monotonic() < end:
        if (status := ended(child)) is not None:
            return status
        time.sleep(0.001)
    return kill(child)


def kill_in_saving(run: Run, child: int, which: int, delay: float) -> int:
    """Kill `delay` seconds after the `which`-th checkpoint of this process has begun to be written."""
    seen, before = 0, False
    while seen < which:
        if (status := ended(child)) is not None:
            return status
        now = any(run.root.glob("version_*/checkpoints/*.partial"))
        seen += now and not before
        before = now
        time.sleep(0.0003)
    time.sleep(delay)
    return kill(child)


def kill(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepared(folder: Path) -> Path:
    """Prepared rows of 17 bytes, made in a child process, since the preparation may start threads."""
    out = folder / "rows"
    child = os.fork()
    if not child:
        texts = folder / "texts"
        texts.mkdir()
        for i in range(40):
            (texts / f"{i}.txt").write_text(f"document {i}: " + "the loop runs once more " * (3 + i % 5))
        settings = PrepareSettings(seq_len=16, val_fraction=0.2)
        prepare(TextFiles([str(texts)]), ByteTokenizer(), settings, out, progress=False)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    return out


def command_line(folder: Path) -> list[str]:
    """`fit --resume auto` for a tiny run that writes a checkpoint every other step."""
    config = yaml.safe_load(BASE.read_text())
    for callback in config["trainer"]["callbacks"]:
        if callback["class_path"].endswith("Checkpoints"):
            callback["init_args"]["every_n_steps"] = SAVE_EVERY
    often = folder / "often.yaml"
    often.write_text(yaml.safe_dump({"trainer": {"callbacks": config["trainer"]["callbacks"]}}))
    layers = ("prelude_layers=1", "recurrent_layers=1", "coda_layers=1", "num_recurrences=2")
    options = [*tiny_options(prepared(folder), STEPS), *(f"--model.{part}" for part in layers)]
    options += ["--model.val_every_steps=9", "--run_name=killed", "--resume=auto"]
    return ["fit", "--config", str(often), *options]


def one_run(run: Run, command: list[str], kills: int, seconds: float, draw: random.Random) -> None:
    """Kill a run `kills` times, then let it finish."""
    while kills:
        child = run.start(command)
        if draw.random() < 0.5:
            moment = draw.uniform(0.0, seconds)
            what, status = f"at {moment:.2f} s", kill_at(child, moment)
        else:
            which, delay = draw.randint(1, STEPS // SAVE_EVERY // 2), draw.uniform(0.0, 0.01)
            what = f"{1000 * delay:.1f} ms into saving no. {which}"
            status = kill_in_saving(run, child, which, delay)
        if status != -signal.SIGKILL:
            # The run was faster and is complete, so it cannot be killed any more.
            run.log.append(f"({what}: ended before with status {status})")
            assert status == 0, (run.folder / "output.txt").read_text()
            return
        run.check()
        run.log.append(what)
        kills -= 1
    child = run.start(command)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, (run.folder / "output.txt").read_text()


def main() -> int:
    """Exit status 0 if all runs ended as the undisturbed one did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if {os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")} != {"1"}:
        parser.error("threads do not survive a fork: set OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1")
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kill_loop_") as name:
        folder = Path(name)
        command = command_line(folder)
        undisturbed = Run(folder / "undisturbed")
        undisturbed.folder.mkdir()
        begin = time.monotonic()
        one_run(undisturbed, command, 0, 0.0, draw)
        seconds = time.monotonic() - begin
        expected = undisturbed.final()
        print(f"undisturbed: {STEPS} steps in {seconds:.1f} s, seed {arguments.seed}", flush=True)
        equal = killed = partials = number = 0
        while number < arguments.runs:
            run = Run(Path(tempfile.mkdtemp(dir=folder)))
            one_run(run, command, draw.randint(1, 3), seconds, draw)
            hits = sum(not what.startswith("(") for what in run.log)
            if not hits:
                continue  # No kill came in time, so this run proves nothing.
            number, killed, partials = number + 1, killed + hits, partials + run.partials
            faults = differing(run.final(), expected)
            equal += not faults
            verdict = f"DIFFERS in {', '.join(faults)}" if faults else "equal"
            print(f"run {number}: killed {'; '.join(run.log)}: {verdict}", flush=True)
        print(
            f"{equal} of {arguments.runs} runs equal the undisturbed one; {killed} kills, {partials} of which left a "
            "half-written checkpoint behind",
            flush=True,
        )
        return 0 if equal == arguments.runs else 1


if __name__ == "__main__":
    sys.exit(main())
