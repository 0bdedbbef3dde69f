"""The benchmarks run, at small sizes: a script that is run by hand breaks without anybody noticing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import gpu_step, train_step


@pytest.mark.slow
def test_gpu_step_runs_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["gpu_step.py", "--eager", "--rounds", "1", "--json", str(out)])
    gpu_step.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["architecture"] for row in rows] == [label for label, *_ in gpu_step.SUBJECTS]
    assert all(row["mfu"] > 0 and row["mfu_with_optimizer"] < row["mfu"] for row in rows)
    assert "| r8, recomputed |" in capsys.readouterr().out


@pytest.mark.slow
def test_train_step_measures_every_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "train.json"
    sizes = ["--size", "1", "--head-dim", "16", "--seq-len", "16", "--vocab", "64", "--rows", "2"]
    monkeypatch.setattr("sys.argv", ["train_step.py", "--eager", "--pairs", "3", *sizes, "--json", str(out)])
    train_step.main()
    figures = json.loads(out.read_text())
    assert [row["architecture"] for row in figures["rows"]] == list(train_step.ARCHITECTURES)
    assert all(len(rounds) == 3 for rounds in figures["rounds"].values())
    # Counted, so the same whatever the machine does: truncation saves, lanes cost less than the linear injection.
    shares = {r["architecture"]: r["flops_over_linear"] for r in figures["rows"] if "flops_over_linear" in r}
    assert shares["r8_truncated"] < shares["r8_hc"] < 1
    assert "Medians of 3 interleaved rounds" in capsys.readouterr().out
