"""A run that was stopped and resumed equals the uninterrupted one bit by bit."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from looped_lm.runs.preemption import EXIT_STATUS
from tests.support.resume_pair import run_pair
from tests.support.resume_runs import (
    STEPS,
    STOPS,
    VAL_EVERY,
    VARIANTS,
    Outcome,
    Trace,
    assert_equal,
    fit,
    write_data,
)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Any:
    """The uninterrupted run of a variant."""
    known: dict[str, Outcome] = {}

    def run(variant: str) -> Outcome:
        if variant not in known:
            folder = tmp_path_factory.mktemp(f"whole-{variant}")
            known[variant] = fit(folder, data_dir, variant, keep=-1)
        return known[variant]

    return run


def stop_and_resume(
    folder: Path, data_dir: Path, stop: str, variant: str, workers: int, send: int, expected: Outcome
) -> None:
    where, step = STOPS[stop]
    trace = Trace(send, **where)
    first = fit(folder, data_dir, variant, workers, trace=trace)
    assert first.stopped is not None and first.stopped.code == EXIT_STATUS and first.stopped.step == step
    # Within one step: it ended with the micro-batches of the step that was under way.
    assert trace.micro_batches_after_the_signal == (2 - where["at"][1] if trace.during == "training" else 0)
    second = fit(folder, data_dir, variant, workers, ckpt_path=first.stopped.checkpoint)
    assert second.stopped is None
    assert_equal(first.then(second), expected)


def test_the_uninterrupted_run_is_what_the_tests_take_it_for(whole: Any) -> None:
    outcome = whole("r4")
    assert [step for step, _, _ in outcome.validations] == [5, 10, 15, 20, STEPS]
    assert [tokens for _, _, tokens in outcome.validations] == [5 * 16] * 4 + [7 * 16]
    samples = outcome.trace.samples
    first, second = ([row for s in range(a, a + 8) for row in samples[s]] for a in (0, 8))
    assert len(set(first)) == 32 and sorted(first) == sorted(second) and first != second
    assert len({draw for draw in outcome.draws}) == STEPS


@pytest.mark.parametrize("stop", STOPS)
def test_stopped_anywhere(stop: str, tmp_path: Path, data_dir: Path, whole: Any) -> None:
    stop_and_resume(tmp_path, data_dir, stop, "r4", 0, signal.SIGTERM, whole("r4"))


@pytest.mark.parametrize(
    ("workers", "variant", "stop", "send"),
    [
        (1, "r8_hc", "in a later epoch", signal.SIGUSR1),
        pytest.param(2, "r4_truncated", "at the data's end", signal.SIGUSR2, marks=pytest.mark.slow),
        (0, "r4_truncated", "at the data's end", signal.SIGUSR2),
        (0, "r4_sampled", "in a validation", signal.SIGINT),
    ],
)
def test_with_workers_and_other_loops(
    workers: int, variant: str, stop: str, send: int, tmp_path: Path, data_dir: Path, whole: Any
) -> None:
    stop_and_resume(tmp_path, data_dir, stop, variant, workers, send, whole(variant))


def test_from_a_checkpoint_of_a_running_run(tmp_path: Path, data_dir: Path, whole: Any) -> None:
    """As after a kill: the checkpoint is older than the run's end, and was written after its validation."""
    first = fit(tmp_path, data_dir, keep=-1, steps=STEPS)
    expected = whole("r4")
    step = 2 * VAL_EVERY
    second = fit(tmp_path, data_dir, ckpt_path=str(tmp_path / f"step={step:06d}.ckpt"))
    tail = Outcome(
        first.losses[2 * step :],
        [v for v in first.validations if v[0] > step],
        [d for d in first.draws if d[0] > step],
        [r for r in first.rows if r[0] > step],
        first.weights,
        first.optimizer,
        first.counters,
    )
    assert_equal(second, tail)
    assert_equal(first, expected)


def test_stopped_twice(tmp_path: Path, data_dir: Path, whole: Any) -> None:
    first = fit(tmp_path, data_dir, trace=Trace(at=(3, 0)))
    assert first.stopped is not None
    second = fit(tmp_path, data_dir, ckpt_path=first.stopped.checkpoint, trace=Trace(at=(12, 1)))
    assert second.stopped is not None and second.stopped.step == 13
    third = fit(tmp_path, data_dir, ckpt_path=second.stopped.checkpoint)
    assert_equal(first.then(second).then(third), whole("r4"))
    # The two newest, whichever process wrote them.
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == [f"step={s:06d}.ckpt" for s in (20, STEPS)]


