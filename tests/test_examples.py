"""The stories of `examples/` are run: cheap commands at once, the whole of them, at tiny scale, in the slow tests."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fitting.data.runs import Runs
from fitting.published import load_grid
from fitting.records import RunRecord
from looped_lm.sweeps import files, slurm
from looped_lm.sweeps.expansion import expand
from looped_lm.sweeps.place import Place, State
from tests.support.reference import checkpoint as reference
from tests.support.run_records import record_fields
from tests.support.slurm_cluster import Cluster, program
from tests.support.story import EXAMPLES, ROOT, Story, missing, tiny_scale

QUICK = ["--starts", "60", "--bootstrap", "40", "--workers", "1"]


@pytest.fixture
def story(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Story]:
    def copied(name: str) -> Story:
        monkeypatch.syspath_prepend(str(in_folder))
        for module in ("low_rank_injection", "test_low_rank_injection"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        return Story(name, in_folder)

    return copied


@pytest.fixture
def fitting(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run `python -m fitting` in this process; exit status and all it printed."""

    def run(words: list[str], *options: str) -> tuple[int, str]:
        from fitting.__main__ import main

        assert words[:3] == ["python", "-m", "fitting"]
        capfd.readouterr()
        status = main([*words[3:], *options])
        return status, "".join(capfd.readouterr())

    return run


def loss(runs: Runs, phi: float, noise: int) -> np.ndarray:
    """The joint law with constants near those of the published grid, and 0.2% of noise from a seed."""
    size = runs.n_once + runs.r**phi * runs.n_rec
    law = 1.9 + 90 * size**-0.285 + 6900 * runs.tokens**-0.478
    return law * np.exp(0.002 * np.random.default_rng(noise).standard_normal(len(runs)))


