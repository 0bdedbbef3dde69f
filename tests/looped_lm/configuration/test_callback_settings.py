"""The key `callbacks`: one setting of one callback, from files, the command line and a run's own configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from looped_lm.configuration.callback_settings import written_as_mapping
from tests.support.cli_options import tiny_options


def callbacks(run_cli: Any, *options: str) -> dict[str, dict[str, Any]]:
    """Settings of each callback of the resolved configuration of `fit` with these options."""
    status, out = run_cli("fit", *options, "--print_config")
    assert status == 0, out
    config = yaml.safe_load(out)
    assert "callbacks" not in config
    listed = config["trainer"]["callbacks"]
    found = {c["class_path"].split(".")[-1]: c.get("init_args", {}) for c in listed}
    assert len(found) == len(listed)
    return found


def test_one_setting_changes_and_the_rest_stays(run_cli: Any) -> None:
    before = callbacks(run_cli)
    after = callbacks(
        run_cli, "--callbacks.Checkpoints.every_n_steps", "50", "--callbacks.Checkpoints.keep=3"
    )
    assert after["Checkpoints"] == {**before["Checkpoints"], "every_n_steps": 50, "keep": 3}
    assert list(after) == list(before)
    assert {k: v for k, v in after.items() if k != "Checkpoints"} == {
        k: v for k, v in before.items() if k != "Checkpoints"
    }


def test_null_leaves_a_callback_out(run_cli: Any) -> None:
    before = callbacks(run_cli)
    assert list(callbacks(run_cli, "--callbacks.Samples", "null", "--callbacks.LaneMaps=null")) == [
        name for name in before if name not in ("Samples", "LaneMaps")
    ]


def test_later_files_and_options_win_setting_by_setting(run_cli: Any, tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("callbacks:\n  Samples: {every: 2, temperature: 1e-1, rows: 1}\n  LoopStats: null\n")
    two.write_text("callbacks: {Samples: {rows: 2}, Checkpoints: {keep: 7}, LoopStats: {rows: 4}}\n")
    found = callbacks(
        run_cli, "--config", str(one), "--config", str(two), "--callbacks.Samples.temperature=8e-1"
    )
    samples = found["Samples"]
    assert (samples["every"], samples["rows"], samples["temperature"]) == (2, 2, 0.8)
    assert found["Checkpoints"]["keep"] == 7 and found["LoopStats"] == {"rows": 4}


def test_a_callback_that_was_appended_has_its_settings_changed_too(run_cli: Any, tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("trainer: {callbacks+: [{class_path: lightning.pytorch.callbacks.DeviceStatsMonitor}]}\n")
    found = callbacks(run_cli, "--config", str(more), "--callbacks.DeviceStatsMonitor.cpu_stats=true")
    assert found["DeviceStatsMonitor"]["cpu_stats"] is True


@pytest.mark.parametrize(
    "options, says",
    [
        (
            ["--callbacks.Checkpoint.keep=3"],
            "trainer.callbacks has no Checkpoint. Did you mean 'Checkpoints'?",
        ),
        (["--callbacks.Checkpoints.kep=3"], "Did you mean 'callbacks.Checkpoints.keep'?"),
        (["--callbacks.Checkpoints.keep=many"], "Got value: many"),
        (["--callbacks.Checkpoints=3"], "callbacks.Checkpoints is 3; callbacks maps names of classes"),
        (["--callbacks=[1]"], "callbacks is [1]; callbacks maps names of classes"),
        (["--callbacks.Checkpoints.keep"], "--callbacks.Checkpoints.keep has no value"),
        (["--callbacks.Checkpoints.keep", "--data.seed=1"], "--callbacks.Checkpoints.keep has no value"),
        (["--callbacks.Checkpoints.keep", "{"], "--callbacks.Checkpoints.keep is '{', which is not YAML"),
        (["--callbacks", "["], "argument --callbacks: invalid names of classes"),
        (["--trainer.callbacks.init_args.every_n_steps=3"], "--callbacks.Checkpoints.every_n_steps"),
        (["--trainer.callbacks.LoopStats.every=3"], "as in --callbacks.LoopStats.every."),
        (
            ["--trainer.callbacks+=callbacks.Checkpoints", "--callbacks.Checkpoints.keep=3"],
            "names Checkpoints 2 times",
        ),
        (["--trainer.callbacks+=callbacks.Checkpoints"], "--callbacks.Checkpoints.SETTING changes the one"),
    ],
)
def test_what_is_unknown_or_unclear_is_refused_with_what_exists(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, options: list[str], says: str
) -> None:
    status, out = run_cli("fit", *tiny_options(tiny_data_dir), *options)
    assert status in (1, 2) and says in out and "Traceback" not in out, out
    assert len(out) < 900


def test_settings_of_a_callback_added_on_the_command_line_follow_it() -> None:
    words = [
        "--trainer.callbacks+=mine.Own",
        "--trainer.callbacks.every=3",
        "--callbacks.A.b=x",
        "--callbacks.C",
        "null",
        "--callbacks.A.day=2024-01-31",
    ]
    assert written_as_mapping(words) == [
        *words[:2], '--callbacks={"A": {"b": "x"}}', '--callbacks={"C": null}',
        '--callbacks={"A": {"day": "2024-01-31"}}',
    ]  # fmt: skip


def test_a_run_keeps_the_settings_and_goes_on_with_its_own_configuration(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path
) -> None:
    options = [*tiny_options(tiny_data_dir), "--run_name=own"]
    status, out = run_cli(
        "fit", *options, "--callbacks.Checkpoints.every_n_steps=1", "--callbacks.Samples=null"
    )
    assert status == 0, out
    folder = in_folder / "runs/own/version_0"
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    record = json.loads((folder / "checkpoints/step=000003.run.json").read_text())
    assert (folder / "checkpoints/step=000003.ckpt").exists()
    for config in (saved, record["config"]):
        assert "callbacks" not in config
        kept = {c["class_path"]: c.get("init_args", {}) for c in config["trainer"]["callbacks"]}
        assert kept["callbacks.Checkpoints"]["every_n_steps"] == 1 and "callbacks.Samples" not in kept
    status, out = run_cli(
        "fit", "--config", str(folder / "config.yaml"), "--resume", str(folder), "--model.horizon.steps=5"
    )
    assert status == 0, out
    again = yaml.safe_load((folder / "config_resumed_1.yaml").read_text())
    assert again["trainer"]["callbacks"] == saved["trainer"]["callbacks"]
    assert "trainer.callbacks" not in out


def test_a_plan_and_a_sweep_take_the_key(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    status, out = run_cli("plan", *tiny_options(tiny_data_dir), "--callbacks.Checkpoints.keep=3")
    assert status == 0, out
    status, out = run_cli("plan", *tiny_options(tiny_data_dir), "--callbacks.Checkpoints.kep=3")
    assert status == 2 and "Did you mean 'callbacks.Checkpoints.keep'" in out
    Path("sweep.yaml").write_text(
        "configs: [r4.yaml]\ngrid:\n  callbacks.Checkpoints.every_n_steps: [5, 10]\n"
        "keys:\n  callbacks.Samples: null\n"
    )
    status, out = run_cli("sweep", "plan", "sweep.yaml")
    assert status == 0 and "2 runs" in out, out


@pytest.mark.parametrize(
    "options, gone",
    [
        (["--trainer.enable_progress_bar=false"], {"StepProgressBar"}),
        (["--trainer.enable_checkpointing=false"], {"Checkpoints"}),
    ],
)
def test_what_is_switched_off_takes_its_default_callback_along(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, options: list[str], gone: set[str]
) -> None:
    before = callbacks(run_cli)
    assert set(before) - set(callbacks(run_cli, *options)) == gone
    status, out = run_cli("fit", *tiny_options(tiny_data_dir), *options)
    assert status == 0, out
    assert ("leaves no run record" in out) == ("Checkpoints" in gone)
    assert bool(list(in_folder.rglob("*.run.json"))) == ("Checkpoints" not in gone)
    assert ("it/s" in out) == ("StepProgressBar" not in gone)


def test_barebones_runs_without_any_default_callback(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path
) -> None:
    assert callbacks(run_cli, "--trainer.barebones=true") == {}
    status, out = run_cli("fit", *tiny_options(tiny_data_dir), "--trainer.barebones=true")
    assert status == 0, out
    assert "leaves no run record" in out and not list(in_folder.rglob("*.ckpt"))


def test_a_progress_bar_of_ones_own_is_left_to_lightning(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path
) -> None:
    bar = [
        "--callbacks.StepProgressBar=null",
        "--trainer.callbacks+=lightning.pytorch.callbacks.TQDMProgressBar",
    ]
    status, out = run_cli("fit", *tiny_options(tiny_data_dir), *bar, "--trainer.enable_progress_bar=false")
    assert status == 1 and "enable_progress_bar=False" in out and "Traceback" not in out
