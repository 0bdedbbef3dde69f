"""The promise: one class in a file of one's own, named by class path, and everything else follows.

Each class of `tests.support.own_components`, and the law below, is a whole extension. They are trained or fitted,
counted, grouped and recorded without touching the project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fitting
import looped_lm
from fitting import Inputs, Law, fit, load_grid
from looped_lm import LoopedLM
from looped_lm.seams import SEAMS
from tests.support.cli_options import tiny_options
from tests.support.own_components import GatedInjection, MeanLane, SignDescent

OWN = GatedInjection.__module__
D = 64
#: Parameters of a layer, and the FLOPs per token of its attention over 16 tokens.
LAYER, ATTENTION = 12 * D**2 + 2 * D, 4 * D * 16
#: FLOPs per token around the loop of the layout 2-4-2: prelude, coda and head, forward and backward.
AROUND = 3 * (2 * 4 * LAYER + 4 * ATTENTION + 2 * D * 320)
GRID = Path(fitting.__file__).parent / "published" / "iso_depth_grid.csv"


Components = Mapping[str, tuple[str, dict[str, Any]]]
TOGETHER: Components = {
    "injection": ("GatedInjection", {"gate": 0.5}),
    "lanes": ("MeanLane", {"weight": 0.25}),
    "bptt": ("LastRecurrence", {}),
    "optimizer": ("SignDescent", {"scale": 2.0}),
}
OTHERS: Components = {
    "layer": ("CarryingLayer", {"share": 0.2}),
    "objective": ("GatedLosses", {"bonus": 0.2}),
    "residual": ("LayerScale", {"start": 0.2}),
    "recurrences": ("Counts", {"counts": [2, 4]}),
}


def trained(run_cli: Any, folder: Path, data: Path, own: Components) -> dict[str, Any]:
    """The record of two steps with these components, which it must name with their arguments."""
    options = [*tiny_options(data, steps=2), "--model.layer_in_block_only=true"]
    for key, (name, init_args) in own.items():
        options.append(f"--model.{key}={OWN}.{name}")
        options += [f"--model.{key}.{k}={v}" for k, v in init_args.items()]
    status, out = run_cli("fit", "--config", "r4.yaml", *options)
    assert status == 0, out
    (path,) = folder.glob("runs/r4/version_0/checkpoints/*.run.json")
    record: dict[str, Any] = json.loads(path.read_text())
    for key, (name, init_args) in own.items():
        spec = record["components"][key]
        assert spec["class_path"] == f"{OWN}.{name}"
        assert {k: spec["init_args"][k] for k in init_args} == init_args
    return record


def test_every_axis_has_a_component_of_ones_own() -> None:
    assert {*SEAMS, "optimizer"} == {*TOGETHER, *OTHERS}


def test_a_layer_a_residual_an_objective_and_a_sampler_of_ones_own_train_by_class_path(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path
) -> None:
    record = trained(run_cli, in_folder, tiny_data_dir, OTHERS)
    # Four layers of two branches, a matrix and a gain for each branch, and the layer's share.
    block = 4 * (LAYER + 2 * (D * D + D) + D)
    assert record["parameters"]["block"] == block
    # A step of 2 recurrences and one of 4, all with gradients: 3 each on average.
    recurrence = 2 * block + 4 * ATTENTION + 2 * (2 * D * D)
    # The objective reads two states, through coda, head and its gate.
    reading = 3 * (2 * 2 * LAYER + 2 * ATTENTION + 2 * D * 320)
    assert record["flops_per_token"] == AROUND + reading + 3 * 2 * 2 * D + 3 * 3 * recurrence
    assert record["parameters"]["norms"] == 3 * D + D


def test_components_of_ones_own_train_by_class_path(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path
) -> None:
    record = trained(run_cli, in_folder, tiny_data_dir, TOGETHER)
    assert record["parameters"]["injection"] == D * D + D and record["parameters"]["lanes"] == 1

    # r = 4, one recurrence with gradients: 6 + 3·2 FLOPs per parameter of the block.
    recurrence = 2 * 4 * LAYER + 4 * ATTENTION + 2 * (D * D + D)
    assert record["flops_per_token"] == AROUND + (3 + 3) * recurrence

    (checkpoint,) = in_folder.glob("runs/r4/version_0/checkpoints/*.ckpt")
    lm = LoopedLM.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    assert isinstance(lm.model.injection, GatedInjection) and isinstance(lm.model.lanes, MeanLane)
    optimizer = lm.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, SignDescent) and optimizer.defaults["scale"] == 2.0
    groups = {g["role"]: g["param_names"] for g in optimizer.param_groups}
    assert "injection.proj.weight" in groups["matrix"] and "injection.gate" in groups["norm"]
    assert groups["lanes"] == ["lanes.weight"], "lanes have their group whatever their shape"


def test_the_weights_moved(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    status, out = run_cli(
        "fit", "--config", "r4.yaml", *tiny_options(tiny_data_dir, steps=1),
        f"--model.injection={OWN}.GatedInjection",
    )  # fmt: skip
    assert status == 0, out
    (checkpoint,) = in_folder.glob("runs/r4/version_0/checkpoints/*.ckpt")
    gate = torch.load(checkpoint, weights_only=True)["state_dict"]["model.injection.gate"]
    assert bool((gate != 1.0).all())


FAULTY = """from looped_lm import AdditiveInjection


