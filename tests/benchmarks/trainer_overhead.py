"""What the Trainer and the telemetry cost: python tests/benchmarks/trainer_overhead.py [--steps 40] [--json FILE]

A run at the scale of base.yaml, with all its callbacks, next to a bare loop of the same steps in the same process: the
same model, optimizer, schedule and batches. Steps alternate (one of the Trainer's, one bare), so conditions are equal.
The Trainer's step is everything between two of its micro-batches; validation and checkpoints come after the last step
and do not count. The telemetry's time is that inside the hooks of the callbacks in TELEMETRY, including what they hook
into the loop and the backward pass. Targets: a ratio of at most 1.05, telemetry at most 1% of the step.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import lightning as L  # noqa: E402
import torch  # noqa: E402

from callbacks import (  # noqa: E402
    FlopsMonitor,
    GradientNorm,
    GradientShare,
    LearningRates,
    LoopStats,
    LossCurves,
    UpdateNorms,
)
from looped_lm import LoopedLM  # noqa: E402
from looped_lm.configuration.config_files import resolve_arguments  # noqa: E402
from looped_lm.configuration.parser import LoopedCLI  # noqa: E402

TELEMETRY = (GradientNorm, UpdateNorms, LoopStats, GradientShare, LearningRates, FlopsMonitor, LossCurves)
#: Methods that run inside the loop or the backward pass.
INSIDE = ("_observe", "_watch", "_add")
WARM_UP = 5


def build(config: str, steps: int, folder: str) -> LoopedCLI:
    """Model, data and Trainer as the command line makes them, for `steps` steps without validation in between."""
    sys.argv[1:] = resolve_arguments(
        [
            *("--config", config, "--trainer.logger.init_args.save_dir", folder),
            *("--model.horizon", "looped_lm.Steps", "--model.horizon.steps", str(steps)),
            *("--model.val_every_steps", "null", "--data.final_val_rows", "16"),
        ]
    )
    return LoopedCLI(run=False)


def micro_batches(data: L.LightningDataModule) -> Iterator[Any]:
    data.prepare_data()
    data.setup("fit")
    return iter(data.train_dataloader())


def bare_step(lm: LoopedLM, data: L.LightningDataModule) -> Callable[[], float]:
    """One optimizer step of a loop without a Trainer, as a function that returns its seconds."""
    configured = lm.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    batches = micro_batches(data)
    accumulation = lm.batch_tokens // (data.batch_size * lm.seq_len)  # type: ignore[attr-defined]

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        for _ in range(accumulation):
            inputs, targets = next(batches)
            (lm.model(inputs, targets) / accumulation).backward()
        optimizer.step()
        scheduler.step()
        return time.perf_counter() - began

    return step


class Clock:
    """Seconds spent inside functions since the last reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def around(self, owner: Any, name: str, label: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            # A hook that calls another hook is counted once.
            if self._inside:
                return function(*args, **kwargs)
            self._inside, began = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - began
                self._inside = False

        setattr(owner, name, timed)

    def read(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


def watch_telemetry(trainer: L.Trainer) -> Clock:
    clock = Clock()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TELEMETRY):
            own = [n for n in vars(type(callback)) if n.startswith("on_") or n in INSIDE]
            for name in own:
                clock.around(callback, name, type(callback).__name__)
    return clock


def measure(config: str, steps: int) -> dict[str, Any]:
    """Seconds per step of both loops, and of the telemetry."""
    with tempfile.TemporaryDirectory() as folder:
        ours, twin = build(config, steps, folder), build(config, steps, folder)
        trainer, lm = ours.trainer, ours.model
        bare = bare_step(twin.model, twin.datamodule)
        clock = watch_telemetry(trainer)
        rows: list[dict[str, Any]] = []
        loop = trainer.fit_loop.epoch_loop
        advance, last = loop.advance, [0.0]

        def alternate(fetcher: Any) -> None:
            now, step = time.perf_counter(), trainer.global_step
            if last[0] and loop.batch_idx + 1 and (loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                hooks = clock.read()
                rows.append(
                    {
                        "step": step,
                        "logs": lm.logs_step(step),
                        "trainer": now - last[0],
                        "telemetry": sum(hooks.values()),
                        "hooks": hooks,
                    }
                )
                last[0] = 0.0
            if not last[0]:
                rows_bare.append(bare())
                last[0] = time.perf_counter()
            advance(fetcher)

        rows_bare: list[float] = []
        loop.advance = alternate  # type: ignore[method-assign]
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(lm, datamodule=ours.datamodule)
    for row, seconds in zip(rows, rows_bare, strict=False):
        row["bare"] = seconds
    return summary(config, rows[WARM_UP:])


def summary(config: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    def median(key: str, logs: bool | None = None) -> float:
        return statistics.median(r[key] for r in rows if logs is None or r["logs"] is logs)

    def share(logs: bool | None = None) -> float:
        return statistics.median(
            r["telemetry"] / r["trainer"] for r in rows if logs is None or r["logs"] is logs
        )

    names = sorted({name for r in rows for name in r["hooks"]})
    return {
        "config": config,
        "threads": torch.get_num_threads(),
        "steps": len(rows),
        "bare_seconds": median("bare"),
        "trainer_seconds": median("trainer"),
        "ratio": median("trainer") / median("bare"),
        "ratio_of_pairs": statistics.median(r["trainer"] / r["bare"] for r in rows),
        "ratio_at_logging_steps": statistics.median(r["trainer"] / r["bare"] for r in rows if r["logs"]),
        "telemetry_share": share(),
        "telemetry_share_at_logging_steps": share(True),
        "telemetry_share_of_total": sum(r["telemetry"] for r in rows) / sum(r["trainer"] for r in rows),
        "telemetry_ms_at_logging_steps": {
            name: 1e3 * statistics.median(r["hooks"].get(name, 0.0) for r in rows if r["logs"])
            for name in names
        },
    }


def main() -> None:
    """Print a table, and the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", nargs="+", default=["r4.yaml", "r8_hc.yaml"])
    parser.add_argument(
        "--steps", type=int, default=40, help=f"optimizer steps, {WARM_UP} of them to warm up"
    )
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    results = [measure(config, arguments.steps) for config in arguments.config]
    print(
        "\nconfig        bare ms  Trainer ms  ratio  of pairs   telemetry: median  logging steps  of all time"
    )
    for r in results:
        print(
            f"{r['config']:<12} {1e3 * r['bare_seconds']:8.1f} {1e3 * r['trainer_seconds']:11.1f} {r['ratio']:6.3f} "
            f"{r['ratio_of_pairs']:9.3f} {r['telemetry_share']:19.3%} {r['telemetry_share_at_logging_steps']:14.3%} "
            f"{r['telemetry_share_of_total']:12.3%}"
        )
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