def test_what_a_checkpoint_of_a_stopped_run_says(tmp_path: Path, data_dir: Path) -> None:
    stop = fit(tmp_path, data_dir, trace=Trace(signal.SIGUSR1, at=(2, 1))).stopped
    assert stop is not None and stop.checkpoint == str(tmp_path / "step=000003.ckpt") and stop.wants_requeue
    assert str(stop) == f"stopped by SIGUSR1 after step 3, saved in {stop.checkpoint}."
    (record,) = tmp_path.glob("*.run.json")
    stored = json.loads(record.read_text())
    assert stored["status"] == "stopped"
    assert stored["stop_reason"] == f"preempted by SIGUSR1 at step 3 of {STEPS}"


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 1)])
def test_accumulation_may_change(before: int, after: int, tmp_path: Path, data_dir: Path, whole: Any) -> None:
    """Steps end, and validations come, where they would have."""
    first = fit(tmp_path, data_dir, accumulate=before, trace=Trace(at=(6, 0)))
    assert first.stopped is not None and first.stopped.step == 7
    second = fit(tmp_path, data_dir, accumulate=after, ckpt_path=first.stopped.checkpoint)
    expected = whole("r4")
    assert first.trace is not None and second.trace is not None
    assert {**first.trace.samples, **second.trace.samples} == expected.trace.samples
    for (step, loss, tokens), (step2, loss2, tokens2) in zip(
        first.validations + second.validations, expected.validations, strict=True
    ):
        assert (step, tokens) == (step2, tokens2) and loss == pytest.approx(loss2, rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(second.weights[name], weight, rtol=1e-3, atol=1e-4)


def test_two_processes(tmp_path: Path, data_dir: Path, whole: Any) -> None:
    """One pair of processes runs all of it; and the number of processes changes both ways."""
    alone = fit(tmp_path / "alone", data_dir, accumulate=2, trace=Trace(at=(6, 0)))
    assert alone.stopped is not None
    report = run_pair(
        tmp_path,
        data_dir,
        cases=[
            ("at a validation", "r4", 1, 0),
            ("in a later epoch", "r4", 0, 1),
        ],
        resume=alone.stopped.checkpoint,
    )
    assert [case["equal"] for case in report["cases"]] == [True] * 2, report
    expected = whole("r4").trace.samples
    by_step = {int(step): sorted(rows) for step, rows in report["resumed_from_one"].items()}
    assert by_step == {step: sorted(rows) for step, rows in expected.items() if step >= 7}
    back = fit(tmp_path / "back", data_dir, ckpt_path=report["checkpoint"])
    assert back.trace is not None and min(back.trace.samples) == report["step"]
    assert back.trace.samples == {s: rows for s, rows in expected.items() if s >= report["step"]}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_whole_matrix_on_one_process(variant: str, tmp_path: Path, data_dir: Path, whole: Any) -> None:
    """Workers x stops x processes x signals; each line that is printed is a case that was equal."""
    signals = itertools.cycle([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2])
    for workers, stop in itertools.product((0, 1, 2), STOPS):
        send = next(signals)
        folder = tmp_path / f"{workers}-{stop}"
        stop_and_resume(folder, data_dir, stop, variant, workers, send, whole(variant))
        print(f"equal: 1 process, {variant}, {workers} workers, {send.name} {stop}", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "workers"),
    [("r4", [0]), ("r4", [1]), ("r4", [2]), *((v, [0, 1, 2]) for v in VARIANTS if v != "r4")],
)
def test_the_whole_matrix_on_two_processes(
    variant: str, workers: list[int], tmp_path: Path, data_dir: Path
) -> None:
    """All of it with one loop; each stop once, with one number of workers or another, with the others."""
    cases = [
        (stop, variant, w, n % 2)
        for n, (stop, w) in enumerate(zip(STOPS, itertools.cycle(workers), strict=False))
    ]
    report = run_pair(tmp_path, data_dir, cases, resume=None)
    for case in report["cases"]:
        print(f"{'equal' if case['equal'] else 'DIFFERENT'}: 2 processes, {case['name']}", flush=True)
    assert all(case["equal"] for case in report["cases"])
