"""What the runs of a sweep would be, from the command line's own parser and models on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from looped_lm.common.errors import UserError
from looped_lm.common.text import did_you_mean
from looped_lm.configuration.config_files import resolve_arguments
from looped_lm.configuration.parser import PlanCLI, processes
from looped_lm.loop.component import import_class
from looped_lm.runs.lightning_internals import peak_flops_table
from looped_lm.sweeps.resolving import refusals_raised
from looped_lm.sweeps.runs import Run
from looped_lm.training.devices import compute_dtype
from looped_lm.training.memory import estimate
from looped_lm.training.schedules import accumulation

_NOT_MEMORY = ("horizon", "transfer", "schedule", "batch_tokens", "val_every_steps", "compile_layers")


@dataclass(frozen=True)
class PlannedRun:
    """The numbers of a run.

    Args:
        run: the run.
        r: recurrences.
        d_model: width.
        n: parameters N without embedding and head.
        n_once: parameters used once per token.
        n_rec: parameters used in every recurrence.
        n_injection: of these, the injection's and the lanes'.
        components: as in a run record.
        flops_per_token: training FLOPs per token F, convention `paper`.
        tokens: target tokens D.
        steps: optimizer steps.
        flops: training FLOPs of these steps.
        flops_budget: nominal budget C; None if the horizon is not a budget.
        precision: of the Trainer.
        batch_size: rows per device and micro-batch: the most that fit the memory asked about, else the configured ones.
        memory: bytes of one process with that many rows, fp32 throughout; None if not asked about.
    """

    run: Run
    r: int
    d_model: int
    n: int
    n_once: int
    n_rec: int
    n_injection: int
    components: Mapping[str, Mapping[str, Any]]
    flops_per_token: float
    tokens: float
    steps: int
    flops: float
    flops_budget: float | None
    precision: str
    batch_size: int | None
    memory: float | None


class Planner:
    """Plans runs one by one; parses and builds each as `fit` would, so that what `fit` refuses is refused here.

    Args:
        memory: bytes of one device, for the largest batch that fits; None: do not ask.
        devices: processes per run; None: as configured.
    """

    def __init__(self, memory: float | None = None, devices: int | None = None) -> None:
        self.memory, self.devices = memory, devices
        self._bytes: dict[str, tuple[float, float]] = {}
        self.class_paths: set[str] = set()

    def plan(self, run: Run) -> PlannedRun:
        """The numbers of one run.

        Raises:
            UserError: `fit` would refuse it; says which run and why.
        """
        cli = _parsed(run)
        self.class_paths |= set(_class_paths(cli.config.as_dict()))
        model, data, trainer = cli.model, cli.datamodule, cli.config.trainer
        devices = self.devices or processes(trainer.devices, trainer.num_nodes)
        rows, needed = data.batch_size, None
        try:
            accumulation(model.batch_tokens, rows if self.memory is None else 1, model.seq_len, devices)
        except UserError as error:
            raise UserError(f"Run {run.id} is refused: {error}") from error
        if self.memory is not None:
            rows, needed = self._fit(model, devices)
        net, plan = model.model, model.plan
        return PlannedRun(
            run=run,
            r=net.num_recurrences,
            d_model=net.d_model,
            n=model.sections.n,
            n_once=model.sections.n_once,
            n_rec=model.sections.n_rec,
            n_injection=model.sections.injection + model.sections.lanes,
            components=model.component_specs(),
            flops_per_token=model.flops_per_token,
            tokens=plan.tokens,
            steps=plan.steps,
            flops=plan.steps * model.batch_tokens * model.flops_per_token,
            flops_budget=plan.flops_budget,
            precision=str(trainer.precision),
            batch_size=rows,
            memory=needed,
        )

    def _fit(self, model: Any, devices: int) -> tuple[int | None, float]:
        """Most rows per micro-batch that fit, of those that divide the batch, and the bytes they take."""
        assert self.memory is not None
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
        fitting = next((rows for rows in divisors if fixed + rows * per_row <= self.memory), None)
        return fitting, fixed + (fitting or 1) * per_row

    def warm_up(self) -> None:
        """Import every class that the planned runs name, so that processes forked from here start at once."""
        for path in sorted(self.class_paths):
            import_class(path)


def _parsed(run: Run) -> PlanCLI:
    try:
        with refusals_raised():
            return PlanCLI(resolve_arguments(run.arguments()))
    except UserError as error:
        raise UserError(f"Run {run.id} is refused: {error}") from error


def _class_paths(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        if isinstance(config.get("class_path"), str):
            yield config["class_path"]
        for value in config.values():
            yield from _class_paths(value)
    elif isinstance(config, Iterable) and not isinstance(config, str):
        for value in config:
            yield from _class_paths(value)


def peak_flops(device: str, precision: str) -> float:
    """Peak FLOPs/s of a device for a Trainer's precision, from Lightning's table.

    Raises:
        UserError: the table does not have the device, or not for this precision.
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
