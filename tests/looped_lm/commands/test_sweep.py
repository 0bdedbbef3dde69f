"""`python -m looped_lm sweep`: plans, refusals, status, records."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from fitting.__main__ import main as fitting
from fitting.data.loading import load_runs
from fitting.records import RunRecord
from looped_lm.sweeps import files
from looped_lm.sweeps.expansion import expand
from looped_lm.sweeps.place import Place
from looped_lm.sweeps.planning import Planner, peak_flops
from tests.support.cli_options import tiny_sweep
from tests.support.run_records import record_fields


def test_a_plan_tells_costs_and_writes_a_design_for_fitting(run_cli: Any, in_folder: Path) -> None:
    (in_folder / "mine.yaml").write_text(
        "configs: [paper.yaml]\n"
        "grid:\n  config: [r1.yaml, r4.yaml]\n  model.horizon.flops: [1e18, 1e19]\n  model.size: [6, 8]\n"
    )
    status, out = run_cli(
        "sweep", "plan", "mine.yaml", "--device", "a100", "--mfu", "0.5", "--csv", "design.csv"
    )
    assert status == 0, out
    # 2 configs x 2 sizes x (1e18 + 1e19) FLOPs at 0.5 x 312 TFLOPs/s; budgets are met to half a step.
    hours = 4 * 1.1e19 / (0.5 * 312e12) / 3600
    told = re.search(r"([\d.]+) device hours .* a100 at MFU 0.5", out)
    assert told and float(told.group(1)) == pytest.approx(hours, abs=0.1)
    assert "8 runs, 4.4e+19 training FLOPs" in out
    design = load_runs(in_folder / "design.csv", with_loss=False)
    assert len(design) == 8 and sorted(set(design.recurrences)) == [1, 4]
    with (in_folder / "design.csv").open(newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["d_model"] == "384" and row["r"] == "1")
    assert float(row["flops_per_token"]) == 475047936 and float(row["tokens"]) == 1e18 / 475047936
    assert fitting(["plan", "design.csv", "--quiet", "--simulate", "2"]) in (0, 1)
    (in_folder / "other.yaml").write_text(
        "configs: [paper.yaml]\ngrid: {config: [r4_hc.yaml, r4_truncated.yaml], model.size: 6}\n"
    )
    status, out = run_cli("sweep", "plan", "other.yaml", "--csv", "other.csv")
    assert status == 0, out
    status, out = run_cli("sweep", "plan", "other.yaml", "--csv", "other.yaml")
    assert status == 1 and "other.yaml exists" in out and "grid" in (in_folder / "other.yaml").read_text()
    other = load_runs(in_folder / "other.csv", with_loss=False)
    assert other.injection.tolist() == ["hyperconnections", "linear"]
    assert other.bptt[0] == "full" and other.bptt[1].startswith("truncated")
    assert other.n_injection.tolist() == [4 * (2 * 2 + 2 + 2), 2 * 384**2], (
        "lanes have no matrix of an injection"
    )


def test_a_plan_of_equal_tokens_says_what_matching_will_tell(run_cli: Any, in_folder: Path) -> None:
    text = (
        "configs: [nano.yaml]\nkeys: {model.head_dim: 8, model.horizon: looped_lm.TokenBudget}\n"
        "grid:\n  config: [r1.yaml, r8.yaml]\n  model.size: [0.125, 0.25, 0.5]\n"
        "  model.horizon.tokens: 262144\n  seed_everything: [1, 2]\n"
    )
    (in_folder / "tokens.yaml").write_text(text)
    status, out = run_cli("sweep", "plan", "tokens.yaml", "--csv", "design.csv")
    assert status == 0 and "expected standard error of phi" in out, out
    design = load_runs(in_folder / "design.csv", with_loss=False)
    assert len(design) == 12 and set(design.seed) == {1, 2}
    (in_folder / "few.yaml").write_text(text.replace("0.125, ", ""))
    status, out = run_cli("sweep", "plan", "few.yaml")
    assert status == 0 and "not possible with this design: that needs r=1 runs of 3 widths" in out, out
    (in_folder / "rates.yaml").write_text(f"{text}  model.transfer.matrix: [0.01, 0.02]\n")
    assert "atching" not in run_cli("sweep", "plan", "rates.yaml")[1]


def test_the_batch_that_fits_is_the_largest_whose_estimate_does(in_folder: Path) -> None:
    (in_folder / "mine.yaml").write_text("grid: {config: r4.yaml, model.size: 1, model.batch_tokens: 16384}")
    (run,) = expand(files.load(Path("mine.yaml")))
    from looped_lm.training.memory import estimate

    model = Planner().plan(run).model
    bytes_of = {rows: estimate(model.model, rows, 256, model.optimizer_factory).total for rows in (8, 16, 32)}
    for rows, needed in bytes_of.items():
        assert Planner(memory=needed * 1.01).plan(run).batch_size == rows
    assert Planner(memory=bytes_of[32] * 1.01, devices=4).plan(run).batch_size == 16, "a quarter of 64 rows"
    assert Planner(memory=1e6).plan(run).batch_size is None


def test_peaks_come_from_lightnings_table() -> None:
    assert peak_flops("h100 sxm", "bf16-mixed") == 989.4e12 and peak_flops("a100", "32-true") == 19.5e12
    with pytest.raises(ValueError, match="Did you mean 'h100 sxm'"):
        peak_flops("h100 sxn", "32-true")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["plan", "iso_deph.yaml"], "Did you mean 'iso_depth.yaml'?"),
        (["run", "bad.yaml"], "Did you mean 'model.size'"),
        (["run", "good.yaml", "--jobs", "0"], "--jobs is 0"),
        (["plan", "good.yaml", "--mfu", "-1"], "--mfu is -1"),
        (["plan", "good.yaml", "--peak-flops", "0"], "--peak-flops is 0"),
        (["plan", "good.yaml", "--mfu", "40"], "--mfu is 40"),
        (["plan", "good.yaml", "--device", "a100", "--peak-flops", "1e12"], "leave one out"),
        (["run", "good.yaml", "--profile", "x.yaml"], "--profile has no effect with --launcher local"),
        (["run", "good.yaml", "--launcher", "slurm", "--jobs", "2"], "--jobs has no effect"),
        (["plan", "good.yaml", "--device", "h100"], "is not in Lightning's table"),
    ],
)
def test_a_mistake_is_told_and_nothing_runs(
    run_cli: Any, in_folder: Path, arguments: list[str], told: str
) -> None:
    (in_folder / "good.yaml").write_text("grid: {config: r4.yaml}")
    (in_folder / "bad.yaml").write_text("grid: {config: r4.yaml, model.sise: [1, 2]}")
    status, out = run_cli("sweep", *arguments)
    assert status == 1 and told in out, out
    assert not (in_folder / "runs").exists()


def test_status_records_and_a_failed_run(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    file = str(tiny_sweep(in_folder, tiny_data_dir, seeds=9, steps=4))
    runs = expand(files.load(Path(file)))
    place = Place(Path("runs"), "tiny")
    status, out = run_cli("sweep", "records", file)
    assert status == 1 and "0 of 9 runs are finished" in out
    for i, run in enumerate(runs[:7]):
        place.note(run, command=["fit"])
        record = RunRecord.from_dict({**record_fields(), "run_name": place.name(run), "seed": i + 1})
        record.save(place.folder(run) / "version_0" / "checkpoints" / "step=000004.run.json")
    place.note(runs[7], command=["fit"])
    place.log(runs[7]).write_text("a line\nerror: the disk is full\n")
    place.note(runs[7], exit_status=1)
    status, out = run_cli("sweep", "status", file)
    assert status == 0 and "9 runs: 7 finished, 1 failed, 1 waiting" in out
    assert "| error: the disk is full" in out and "sweep retry" in out
    status, out = run_cli("sweep", "records", file, "--records", "kept")
    assert status == 0 and "7 of 9" in out and f"python -m fitting fit {in_folder / 'kept'}" in out
    assert len(load_runs("kept")) == 7
    status, out = run_cli("sweep", "status", file, "--out", "nowhere", "--records", "kept")
    assert "7 finished, 2 waiting" in out


def test_records_of_shared_runs_are_collected_too(run_cli: Any, in_folder: Path) -> None:
    (in_folder / "base.yaml.txt").touch()
    (in_folder / "one.yaml").write_text("grid: {config: [r1.yaml, r4.yaml], model.size: [1, 2]}")
    (in_folder / "two.yaml").write_text(
        "grid: {config: r8.yaml, model.size: [1, 2]}\nshared: [{sweep: one.yaml, only: [{config: r1.yaml}]}]"
    )
    one = Place(Path("runs"), "one")
    run = expand(files.load(Path("one.yaml")))[0]
    record = RunRecord.from_dict({**record_fields(), "run_name": one.name(run)})
    record.save(one.folder(run) / "version_0" / "checkpoints" / "step=000004.run.json")
    status, out = run_cli("sweep", "records", "two.yaml")
    assert status == 0 and "1 shared runs are not finished; the sweep one trains them" in out
    assert [p.name for p in (in_folder / "runs" / "two" / "records").iterdir()] == [f"{run.id}.run.json"]
    # Records kept elsewhere: those of the other sweep lie in the folder of its name.
    other = expand(files.load(Path("one.yaml")))[1]
    for kept in (run, other):
        RunRecord.from_dict({**record_fields(), "run_name": kept.id}).save(
            Path("elsewhere") / "one" / f"{kept.id}.run.json"
        )
    status, out = run_cli("sweep", "status", "two.yaml", "--out", "nowhere", "--records", "elsewhere/two")
    assert "shared" not in out
    status, out = run_cli("sweep", "records", "two.yaml", "--out", "nowhere", "--records", "elsewhere/two")
    assert {p.name for p in Path("elsewhere/two").iterdir()} == {f"{r.id}.run.json" for r in (run, other)}
