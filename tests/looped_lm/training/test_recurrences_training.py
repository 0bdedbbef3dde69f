"""Runs whose recurrences are drawn for every step: what they cost, and that nothing but seed and step decides them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks import FinalValidation, FlopsMonitor, LoopStats, RunRecordWriter
from fitting import load_runs
from fitting.records import RunRecord
from looped_lm import FlopsBudget, LogNormalPoisson, LoopedLM, Steps, TruncatedBPTT
from looped_lm.loop.recurrences import drawn
from looped_lm.model.accounting import mean_flops_per_token
from tests.support.cli_options import tiny_options
from tests.support.own_components import Counts
from tests.support.recording_logger import RecordingLogger
from tests.support.reference import accounting as closed
from tests.support.tiny import (
    SEQ_LEN,
    RandomRows,
    TinyData,
    perturb,
    tiny_lm,
    tiny_model,
    tiny_trainer,
    tokens,
)

BATCH = 8 * SEQ_LEN


def flops(r: int, window: int | None = None) -> int:
    """Training FLOPs per token of the tiny model with r recurrences, by the closed form."""
    return closed.flops_per_token(
        64, r, (1, 1, 1), "linear", window=window, vocab_padded=64, sequence_length=SEQ_LEN
    )


def watched(lm: LoopedLM) -> list[int]:
    """The counts of recurrences that the block really runs in training, one for every micro-batch from now on."""
    seen: list[int] = []
    layer = lm.model.block[0]
    original = LoopedLM.training_step

    def step(batch: Any, batch_idx: int) -> Any:
        before = calls[0]
        loss = original(lm, batch, batch_idx)
        seen.append(calls[0] - before)
        return loss

    calls = [0]
    layer.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    lm.training_step = step  # type: ignore[method-assign]
    return seen


def fit(folder: Path, lm: LoopedLM, batch_size: int = 8, **trainer: Any) -> tuple[FlopsMonitor, list[int]]:
    monitor, seen = FlopsMonitor(), watched(lm)
    save = ModelCheckpoint(folder, filename="{step}")
    callbacks = [monitor, FinalValidation(), LoopStats(), RunRecordWriter(), save]
    ckpt_path = trainer.pop("ckpt_path", None)
    t = tiny_trainer(folder, callbacks, enable_checkpointing=True, **trainer)
    t.fit(lm, datamodule=TinyData(batch_size), ckpt_path=ckpt_path)
    return monitor, seen


@pytest.mark.parametrize("batch_size", [8, 2])
def test_the_flops_are_those_of_the_counts_drawn(tmp_path: Path, batch_size: int) -> None:
    """By hand, in the run, in its plan and in its record; micro-batches of 8 x 1 and 2 x 4 cost the same."""
    lm = tiny_lm(recurrences=partial(Counts, counts=[1, 3, 5, 2]), bptt=TruncatedBPTT(2))
    logger = RecordingLogger()
    monitor, seen = fit(tmp_path, lm, batch_size, logger=logger)
    assert seen == [r for r in (1, 3, 5, 2) for _ in range(8 // batch_size)]
    steps = [BATCH * flops(r, window=2) for r in (1, 3, 5, 2)]
    assert monitor.tokens == 4 * BATCH and monitor.flops == pytest.approx(sum(steps), rel=1e-12)
    assert lm.flops_per_token == pytest.approx(sum(steps) / (4 * BATCH), rel=1e-12)
    assert [v for _, v in logger.series("cost/flops")] == pytest.approx(
        [sum(steps[:n]) for n in (1, 2, 3, 4)]
    )
    assert logger.series("train/recurrences") == [(1, 1.0), (2, 3.0), (3, 5.0), (4, 2.0)]
    assert [s for s, _ in logger.series("loop/state_norm_4")] == [3], "as many rows as recurrences ran"
    record = RunRecord.load(tmp_path / "step=4.run.json")
    assert (record.status, record.num_recurrences) == ("completed", 2)
    assert record.training_flops == pytest.approx(sum(steps), rel=1e-12)
    assert record.components["recurrences"]["init_args"] == {"counts": [1, 3, 5, 2]}
    runs = load_runs(tmp_path)
    assert list(runs.bptt) == ["TruncatedBPTT(window=2)+Counts(counts=[1, 3, 5, 2])"]
    assert runs.training_flops[0] == pytest.approx(sum(steps))


def test_validation_runs_the_models_own_count(tmp_path: Path) -> None:
    lm = tiny_lm(recurrences=partial(Counts, counts=[1, 1, 1, 5]))
    perturb(lm)
    fit(tmp_path, lm)
    record = RunRecord.load(tmp_path / "step=4.run.json")
    pairs = list(RandomRows(SEQ_LEN, 12))
    rows = torch.stack([inputs for inputs, _ in pairs]), torch.stack([targets for _, targets in pairs])
    with torch.no_grad():
        assert record.val_loss == pytest.approx(float(lm.model(*rows, num_recurrences=2)), rel=1e-6)
        assert record.val_loss != pytest.approx(float(lm.model(*rows, num_recurrences=5)), rel=1e-6)


@pytest.mark.parametrize("budget", [1e9, 2.3e9, 7.77e9])
def test_a_flops_budget_takes_the_steps_whose_sum_comes_nearest(tmp_path: Path, budget: float) -> None:
    sampler = LogNormalPoisson(4, seed=5)
    costs = [BATCH * flops(sampler.sample(t)) for t in range(100)]
    sums = [sum(costs[:n]) for n in range(101)]
    nearest = min(range(101), key=lambda n: abs(sums[n] - budget))
    overrides = dict(num_recurrences=4, recurrences=partial(LogNormalPoisson, seed=5))
    lm = tiny_lm(horizon=FlopsBudget(budget), **overrides)
    assert lm.plan.steps == nearest >= 2
    assert lm.drawn == drawn(sampler, nearest)
    monitor, _ = fit(tmp_path, lm)
    record = RunRecord.load(tmp_path / f"step={nearest}.run.json")
    assert record.status == "completed" and record.training_flops == pytest.approx(sums[nearest], rel=1e-9)
    assert record.flops_per_token * record.tokens == pytest.approx(sums[nearest], rel=1e-9)


def test_a_budget_of_less_than_half_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="less than one optimizer step"):
        tiny_lm(horizon=FlopsBudget(1e6), num_recurrences=4, recurrences=LogNormalPoisson)


def test_a_resumed_run_draws_what_the_uninterrupted_one_does(tmp_path: Path) -> None:
    arguments: dict[str, Any] = dict(
        num_recurrences=4, recurrences=partial(LogNormalPoisson, seed=2), horizon=Steps(6)
    )
    whole, first, second = (tiny_lm(**arguments) for _ in range(3))
    monitor, expected = fit(tmp_path / "whole", whole)
    _, before = fit(tmp_path / "first", first, max_steps=3)
    torch.manual_seed(99)
    resumed, after = fit(tmp_path / "second", second, 2, ckpt_path=tmp_path / "first" / "step=3.ckpt")
    assert before + after[::4] == expected and len(set(expected)) > 2
    assert (resumed.tokens, resumed.flops) == (monitor.tokens, pytest.approx(monitor.flops, rel=1e-12))


def test_another_process_draws_the_same() -> None:
    """As every rank does, whatever its hash seed and random state."""
    code = "from looped_lm import LogNormalPoisson as L; s = L(8, seed=3); print([s.sample(t) for t in range(40)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [LogNormalPoisson(8, seed=3).sample(t) for t in range(40)]


@pytest.mark.slow
def test_two_ranks_draw_the_same(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    options = ["--config", "r8_sampled.yaml", *tiny_options(tiny_data_dir), "--model.batch_tokens=64"]
    assert run_cli("fit", *options, "--run_name=one")[0] == 0
    command = [sys.executable, "-m", "looped_lm", "fit", *options, "--run_name=two"]
    command += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = (RunRecord.load(next(in_folder.glob(f"runs/{n}/**/*.run.json"))) for n in ("one", "two"))
    assert two.world_size == 2 and two.training_flops == pytest.approx(one.training_flops, rel=1e-12)
    assert two.val_loss == pytest.approx(one.val_loss, rel=1e-5)


@pytest.mark.parametrize("bptt, graphs", [(None, 1), (TruncatedBPTT(2), 2)])
def test_a_block_compiles_once_however_many_recurrences(bptt: Any, graphs: int) -> None:
    """Truncation has two forms of the block: with a graph and forward only."""
    torch._dynamo.reset()
    compiled: list[int] = []

    def backend(module: torch.fx.GraphModule, example_inputs: Any) -> Any:
        compiled.append(len(example_inputs))
        return module.forward

    lm = tiny_lm(recurrences=partial(Counts, counts=[1, 4, 2, 7, 3, 5]), bptt=bptt)
    for layer in lm.model.block:
        layer.compile(backend=backend)
    after: list[int] = []
    for step in range(6):
        lm.loss(tokens(), lm.step_recurrences(step)).backward()
        after.append(len(compiled))
    torch._dynamo.reset()
    # The second step is the first that cuts.
    assert after == [1, *[graphs] * 5]


def test_the_plan_is_the_run(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    options = ["--config", "r8_sampled.yaml", *tiny_options(tiny_data_dir)]
    status, plan = run_cli("plan", *options)
    assert status == 0, plan
    status, out = run_cli("fit", *options)
    assert status == 0, out
    record = RunRecord.load(next(in_folder.rglob("*.run.json")))
    counts = [LogNormalPoisson(8, max_recurrences=32).sample(t) for t in range(3)]
    assert f"drawn for every step: {min(counts)} to {max(counts)}, mean {sum(counts) / 3:.2f}" in plan
    expected = sum(
        closed.flops_per_token(
            64, r, (2, 2, 2), "linear", window=8, vocab_padded=320, sequence_length=SEQ_LEN
        )
        for r in counts
    )
    assert record.flops_per_token == pytest.approx(expected / 3, rel=1e-9)
    assert f"{record.flops_per_token:.6e}" in plan and f"{record.training_flops:.4e}" in plan


def test_the_causal_convention_is_a_mean_over_the_counts_too() -> None:
    model = tiny_model()
    halves = [
        closed.flops_per_token(
            64, r, (1, 1, 1), "linear", vocab_padded=64, sequence_length=SEQ_LEN, convention="causal"
        )
        for r in (2, 6)
    ]
    assert mean_flops_per_token(model, SEQ_LEN, {2: 3, 6: 1}, "causal") == (3 * halves[0] + halves[1]) / 4


# ---- Evaluation with another count ----------------------------------------------------------------------------------


def test_validate_with_other_counts_says_so_and_leaves_the_record_alone(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path
) -> None:
    status, out = run_cli("fit", "--config", "r8_hc.yaml", *tiny_options(tiny_data_dir))
    assert status == 0, out
    path, record_path = (next(in_folder.rglob(f"*.{suffix}")) for suffix in ("ckpt", "run.json"))
    before = record_path.read_bytes()
    stored = json.loads(before)["val_loss"]
    losses = {}
    for r in (8, 4, 32):
        status, out = run_cli(
            "validate", "--ckpt_path", str(path), f"--model.eval_recurrences={r}", f"--run_name=at{r}",
            "--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=csv",
            "--trainer.logger.flush_logs_every_n_steps=1",
        )  # fmt: skip
        assert status == 0, out
        assert "val/recurrences" in out and str(float(r)) in out
        header, row = next(in_folder.glob(f"csv/at{r}/**/metrics.csv")).read_text().splitlines()
        values = dict(zip(header.split(","), row.split(","), strict=True))
        assert float(values["val/recurrences"]) == r
        losses[r] = float(values["val/loss"])
    assert losses[8] == pytest.approx(stored, rel=1e-12)
    assert abs(losses[4] - stored) > 1e-6 < abs(losses[32] - stored)
    assert record_path.read_bytes() == before
    status, out = run_cli("predict", "--ckpt_path", str(path), "--model.eval_recurrences=32")
    assert status == 0 and "with 32 recurrences" in out
    rows = [json.loads(line) for line in next(in_folder.rglob("predictions.jsonl")).open()]
    assert {row["recurrences"] for row in rows} == {32}
    assert sum(row["loss"] for row in rows) / 4 == pytest.approx(losses[32], rel=1e-6)
    status, out = run_cli(
        "fit", "--config", "r8_hc.yaml", *tiny_options(tiny_data_dir), "--model.eval_recurrences=4"
    )
    assert status == 1 and "eval_recurrences is 4, but a run's loss is that of its own 8 recurrences" in out


def test_checkpoints_and_records_from_before_this_seam_still_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, tiny_lm(), max_steps=2)
    path = tmp_path / "step=2.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    for seam in ("recurrences", "residual"):
        del checkpoint["hyper_parameters"][seam]
        del checkpoint["run_record"]["components"][seam]
    torch.save(checkpoint, path)
    assert not LoopedLM.load_from_checkpoint(path, weights_only=True).recurrences.varies
    fit(tmp_path / "on", tiny_lm(), ckpt_path=path)
    assert "recipe differs" not in capsys.readouterr().out
    record = RunRecord.load(tmp_path / "on" / "step=4.run.json").to_dict()
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    RunRecord.from_dict(record).save(tmp_path / "new" / "a.run.json")
    del record["components"]["recurrences"]
    RunRecord.from_dict(record).save(tmp_path / "old" / "a.run.json")
    old, new = load_runs(tmp_path / "old"), load_runs(tmp_path / "new")
    assert list(old.architecture) == list(new.architecture) == ["r=2, linear, full"]


def test_a_run_goes_on_with_the_counts_it_began_with(tmp_path: Path) -> None:
    fit(tmp_path, tiny_lm(), max_steps=2)
    with pytest.raises(
        ValueError, match="recurrences.class_path: 'looped_lm.FixedRecurrences' in the checkp"
    ):
        fit(
            tmp_path / "on",
            tiny_lm(recurrences=partial(Counts, counts=[3])),
            ckpt_path=tmp_path / "step=2.ckpt",
        )


def test_the_record_counts_the_steps_taken(tmp_path: Path) -> None:
    """Stopped early, and resumed with other batches, the mean is not the plan's."""
    arguments: dict[str, Any] = dict(recurrences=partial(Counts, counts=[1, 3, 5, 2]))
    fit(tmp_path, tiny_lm(**arguments), max_steps=2)
    record = RunRecord.load(tmp_path / "step=2.run.json")
    assert record.flops_per_token == pytest.approx((flops(1) + flops(3)) / 2, rel=1e-12)
    fit(tmp_path / "on", tiny_lm(**arguments, batch_tokens=2 * BATCH), ckpt_path=tmp_path / "step=2.ckpt")
    record = RunRecord.load(tmp_path / "on" / "step=4.run.json")
    assert record.status == "completed" and record.tokens == 6 * BATCH
    spent = flops(1) + flops(3) + 2 * flops(5) + 2 * flops(2)
    assert record.training_flops == pytest.approx(BATCH * spent, rel=1e-12)
