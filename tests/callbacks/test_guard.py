"""A run that diverges: it stops, or goes back and leaves out the rows that led there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from callbacks import Checkpoints, DivergenceGuard, FinalValidation, FlopsMonitor, RunRecordWriter
from datamodules import TokenDataModule
from fitting.records import RunRecord
from looped_lm import Steps
from looped_lm.runs.checkpoint import load_checkpoint
from tests.support.tiny import tiny_lm, tiny_trainer

ROWS = 8
"""Rows of an optimizer step, in two micro-batches."""


class Data(TokenDataModule):
    """Rows in their order, without those of step `left_out`."""

    def __init__(self, folder: Path, left_out: int | None = None) -> None:
        super().__init__(data_dir=folder, seq_len=16, batch_size=ROWS // 2, val_rows=4, final_val_rows=8)
        self.left_out = left_out

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if self.left_out is not None:
            self._order = Skipping(self._order, (self.left_out - 1) * ROWS)  # type: ignore[assignment]


class Skipping:
    def __init__(self, order: Any, first: int) -> None:
        self.order, self.first = order, first

    def __getitem__(self, counter: int) -> int:
        return self.order[counter if counter < self.first else counter + ROWS]


class Poison(L.Callback):
    """Spoils the weights before the first micro-batch of some steps, counted by what was read."""

    def __init__(self, *steps: int, value: float = float("nan")) -> None:
        self.steps, self.value = steps, value

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0 and batch_idx // 2 + 1 in self.steps:
            with torch.no_grad():
                pl_module.model.head.weight[0].fill_(self.value)


def fit(
    folder: Path, data: Data, *more: L.Callback, guard: DivergenceGuard | None = None, **options: Any
) -> Path:
    """A run of 8 steps with checkpoints at even ones; the folder of its checkpoints."""
    callbacks = [FlopsMonitor(), guard or DivergenceGuard(), FinalValidation(), RunRecordWriter()]
    save = Checkpoints(keep=-1, every_n_steps=2, dirpath=str(folder))
    every = options.pop("log_every_n_steps", 1)
    trainer = tiny_trainer(
        folder, [*callbacks, *more, save], enable_checkpointing=True, log_every_n_steps=every
    )
    lm = tiny_lm(vocab_size=257, horizon=Steps(8), batch_tokens=ROWS * 16)
    trainer.fit(lm, datamodule=data, **options)
    return folder


def final(folder: Path) -> dict[str, Any]:
    return load_checkpoint(folder / "step=000008.ckpt")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope="module")
def went_back(tmp_path_factory: pytest.TempPathFactory, tiny_data_dir: Path) -> Path:
    """A run whose weights go bad in step 5, on the way from the checkpoint of step 4 to that of step 6."""
    folder = tmp_path_factory.mktemp("went_back")
    return fit(folder, Data(tiny_data_dir), Poison(5), guard=DivergenceGuard(max_rollbacks=1))


def test_going_back_leaves_out_the_rows_that_led_there(
    went_back: Path, tmp_path: Path, tiny_data_dir: Path
) -> None:
    expected, got = final(fit(tmp_path, Data(tiny_data_dir, left_out=5))), final(went_back)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert same(got[part], expected[part]), part
    record, reference = (RunRecord.from_dict(c["run_record"]) for c in (got, expected))
    assert (record.status, record.rollbacks, reference.rollbacks) == ("completed", 1, 0)
    assert (record.tokens, record.training_flops, record.val_loss) == (
        reference.tokens,
        reference.training_flops,
        reference.val_loss,
    )
    position = [c["TokenDataModule" if "TokenDataModule" in c else "Data"] for c in (got, expected)]
    assert [p["rows_consumed"] for p in position] == [9 * ROWS, 8 * ROWS]


def test_a_run_that_went_back_resumes_exactly(went_back: Path, tmp_path: Path, tiny_data_dir: Path) -> None:
    fit(tmp_path, Data(tiny_data_dir), ckpt_path=went_back / "step=000006.ckpt")
    assert same(final(tmp_path)["state_dict"], final(went_back)["state_dict"])
    assert final(tmp_path)["run_record"]["rollbacks"] == 1


def test_weights_found_bad_at_a_checkpoint_go_back_too(
    went_back: Path, tmp_path: Path, tiny_data_dir: Path
) -> None:
    """Between logging steps nobody looks at the loss; steps 5 and 6 are left out then."""
    guard = DivergenceGuard(max_rollbacks=1)
    fit(tmp_path, Data(tiny_data_dir), Poison(5), guard=guard, log_every_n_steps=50)
    assert (
        guard.rollbacks
        == [
            {"from_step": 6, "to_step": 4, "reason": guard.rollbacks[0]["reason"]},
        ]
        and "is not finite" in guard.rollbacks[0]["reason"]
    )
    assert all(torch.isfinite(w).all() for w in final(tmp_path)["state_dict"].values())


def test_no_more_than_the_rollbacks_allowed(tmp_path: Path, tiny_data_dir: Path) -> None:
    guard = DivergenceGuard(max_rollbacks=1)
    with pytest.raises(FloatingPointError, match="train/loss is nan at step 7: training diverged and stops"):
        fit(tmp_path, Data(tiny_data_dir), Poison(5, 8), guard=guard)
    record = RunRecord.load(next(tmp_path.glob("diverged-*.run.json")))
    assert (record.status, record.rollbacks) == ("diverged", 1)
    assert sorted(p.stem for p in tmp_path.glob("*.ckpt")) == ["step=000002", "step=000004", "step=000006"]


def test_a_loss_far_above_the_usual_diverges(tmp_path: Path, tiny_data_dir: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"train/loss is .* times the usual .* at step 7"):
        fit(
            tmp_path / "stops",
            Data(tiny_data_dir),
            Poison(7, value=1e4),
            guard=DivergenceGuard(max_loss_ratio=1.5),
        )
    fit(tmp_path / "goes", Data(tiny_data_dir), Poison(7, value=1e4))


@pytest.mark.parametrize("wrong", [{"max_loss_ratio": 1.0}, {"max_rollbacks": -1}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is {next(iter(wrong.values()))}"):
        DivergenceGuard(**wrong)