class BrokenConstructor(AdditiveInjection):
    def __init__(self, d_model):
        super().__init__(d_model)
        self.width = len(d_model)


class BrokenForward(AdditiveInjection):
    def forward(self, e, s, i):
        raise ValueError("the state is upside down")


class NoSizes(AdditiveInjection):
    def __init__(self):
        super().__init__(64)
"""


@pytest.mark.parametrize(
    "name, line, method, says",
    [
        ("BrokenConstructor", 7, "__init__", "TypeError: object of type 'int' has no len()"),
        ("BrokenForward", 12, "forward", "ValueError: the state is upside down"),
    ],
)
def test_a_fault_in_a_component_of_ones_own_shows_at_its_line(
    in_folder: Path, tiny_data_dir: Path, name: str, line: int, method: str, says: str
) -> None:
    (in_folder / "own.py").write_text(FAULTY)
    command = [
        sys.executable,
        "-m",
        "looped_lm",
        "fit",
        "--config",
        "r4.yaml",
        f"--model.injection=own.{name}",
    ]
    command += [*tiny_options(tiny_data_dir), "--trainer.fast_dev_run=true"]
    path = os.pathsep.join([str(in_folder), str(Path(looped_lm.__file__).parents[1])])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 1
    assert f'own.py", line {line}, in {method}' in done.stderr and says in done.stderr


def test_a_constructor_that_takes_no_sizes_is_one_message(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_folder / "own.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(in_folder)
    status, out = run_cli(
        "fit", "--config", "r4.yaml", *tiny_options(tiny_data_dir), "--model.injection=own.NoSizes"
    )
    assert status == 1 and "Traceback" not in out
    assert "error: The injection NoSizes() cannot be built from (d_model=64): too many positional" in out


class DataLaw(Law):
    """L = E + B·D^-beta: a law that looks at the tokens alone."""

    name = "data"
    param_names = ("B", "beta", "E")
    bounds = np.array([[-5.0, 35.0], [0.0, 2.5], [-3.0, 2.0]])
    log_parameters = frozenset({"B", "E"})

    def predict(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        b, beta, e = theta[:, :1], theta[:, 1:2], theta[:, 2:]
        return np.exp(e) + np.exp(b - beta * x.log_tokens)

    def gradient(self, theta: np.ndarray, x: Inputs) -> np.ndarray:
        b, beta, e = theta[:, :1], theta[:, 1:2], theta[:, 2:]
        data = np.exp(b - beta * x.log_tokens)
        return np.stack((data, -data * x.log_tokens, np.broadcast_to(np.exp(e), data.shape)), axis=1)


def test_a_law_of_ones_own_fits_by_instance_and_by_class_path(capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(load_grid(), DataLaw(), starts=20, seed=0)
    assert set(result.parameters) == {"B", "beta", "E"} and 0 < result.r_squared < 1

    from fitting.__main__ import main

    status = main(["fit", str(GRID), "--law", f"{__name__}.DataLaw", "--starts", "20"])
    assert f"{result.parameters['beta']:.4f}"[:6] in capsys.readouterr().out
    assert status in (0, 1)
