"""The plan command against the run it describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from looped_lm import MuonH
from looped_lm.commands.plan import processes
from looped_lm.training.memory import estimate, saved_bytes, state_floats
from tests.support.cli_options import tiny_options
from tests.support.tiny import SEQ_LEN, tiny_model, tokens


def read(out: str) -> dict[str, str]:
    pairs = (line.rsplit("  ", 1) for line in out.splitlines() if "  " in line.strip())
    return {name.strip(): value.strip() for name, value in pairs}


def test_the_plan_is_the_run(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    options = ["--config", "r8_hc.yaml", *tiny_options(tiny_data_dir)]
    status, out = run_cli("plan", *options)
    assert status == 0, out
    assert not list(in_folder.iterdir()), "a plan writes nothing"
    plan = read(out)
    status, out = run_cli("fit", *options)
    assert status == 0, out
    record = json.loads(next(in_folder.rglob("*.run.json")).read_text())
    for section, count in record["parameters"].items():
        assert plan[f"parameters: {section}"] == f"{count:,}"
    assert plan["N_once"] == f"{record['n_once']:,}" and plan["N_rec"] == f"{record['n_rec']:,}"
    assert float(plan["FLOPs/token (paper)"]) == pytest.approx(record["flops_per_token"], rel=1e-6)
    assert float(plan["FLOPs/token (causal)"]) < float(plan["FLOPs/token (paper)"])
    assert plan["optimizer steps"] == str(record["steps"])
    assert plan["tokens"].startswith(f"{record['tokens']:,} ")
    assert {
        "learning rate: matrix",
        "learning rate: lanes",
        "memory per process (estimate, fp32 throughout)",
    } <= set(plan)


def test_the_memory_kept_for_backward_is_what_training_keeps() -> None:
    """Against the unique storages that a real forward saves on the CPU, head and loss included."""
    real = tiny_model(seq_len=64)
    inputs, targets = tokens(4, 64)
    weights = {p.untyped_storage().data_ptr() for p in real.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            kept.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        real(inputs, targets)
    actual = sum(t.untyped_storage().nbytes() for t in kept.values())
    with torch.device("meta"):
        planned = saved_bytes(tiny_model(seq_len=64), 4, 64)
    assert planned == pytest.approx(actual, rel=0.15)


def test_optimizer_memory_follows_the_roles() -> None:
    with torch.device("meta"):
        model = tiny_model()
    memory = estimate(model, 2, SEQ_LEN)
    n = sum(p.numel() for p in model.parameters())
    matrices = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and name.split(".")[0] not in ("embedding", "head")
    )
    assert memory.weights == memory.gradients == 4 * n
    assert memory.optimizer == 4 * (matrices + 2 * (n - matrices))
    assert memory.total == memory.weights + memory.gradients + memory.optimizer + memory.activations


def test_state_per_parameter_is_the_optimizers_own() -> None:
    assert state_floats(MuonH, "matrix") == 1 and state_floats(MuonH, "norm") == 2
    assert state_floats(torch.optim.AdamW, "matrix") == 2 and state_floats(torch.optim.SGD, "matrix") == 0


@pytest.mark.parametrize(
    "devices, nodes, count",
    [("auto", 1, 1), (4, 1, 4), ("2", 3, 6), ([0, 2], 1, 2), ("0,1", 1, 2), (-1, 1, 1)],
)
def test_processes(devices: Any, nodes: int, count: int) -> None:
    assert processes(devices, nodes) == count


def test_a_batch_that_does_not_divide_is_refused(run_cli: Any, tiny_data_dir: Path) -> None:
    status, out = run_cli("plan", *tiny_options(tiny_data_dir), "--model.batch_tokens=100")
    assert status == 1 and "100 is not a multiple of one micro-batch: 2 rows x 16 tokens" in out
