"""Size and cost of the runs of a sweep, from the parser of `fit` and models on the meta device."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from fitting.records import architecture
from looped_lm.common.errors import UserError
from looped_lm.common.text import aligned, did_you_mean
from looped_lm.configuration.config_files import resolve_arguments
from looped_lm.configuration.parser import PlanCLI, processes
from looped_lm.runs.lightning_internals import peak_flops_table
from looped_lm.sweeps.identity import refusals_raised
from looped_lm.sweeps.runs import Run, varying
from looped_lm.training.devices import compute_dtype
from looped_lm.training.lightning_module import LoopedLM
from looped_lm.training.memory import estimate
from looped_lm.training.schedules import accumulation

GIB = 2**30
_NOT_MEMORY = ("horizon", "transfer", "schedule", "batch_tokens", "val_every_steps", "compile_layers")
_DESIGN = (
    "r", "d_model", "flops_budget", "flops_per_token", "tokens", "n_once", "n_rec", "n_injection", "injection",
    "bptt", "seed", "run",
)  # fmt: skip


@dataclass(frozen=True)
class PlannedRun:
    """A run with its model on the meta device, whose `plan`, `sections` and `flops_per_token` are the run's.

    Args:
        run: the run.
        model: its LoopedLM.
        precision: the Trainer's precision.
        seed: its seed_everything.
        batch_size: rows per device and micro-batch: as configured, or the most that fit the given memory;
            None if not even one fits.
        memory: bytes of one process with that many rows, fp32 throughout; None: no memory was given.
    """

    run: Run
    model: LoopedLM
    precision: str
    seed: int
    batch_size: int | None
    memory: float | None

    @property
    def flops(self) -> float:
        """Training FLOPs of all steps, convention `paper`."""
        return self.model.plan.steps * self.model.batch_tokens * self.model.flops_per_token


class Planner:
    """Plans runs one by one as `fit` would, so that what `fit` refuses is refused here.

    Args:
        memory: bytes of one device, to find the largest batch that fits; None: keep the configured one.
        devices: processes per run; None: as configured.
    """

    def __init__(self, memory: float | None = None, devices: int | None = None) -> None:
        self.memory, self.devices = memory, devices
        self._bytes: dict[str, tuple[float, float]] = {}

    def plan(self, run: Run) -> PlannedRun:
        """Plan one run. This imports all its classes, so that a fork starts at once.

        Raises:
            UserError: `fit` would refuse the run; the message says which run and why.
        """
        try:
            with refusals_raised():
                cli = PlanCLI(resolve_arguments(run.arguments()))
            model, trainer = cli.model, cli.config.trainer
            devices = self.devices or processes(trainer.devices, trainer.num_nodes)
            rows, needed = cli.datamodule.batch_size, None
            accumulation(model.batch_tokens, rows if self.memory is None else 1, model.seq_len, devices)
        except UserError as error:
            raise UserError(f"Run {run.id} is refused: {error}") from error
        if self.memory is not None:
            rows, needed = self._fit(model, devices, self.memory)
        return PlannedRun(run, model, str(trainer.precision), int(cli.config.seed_everything), rows, needed)

    def _fit(self, model: LoopedLM, devices: int, memory: float) -> tuple[int | None, float]:
        """The most rows that divide the batch and fit, and the bytes that they take."""
        shape = {k: v for k, v in model.hparams.items() if k not in _NOT_MEMORY}
        most = max(model.drawn)
        same_shape = repr((most, sorted(shape.items())))
        if same_shape not in self._bytes:
            one, two = (
                estimate(model.model, rows, model.seq_len, model.optimizer_factory, most).total
                for rows in (1, 2)
            )
            self._bytes[same_shape] = (2 * one - two, two - one)
        fixed, per_row = self._bytes[same_shape]
        batch = model.batch_tokens // (model.seq_len * devices)
        divisors = [rows for rows in range(batch, 0, -1) if batch % rows == 0]
        fitting = next((rows for rows in divisors if fixed + rows * per_row <= memory), None)
        return fitting, fixed + (fitting or 1) * per_row


def peak_flops(device: str, precision: str) -> float:
    """Peak FLOPs/s of a device for a Trainer's precision, from Lightning's table.

    Raises:
        UserError: the table does not have the device, or has it without this precision.
    """
    table = peak_flops_table()
    if device not in table:
        guess = did_you_mean(device, table, cutoff=0.3)
        raise UserError(
            f"Device {device!r} is not in Lightning's table.{guess} It has: {', '.join(sorted(table))}. "
            "Or give --peak-flops."
        )
    dtype = compute_dtype(precision)
    if dtype not in table[device]:
        raise UserError(f"Lightning's table has no {dtype} for {device}; give --peak-flops.")
    return float(table[device][dtype])


def plan_table(planned: Sequence[PlannedRun], rate: float | None) -> str:
    """One line per run: N, D, FLOPs, steps, rows and, for a `rate` in FLOPs/s, the time."""
    axes, headings = varying([p.run for p in planned])
    with_memory = any(p.memory is not None for p in planned)
    header = ["hash", *headings, "N", "D", "D/N", "FLOPs/token", "steps", "FLOPs"]
    header += ["rows", "GiB"] if with_memory else []
    header += ["hours"] if rate else []
    rows = []
    for p in planned:
        n, plan = p.model.sections.n, p.model.plan
        row = [p.run.hash, *p.run.label(axes)]
        row += [f"{n:,}", f"{plan.tokens:,.0f}", f"{plan.tokens / n:.1f}"]
        row += [f"{p.model.flops_per_token:.4e}", f"{plan.steps:,}", f"{p.flops:.3e}"]
        if with_memory:
            row += [
                "none fits" if p.batch_size is None else str(p.batch_size),
                f"{(p.memory or 0) / GIB:.1f}",
            ]
        row += [f"{p.flops / rate / 3600:.2f}"] if rate else []
        rows.append(row)
    return aligned(header, rows, left=1 + len(axes))


def design(planned: Sequence[PlannedRun]) -> str:
    """The runs as a CSV that `python -m fitting plan` reads."""
    text = StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_DESIGN)
    for p in planned:
        model, plan, sections = p.model.model, p.model.plan, p.model.sections
        r = model.num_recurrences
        budget = "" if plan.flops_budget is None else repr(plan.flops_budget)
        costs = [budget, repr(p.model.flops_per_token), repr(plan.tokens)]
        sizes = [sections.n_once, sections.n_rec, sections.injection + sections.lanes]
        labels = architecture(p.model.component_specs(), r)
        writer.writerow([r, model.d_model, *costs, *sizes, *labels, p.seed, p.run.id])
    return text.getvalue()


def matching(planned: Sequence[PlannedRun], like: str) -> str | None:
    """What matching at equal tokens will be able to tell of phi, or why nothing, if losses and noise are as in `like`.

    None for runs with nominal budgets, without both r = 1 and r > 1, or that differ in other things (learning rates).
    `python -m fitting match` computes it, in a process of its own: nothing here imports the fits.
    """
    models = [
        (p.model.model.num_recurrences, p.model.model.d_model, p.model.plan.tokens, p.seed) for p in planned
    ]
    budgets = any(p.model.plan.flops_budget is not None for p in planned)
    if budgets or len({r > 1 for r, *_ in models}) < 2 or len(set(models)) < len(models):
        return None
    # The five packages are installed side by side.
    beside = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "design.csv"
        path.write_text(design(planned), encoding="utf-8")
        asked = [sys.executable, "-m", "fitting", "match", str(path), "--planned", "--quiet", "--like", like]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(beside)}
        done = subprocess.run(asked, capture_output=True, text=True, env=environment)
    return "\n".join(filter(None, (done.stdout.strip(), done.stderr.strip().removeprefix("error: "))))