def save_records(
    runs: Runs, losses: np.ndarray, folder: Path, components: dict[str, Any], **changes: Any
) -> None:
    """Records of runs as training would leave them; those of r = 1 without injection."""
    for i, val_loss in enumerate(losses):
        tokens, d, r = round(float(runs.tokens[i])), int(runs.d_model[i]), int(runs.r[i])
        layers = (0, 20, 0) if r == 1 else (2, 16 // r, 2)
        spent = tokens * float(runs.flops_per_token[i])
        RunRecord.from_dict(
            record_fields(
                run_name=f"{i}", d_model=d, num_recurrences=r, prelude_layers=layers[0], recurrent_layers=layers[1],
                coda_layers=layers[2], components=components, parameters={"injection": int(runs.n_injection[i])},
                n_once=int(runs.n_once[i]), n_rec=int(runs.n_rec[i]), tokens=tokens, tokens_target=float(tokens),
                flops_per_token=float(runs.flops_per_token[i]), training_flops=spent,
                flops_budget=float(runs.budget[i]), val_loss=float(val_loss),
            )
            | changes
        ).save(folder / f"r{r}-d{d}-{runs.budget[i]:.3g}-{len(list(folder.glob('*')))}.run.json")  # fmt: skip


LINEAR = {
    "injection": {"class_path": "looped_lm.LinearInjection", "init_args": {}},
    "lanes": {"class_path": "looped_lm.SingleLane", "init_args": {}},
    "bptt": {"class_path": "looped_lm.FullBPTT", "init_args": {}},
}
LOW_RANK = LINEAR | {
    "injection": {"class_path": "low_rank_injection.LowRankInjection", "init_args": {"share": 4}}
}


# ---- All of them ----------------------------------------------------------------------------------------------------


def test_stories_are_linked_and_their_links_and_files_exist() -> None:
    named = set(re.findall(r"\]\(examples/(\w+)/README.md\)", (ROOT / "README.md").read_text()))
    assert named == {path.name for path in EXAMPLES.iterdir()}
    for name in named:
        text = (EXAMPLES / name / "README.md").read_text()
        links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
        assert not [link for link in links if not (EXAMPLES / name / link).exists()]
        beside = {path.name for path in (EXAMPLES / name).iterdir()} - {"README.md", "__pycache__"}
        assert beside == {link for link in links if "/" not in link}, "every file is spoken of"


# ---- A new injection ------------------------------------------------------------------------------------------------


def test_the_new_injection_conforms(story: Callable[[str], Story]) -> None:
    folder = story("new_injection").folder
    (mark,) = runpy.run_path(str(folder / "test_low_rank_injection.py"))["test_low_rank_injection"].pytestmark
    for check in mark.args[1]:
        if str(check) not in ("ddp", "compiled"):  # A minute more; the slow test has them.
            check()


def test_the_bottleneck_is_what_the_story_says(story: Callable[[str], Story]) -> None:
    story("new_injection")
    from low_rank_injection import LowRankInjection

    from looped_lm import LinearInjection

    made = LowRankInjection(64)
    e, s = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    expected = s + e @ made.down.weight.T @ made.up.weight.T
    torch.testing.assert_close(made(e, s, 3), expected)
    assert LinearInjection(64).flops_per_token() == 4 * 64**2 == 4 * made.flops_per_token()
    with pytest.raises(ValueError, match="share is 65"):
        LowRankInjection(64, share=65)


def test_the_grid_of_the_new_injection_is_planned(
    story: Callable[[str], Story], run_cli: Any, fitting: Callable[..., tuple[int, str]]
) -> None:
    found = story("new_injection")
    for file in ("baseline.yaml", "low_rank.yaml"):
        sizes = "{by: model.horizon.flops, 1e11: [0.5], 2e11: [0.5, 1]}"
        found.set_axes(file, flops="[1e11, 2e11]", size=sizes)
    (plan,) = found.commands("--csv design.csv")
    status, out = run_cli(*plan[3:])
    assert status == 0 and "6 runs" in out and "Shared, trained by the sweep baseline: 3 runs" in out, out
    status, out = fitting(found.shown("design.csv")[0], "--workers", "1")
    assert "15 runs in 10 cells" in out and "half-width of delta_phi" in out, out


def test_delta_phi_of_the_story_is_found_in_records_that_hold_one(
    story: Callable[[str], Story], fitting: Callable[..., tuple[int, str]]
) -> None:
    """Its last commands, on records of the paper's design with a change of phi put in."""
    found = story("new_injection")
    grid = load_grid().where("budget<=4.64e18")
    fewer = np.where(grid.r > 1, 1.5 * grid.d_model**2, 0)
    variant = type(grid)(
        **vars_of(grid) | {"n_rec": grid.n_rec - fewer, "n_injection": grid.n_injection - fewer}
    )
    save_records(grid, loss(grid, 0.45, 0), found.folder / "runs/baseline/records", LINEAR)
    losses = np.where(grid.r > 1, loss(variant, 0.6, 1), loss(grid, 0.45, 0))
    save_records(variant, losses, found.folder / "runs/low_rank/records", LOW_RANK)
    fit, compare = found.commands("python -m fitting")
    status, out = fitting(fit, *QUICK)
    assert status == 0 and "Status: ok" in out, out
    status, out = fitting(compare, *QUICK, "--json")
    assert status == 0, out
    told = json.loads(out)
    (paired,) = [one for one in told["estimates"] if one["method"] == "paired"]
    assert paired["delta_phi"] == pytest.approx(0.15, abs=0.03) and told["preferred"] == "delta phi"
    assert paired["intervals"][0]["low"] < 0.15 < paired["intervals"][0]["high"]


def vars_of(runs: Runs) -> dict[str, Any]:
    return {name: value for name, value in vars(runs).items() if name in type(runs).__dataclass_fields__}


@pytest.mark.slow
def test_the_story_of_the_new_injection(story: Callable[[str], Story], tiny_data_dir: Path) -> None:
    """Every command; the sweeps with tiny runs, so the fit may be anything but silent."""
    found = story("new_injection")
    assert "15 passed" in found.bash(found.block("pytest"))
    assert "(completed)" in found.bash(found.block("r4_low_rank.yaml"))
    assert "24 runs" in found.bash(found.block("sweep plan"))
    command, lines = found.shown("design.csv")
    out = found.bash(" ".join(command))
    assert not missing(lines, out), out
    (found.folder / "scale.yaml").write_text(tiny_scale(tiny_data_dir))
    for file in ("baseline.yaml", "low_rank.yaml"):
        sizes = "{by: model.horizon.flops, 2e8: [0.25, 0.5], 4e8: [0.25, 0.5, 0.75], 8e8: [0.25, 0.5, 0.75]}"
        found.set_axes(file, flops="[2e8, 4e8, 8e8]", size=sizes)
    out = found.bash(found.block("sweep run"))
    assert "16 of 16 runs are finished" in out and "16 runs: 16 finished" in out, out
    assert len(list((found.folder / "runs/low_rank/records").iterdir())) == 24
    for command in found.commands("python -m fitting"):
        out = found.bash(f"{' '.join(command)} || test $? = 1")
        print(out)
        wanted = r"Status: [a-z]" if command[3] == "fit" else r"paired +\S+ +\S+ +[+-][\d.]+(.|\n)*Verdict: "
        assert re.search(wanted, out), out


# ---- Somebody else's runs -------------------------------------------------------------------------------------------


def test_a_table_that_was_sent_is_fitted_and_verified(
    story: Callable[[str], Story], fitting: Callable[..., tuple[int, str]]
) -> None:
    found = story("someone_elses_runs")

    def same_as_shown(part: str, wanted: int) -> None:
        words, lines = found.shown(part)
        status, out = fitting(words)
        assert status == wanted and not missing(lines, out), out

    same_as_shown("as_sent.csv", 2)
    found.bash(found.block("sed "))
    same_as_shown("--report report", 0)
    same_as_shown("d_model=640", 1)
    same_as_shown("verify", 0)


def test_a_folder_of_records_is_fitted_and_what_is_left_out_is_listed(
    story: Callable[[str], Story], fitting: Callable[..., tuple[int, str]]
) -> None:
    found = story("someone_elses_runs")
    grid = load_grid().where("budget<=2.15e18")
    folder = found.folder / "their_runs"
    save_records(grid, loss(grid, 0.45, 0), folder / "main", LINEAR)
    one = grid.where("r=4").take(np.array([0]))
    stopped = {"status": "stopped", "stop_reason": "the disk was full", "seed": 2}
    save_records(one, loss(one, 0.45, 1), folder / "main", LINEAR, **stopped)
    lanes = {"class_path": "looped_lm.HyperConnectionLanes", "init_args": {"num_lanes": 2}}
    passthrough = {"class_path": "looped_lm.PassthroughInjection", "init_args": {}}
    hyper = LINEAR | {"injection": passthrough, "lanes": lanes}
    save_records(one, loss(one, 0.6, 1), folder / "lanes", hyper)
    cut = {"class_path": "looped_lm.TruncatedBPTT", "init_args": {}}
    save_records(one, loss(one, 0.4, 1), folder / "truncated", LINEAR | {"bptt": cut})
    status, out = fitting(["python", "-m", "fitting", "fit", "their_runs", *QUICK])
    assert status == 2 and "--where 'injection!=linear'" in out, out
    fit, verify = found.commands("their_report")
    status, out = fitting(fit, *QUICK)
    assert status == 0 and f"{len(grid)} runs" in out, out
    for word in ("the disk was full", "injection!=hyperconnections", "bptt=full"):
        assert word in out
    assert (
        abs(
            json.loads((found.folder / "their_report/fit.json").read_text())["fit"]["parameters"]["phi"]
            - 0.45
        )
        < 0.05
    )
    status, out = fitting(verify)
    assert status == 0 and "all the same" in out, out


def test_a_loss_is_measured_for_a_checkpoint_of_the_authors(
    story: Callable[[str], Story], run_cli: Any, tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = story("someone_elses_runs")
    config = reference.model_config("inject_init_prelude", vocab_size=257)
    files_, weights = reference.tensors(config)
    reference.write(found.folder / "theirs/r4_s12", config, files_)
    os.symlink(tiny_data_dir, found.folder / "my_data")
    convert, measure = found.commands("converted/")
    status, out = run_cli(*convert[3:])
    assert status == 0, out
    monkeypatch.setattr(sys, "argv", measure[1:])
    runpy.run_path(measure[1], run_name="__main__")
    record = RunRecord.load(found.folder / "their_records/r4_s12.run.json")
    assert record.finished and record.num_recurrences == 3 and record.tokenizer == "bytes"

    from datamodules import TokenDataModule

    data = TokenDataModule(data_dir=tiny_data_dir, seq_len=16, batch_size=64)
    data.prepare_data()
    data.setup()
    inputs, targets = next(iter(data.val_dataloader()))
    logits = reference.logits(config, weights, inputs)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert record.val_tokens == targets.numel() and record.val_loss == pytest.approx(
        float(expected), abs=1e-4
    )
    with pytest.raises(SystemExit, match="nothing is overwritten"):
        runpy.run_path(measure[1], run_name="__main__")


# ---- A grid on SLURM ------------------------------------------------------------------------------------------------


def test_the_grid_is_planned_and_submitted_with_the_profile(
    story: Callable[[str], Story], run_cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for SLURM's programs, and fewer runs."""
    found = story("slurm_grid")
    programs = found.folder / "bin"
    programs.mkdir()
    program(programs, "srun", "exit 0")
    program(programs, "sbatch", f'cp "$1" {found.folder}/script.sh; echo Submitted batch job 77')
    program(programs, "squeue", "printf '77_0\\n77_1\\n'")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert len(expand(files.load(Path("grid.yaml")))) == 12
    found.set_axes("grid.yaml", flops="[4.64e17]", size="[8]", config="[r1.yaml, r8_truncated.yaml]")
    status, out = run_cli(*found.shown("sweep plan")[0][3:])
    assert status == 0 and "device hours" in out and "hours" in out.splitlines()[0], out
    submit, status_command = found.commands("grid.yaml")[:2]
    status, out = run_cli(*submit[3:])
    assert status == 0 and "Submitted 2 runs" in out, out
    script = (found.folder / "script.sh").read_text()
    for option in (
        "array=0-1%2", "partition=gpu", "account=my_project", "gpus-per-node=1", "cpus-per-task=8", "mem=64GB",
        "time=240", "requeue", "signal=USR2@300", "open-mode=append",
    ):  # fmt: skip
        assert f"#SBATCH --{option}\n" in script, script
    assert "module load cuda" in script
    status, out = run_cli(*status_command[3:])
    assert status == 0 and "2 queued" in out, out


@pytest.mark.slow
def test_the_story_of_the_grid_on_slurm(
    cluster: Cluster, story: Callable[[str], Story], tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command on a real cluster: all tasks fail without their data, are mended, and one of them is preempted."""
    found = story("slurm_grid")
    command, lines = found.shown("sweep plan")
    out = found.bash(" ".join(f'"{word}"' for word in command))
    assert not missing(lines, out), out
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    (found.folder / "profile.yaml").write_text(
        "time: 30\ncpus: 1\nat_once: 2\nsignal_seconds: 60\nsetup: [export OMP_NUM_THREADS=1]\n"
    )
    # Beside the sweep file, so it goes before the shipped one.
    tiny = tiny_scale(Path("my_data")).replace("seq_len: 16", "seq_len: 16\n    vocab_size: 257")
    (found.folder / "paper.yaml").write_text(tiny)
    found.set_axes("grid.yaml", flops="[1e9, 2e9, 3e10]", size="[1]")
    place = Place(found.folder / "runs", "grid")
    runs = expand(files.load(found.folder / "grid.yaml"))
    out = found.bash(found.block("sweep run"))
    assert "Submitted 9 runs" in out, out

    def states() -> list[State]:
        return [place.status(run).state for run in runs]

    cluster.wait_for(lambda: states() == [State.FAILED] * 9, "the failure of all tasks", seconds=1200)
    os.symlink(tiny_data_dir, found.folder / "my_data")
    assert "Submitted" not in found.bash(found.block("sweep run")), "what failed waits for a retry"
    out = found.bash(found.block("sweep retry"))
    assert "my_data" in out and "Submitted 9 runs" in out, out
    last = runs[-1]
    job = slurm.queued(place, [last])[last.hash]

    def preempted() -> bool:
        if "is requeued" in place.log(last).read_text():
            return True
        assert not place.finished(last), "too short a run to preempt"
        if list(place.folder(last).rglob("events.out.tfevents*")):
            with suppress(RuntimeError):
                cluster.call("scancel", "--signal=USR2", job)
        return False

    cluster.wait_for(preempted, "the preemption", seconds=1200)
    cluster.wait_for(lambda: states() == [State.FINISHED] * 9, "the end of all runs", seconds=2400)
    assert "Resuming from" in place.log(last).read_text() or place.status(last).attempts > 2
    collect, fit = found.block("sweep records").splitlines()
    assert "9 of 9 runs are finished" in found.bash(collect)
    out = found.bash(f"{fit} || test $? = 1")
    print(out)
    assert re.search(r"Status: [a-z]", out) and re.search(r"(?m)^ +phi +-?[\d.]+", out), out
