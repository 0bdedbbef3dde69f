"""Other loggers than TensorBoard by changing the YAML alone: CSV, W&B (offline), several, none."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cli_options import tiny_options
from tests.support.documents import Page, code_blocks

CURVES = {"train/loss", "val/loss", "lr/matrix", "grad/norm", "update/norm_lanes", "cost/flops"}
CURVES |= {"speed/tokens_per_second", "loop/state_norm_3", "loop/grad_share_3", "by_cost/train_loss"}


def fit(run_cli: Any, data: Path, trainer: dict[str, Any], *more: str) -> str:
    """`fit` with a config of the user's that changes the trainer's section alone."""
    Path("mine.yaml").write_text(yaml.safe_dump({"trainer": {"log_every_n_steps": 1, **trainer}}))
    status, out = run_cli(
        "fit", "--config", "r4_hc.yaml", "--config", "mine.yaml", *tiny_options(data, steps=4), *more
    )
    assert status == 0, out
    return out


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_csv_by_yaml_alone_and_its_resume(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    logger = {"logger": "lightning.pytorch.loggers.CSVLogger"}
    folder = in_folder / "runs" / "r4_hc-mine"
    out = fit(run_cli, tiny_data_dir, {**logger, "max_steps": 2})
    (path,) = folder.rglob("metrics.csv")
    assert str(path.relative_to(in_folder)) in out and path.parent == folder / "version_0"
    assert (path.parent / "config.yaml").is_file() and list(path.parent.rglob("*.ckpt"))
    fit(run_cli, tiny_data_dir, logger, "--resume=auto")
    rows = rows_of(path)
    assert CURVES <= set(rows[0])
    for name, steps in (
        ("train/loss", [1, 2, 3, 4]),
        ("by_cost/train_loss", [1, 2, 3, 4]),
        ("val/loss", [2, 4]),
    ):
        assert [int(row["step"]) for row in rows if row[name]] == steps, name
    costs = [row for row in rows if row["by_cost/val_loss"]]
    assert [float(row["by_cost/tokens"]) for row in costs] == [64, 128]
    assert not any(name.startswith(("by_tokens", "lanes/", "samples/")) for name in rows[0])


def test_wandb_offline_by_yaml_alone(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    seen: list[dict[str, Any]] = []
    log = wandb.sdk.wandb_run.Run.log

    def spy(self: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        seen.append(dict(data))
        return log(self, data, *args, **kwargs)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", spy)
    (sample,) = [b for b in code_blocks(Page.at("docs/tensorboard.md").text, "yaml") if "WandbLogger" in b]
    offline = yaml.safe_load(sample)["trainer"]
    for version in range(2):
        fit(run_cli, tiny_data_dir, offline)
        wandb.finish()
        # Checkpoints, records and the configuration have a folder of their own for every run.
        folder = in_folder / "runs" / "r4_hc-mine" / f"version_{version}"
        assert (folder / "config.yaml").is_file() and list(folder.rglob("*.run.json"))
    stored = sorted((in_folder / "runs" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(stored) == 2 and all(path.stat().st_size > 10_000 for path in stored)
    first = seen[: len(seen) // 2]
    assert CURVES <= {name for row in first for name in row}
    steps = [row["trainer/global_step"] for row in first if "trainer/global_step" in row]
    assert steps == sorted(steps) and steps[-1] == 4
    assert {"lanes/mixing", "lanes/alpha", "lanes/beta", "samples/0"} <= {
        name for row in first for name in row
    }
    (row,) = [row for row in first if "by_cost/val_loss" in row and row["trainer/global_step"] == 4]
    assert row["by_cost/tokens"] == 128
    record = json.loads(next(folder.rglob("*step=*4.run.json")).read_text())
    assert row["by_cost/val_loss"] == pytest.approx(record["val_loss"])


def test_several_loggers_and_none(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    several = [
        {"class_path": f"lightning.pytorch.loggers.{name}", "init_args": {"save_dir": "runs", "name": None}}
        for name in ("CSVLogger", "TensorBoardLogger")
    ]
    fit(run_cli, tiny_data_dir, {"logger": several})
    folder = in_folder / "runs" / "r4_hc-mine" / "version_0"
    assert len(rows_of(folder / "metrics.csv")) > 8
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1 and list(folder.rglob("*.run.json"))
    fit(run_cli, tiny_data_dir, {"logger": False})
