"""The benchmarks run, at small sizes: a script that is run by hand breaks without anybody noticing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from looped_lm.sweeps import files
from looped_lm.sweeps.expansion import expand
from tests.benchmarks import gpu_grid, gpu_step, train_step


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


def test_the_grids_of_gpu_grid_are_as_large_as_they_say() -> None:
    for path, count, flops in ((gpu_grid.GPU_SWEEP, 27, 3.87e16), (gpu_grid.CPU_SWEEP, 18, 1.77e12)):
        budgets = [run.axes["model.horizon.flops"] for run in expand(files.load(path))]
        assert len(budgets) == count and sum(budgets) == pytest.approx(flops)
        assert max(budgets) <= 3e15 and len(set(budgets)) == 3


@pytest.mark.slow
def test_gpu_grid_trains_and_fits_on_a_cpu(
    tmp_path: Path,
    tiny_data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Twelve runs of a few steps: records, table and status, whatever phi comes out."""
    keys = {
        "trainer.accelerator": "cpu", "data.data_dir": str(tiny_data_dir), "data.seq_len": 16, "data.batch_size": 2,
        "data.tokenizer": "datamodules.ByteTokenizer", "data.val_rows": 2, "data.final_val_rows": 4,
        "model.head_dim": 16, "model.batch_tokens": 32, "model.prelude_layers": 1, "model.recurrent_layers": 1,
        "model.coda_layers": 1,
    }  # fmt: skip
    grid = {
        "config": ["r2.yaml", "r4.yaml"],
        "model.horizon.flops": [1e8, 2e8, 4e8],
        "model.size": [0.25, 0.5],
    }
    sweep, out = tmp_path / "tiny.yaml", tmp_path / "grid.json"
    sweep.write_text(json.dumps({"keys": keys, "grid": grid}))
    options = ["--sweep", str(sweep), "--starts", "20", "--resamples", "0", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["gpu_grid.py", *options])
    assert gpu_grid.main() == 0
    found, text = json.loads(out.read_text()), capfd.readouterr().out
    assert found["analysis"]["fit"]["runs"] == 12 and found["finished"]
    assert f"status {found['analysis']['fit']['status']}" in text and text.count("| 2 | ") == 3
