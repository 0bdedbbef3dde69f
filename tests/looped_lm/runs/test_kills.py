"""kill -9 at any moment: see kill_loop.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def kill_loop(runs: int, seed: int, minutes: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kill_loop", f"--runs={runs}", f"--seed={seed}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60 * minutes,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
def test_killed_runs_end_as_if_nothing_had_happened() -> None:
    assert "3 of 3 runs equal the undisturbed one" in kill_loop(runs=3, seed=0, minutes=10)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
def test_fifty_killed_runs_end_as_if_nothing_had_happened() -> None:
    assert "50 of 50 runs equal the undisturbed one" in kill_loop(runs=50, seed=1, minutes=120)
