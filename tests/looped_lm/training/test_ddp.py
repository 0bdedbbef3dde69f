"""Two processes train as one does: losses, counts, checkpoints in both directions, shared orthogonalisation."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import looped_lm
from looped_lm.configuration.config_files import SHIPPED
from looped_lm.training.trainer_settings import processes_of_torchrun
from tests.support.cli_options import tiny_options
from tests.support.ddp_worker import ARCHITECTURES, ROWS, SEQ_LEN, STEPS, STOP, half_way, shipped, train
from tests.support.documents import Page
from tests.support.tiny import tokens

ROOT = Path(looped_lm.__file__).parent.parent


def environment(**more: Any) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **{k: str(v) for k, v in more.items()},
    }


def run_pair(*args: str) -> None:
    """Run tests.support.ddp_worker in two processes, told of each other as Lightning's launcher would tell them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "NODE_RANK": 0}
    command = [sys.executable, "-m", "tests.support.ddp_worker", *args]
    pair = [
        subprocess.Popen(
            command, env=environment(LOCAL_RANK=rank, **shared), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300)[0] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], "\n".join(outputs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_data_dir: Path) -> dict[str, Any]:
    """What one process saw (`one`, and `one resumed` from the pair's checkpoint) and both of the pair (`two`)."""
    folder = tmp_path_factory.mktemp("ddp")
    one = {name: train(name, folder / "one", tiny_data_dir) for name in ARCHITECTURES}
    run_pair(str(folder), str(tiny_data_dir))
    for name in ARCHITECTURES:
        resume = half_way(folder / "two", name)
        one[f"{name} resumed"] = train(name, folder / "back", tiny_data_dir, resume=resume)
    return {"one": one, "two": [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_losses_of_two_processes_equal_those_of_one(runs: dict[str, Any], name: str) -> None:
    """At the same global batch."""
    one, two = runs["one"][name]["losses"], runs["two"][0][name]["losses"]
    assert [step for step, _ in one] == list(range(1, STEPS + 1))
    assert one[-1][1] < one[0][1] - 0.1
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_run_goes_on_at_another_number_of_processes(runs: dict[str, Any], name: str) -> None:
    """Parameters, optimizer state and initial norms are the checkpoint's; the losses go on."""
    for seen in (runs["one"], *runs["two"]):
        resumed = seen[f"{name} resumed"]
        assert resumed["loaded"] == {"weights": 0.0, "state": 0.0, "norms": 0.0}
    whole = dict(runs["one"][name]["losses"])
    for seen in (runs["one"], runs["two"][0]):
        steps, losses = zip(*seen[f"{name} resumed"]["losses"], strict=True)
        assert list(steps) == list(range(STOP + 1, STEPS + 1))
        assert losses == pytest.approx([whole[step] for step in steps], rel=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_counts_are_those_of_all_processes(
    runs: dict[str, Any], name: str, tmp_path: Path, tiny_data_dir: Path
) -> None:
    """With micro-batches 8 x 1 and 2 x 4, and on two processes."""
    counts = [
        {k: seen[name][k] for k in ("steps", "tokens", "flops")} for seen in (runs["one"], *runs["two"])
    ]
    if name == "r4":
        in_four = train(name, tmp_path, tiny_data_dir, rows=ROWS // 4)
        counts.append({k: in_four[k] for k in counts[0]})
        whole = [loss for _, loss in runs["one"][name]["losses"]]
        assert [loss for _, loss in in_four["losses"]] == pytest.approx(whole, rel=1e-5)
    tokens = STEPS * ROWS * SEQ_LEN
    expected = {"steps": STEPS, "tokens": tokens, "flops": tokens * shipped(name).flops_per_token}
    assert counts == [pytest.approx(expected, rel=1e-12)] * len(counts)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_processes_share_the_orthogonalisation(runs: dict[str, Any], name: str) -> None:
    """As torch counts the products of each step; also without one of the gradients."""
    steps = list(zip(*(seen[f"{name} optimizer"]["flops"] for seen in runs["two"]), strict=True))
    assert len(steps) == 4
    for (first, whole), (second, also_whole) in steps:
        assert first + second == whole == also_whole > 0
        assert max(first, second) <= 0.6 * whole
    for seen in runs["two"]:
        assert seen[f"{name} optimizer"]["difference"] <= 1e-6


def test_processes_that_differ_in_their_gradients_are_stopped(runs: dict[str, Any]) -> None:
    for seen in runs["two"]:
        assert "differ in which parameters have a gradient" in seen["missing"]


@pytest.mark.parametrize("config", sorted(p.stem for p in SHIPPED.glob("r*.yaml")))
def test_every_parameter_of_a_shipped_config_gets_a_gradient(config: str) -> None:
    """DDP runs without find_unused_parameters."""
    lm = shipped(config)
    lm.loss(tokens(2)).backward()
    assert not [name for name, p in lm.named_parameters() if p.grad is None]


@pytest.mark.slow
def test_torchrun_alone_says_how_many_processes(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    """The page's command: the same run as one process's, in one folder, with every file written once."""
    commands = Page.at("docs/devices-and-speed.md").commands()
    ((*launcher, fit, flag, config, rows, four),) = [words for words in commands if words[0] == "torchrun"]
    assert (fit, flag, rows, four) == ("fit", "--config", "--data.batch_size", "4") and launcher[-2:] == [
        "-m",
        "looped_lm",
    ]
    options = [fit, flag, config, *tiny_options(tiny_data_dir), "--model.batch_tokens=64"]
    status, out = run_cli(*options, "--run_name=one")
    assert status == 0, out
    torchrun = [sys.executable, "-m", "torch.distributed.run", *launcher[1:]]
    command = [*torchrun, *options, "--run_name=two"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr

    def files(name: str) -> list[str]:
        folder = in_folder / "runs" / name
        found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        return [name.split(".tfevents.")[0] for name in found]

    assert files("one") == files("two")
    one, two = (
        json.loads(next((in_folder / "runs" / n).rglob("*.run.json")).read_text()) for n in ("one", "two")
    )
    assert (one["world_size"], two["world_size"]) == (1, 2)
    for key in ("steps", "tokens", "training_flops", "val_tokens", "val_step", "status"):
        assert one[key] == two[key], key
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)


def test_what_a_run_says_of_its_processes_is_not_overridden() -> None:
    two_nodes = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
    assert processes_of_torchrun(1, 1, two_nodes) == processes_of_torchrun("auto", 1, two_nodes) == (4, 2)
    assert processes_of_torchrun(2, 1, two_nodes) == (2, 1), "Lightning refuses it, naming both numbers"
    assert processes_of_torchrun("auto", 1, {}) == ("auto", 1)
