"""LoopedLM under a real Trainer: derived settings, losses, optimizer groups, and checkpoints that rebuild the model."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from looped_lm import (
    AdditiveInjection,
    FlopsBudget,
    HyperConnectionLanes,
    HyperP,
    LoopedLM,
    MuonH,
    RandomStateInjection,
    Steps,
    TruncatedBPTT,
)
from looped_lm.common.errors import UserError
from looped_lm.training.devices import keeps_embedding_in_bf16
from tests.support.tiny import SEQ_LEN, VOCAB, TinyData, perturb, tiny_lm, tiny_trainer, tokens


class Watch(L.Callback):
    """Notes the logged loss and the learning rates of every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[dict[str, float]] = []
        self.validations: list[tuple[int, float]] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        self.rates.append({group["role"]: group["lr"] for group in optimizer.param_groups})

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validations.append((trainer.global_step, float(trainer.callback_metrics["val/loss"])))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > self.seen:
            self.seen = trainer.global_step
            self.losses.append(float(trainer.callback_metrics["train/loss"]))


def fit(folder: Path, lm: LoopedLM, batch_size: int = 8, **trainer: Any) -> tuple[L.Trainer, Watch]:
    watch = Watch()
    t = tiny_trainer(folder, [watch], **trainer)
    t.fit(lm, datamodule=TinyData(batch_size))
    return t, watch


def test_accumulation_changes_nothing_but_memory(tmp_path: Path) -> None:
    """8 rows at once and 2 rows x 4 give the same logged losses, steps and weights."""
    one, four = tiny_lm(), tiny_lm()
    trainer, a = fit(tmp_path, one, batch_size=8)
    accumulated, b = fit(tmp_path, four, batch_size=2)
    assert trainer.accumulate_grad_batches == 1 and accumulated.accumulate_grad_batches == 4
    assert trainer.global_step == accumulated.global_step == 4
    assert a.losses == pytest.approx(b.losses, rel=1e-6) and len(a.losses) == 4
    for x, y in zip(one.parameters(), four.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_random_states_are_those_of_the_rows_however_a_step_is_split_or_resumed(tmp_path: Path) -> None:
    def run(folder: str, batch_size: int, seed: int = 0, **trainer: Any) -> list[float]:
        lm = tiny_lm(injection=partial(RandomStateInjection, std=3.0, seed=seed))
        perturb(lm.model)  # From [I | 0] the state does not count yet.
        return fit(tmp_path / folder, lm, batch_size, **trainer)[1].losses

    whole = run("whole", 8)
    assert run("split", 2) == pytest.approx(whole, rel=1e-6)
    assert run("other", 8, seed=1) != pytest.approx(whole, rel=1e-5)
    half = tiny_lm(injection=partial(RandomStateInjection, std=3.0))
    perturb(half.model)
    trainer, _ = fit(tmp_path, half, max_steps=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(99)
    lm = tiny_lm(injection=partial(RandomStateInjection, std=3.0))
    watch = Watch()
    tiny_trainer(tmp_path, [watch]).fit(lm, datamodule=TinyData(), ckpt_path=tmp_path / "half.ckpt")
    # The tiny data begin anew after a resume; the states do not.
    ours = tiny_lm(injection=partial(RandomStateInjection, std=3.0))
    ours.load_state_dict(torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"])
    rows = [torch.stack(side) for side in zip(*_first_rows(8), strict=True)]
    with torch.no_grad():
        expected = [float(ours.model.losses(*rows, rows=range(n, n + 8))[0]) for n in (16, 0)]
    assert watch.losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert watch.losses[0] != pytest.approx(expected[1], rel=1e-5)


def test_documents_that_begin_with_another_id_are_refused(tmp_path: Path) -> None:
    data = TinyData()
    data.bos_id = 5  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match="documents of this data begin with the id 5.*--model.document_start 5"
    ):
        tiny_trainer(tmp_path).fit(tiny_lm(document_start=4), datamodule=data)
    with pytest.raises(UserError, match="document_start is 61; it is a token's id, from 0 to 60"):
        tiny_lm(document_start=61)
    tiny_trainer(tmp_path).fit(tiny_lm(document_start=5, horizon=Steps(1)), datamodule=data)


def test_the_logged_loss_is_the_mean_over_all_micro_batches(tmp_path: Path) -> None:
    lm = tiny_lm(horizon=Steps(1))
    rows = _first_rows(8)
    inputs, targets = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    with torch.no_grad():
        expected = F.cross_entropy(lm(inputs).flatten(0, 1), targets.flatten())
    _, watch = fit(tmp_path, lm, batch_size=2)
    assert watch.losses == pytest.approx([float(expected)], rel=1e-6)


def _first_rows(n: int) -> list[Any]:
    loader = iter(TinyData(1).train_dataloader())
    return [tuple(x[0] for x in next(loader)) for _ in range(n)]


def test_learning_rates_follow_transfer_and_schedule(tmp_path: Path) -> None:
    lm = tiny_lm()
    base = lm.learning_rates()
    _, watch = fit(tmp_path, lm)
    assert [rates["matrix"] for rates in watch.rates] == pytest.approx(
        [base["matrix"] * (1 - 0.9 * t / 4) for t in range(4)]
    )
    assert watch.rates[0] == pytest.approx({role: base[role] for role in watch.rates[0]})


def test_validation_happens_every_so_many_optimizer_steps(tmp_path: Path) -> None:
    _, watch = fit(tmp_path, tiny_lm(horizon=Steps(5), val_every_steps=2), batch_size=4)
    assert [step for step, _ in watch.validations] == [2, 4]


def test_groups_carry_roles_names_and_rates() -> None:
    lm = tiny_lm(lanes=HyperConnectionLanes)
    groups = lm.configure_optimizers()["optimizer"].param_groups
    by_role = {group["role"]: group for group in groups}
    assert set(by_role) == {"matrix", "embedding", "head", "norm", "lanes"}
    assert by_role["embedding"]["param_names"] == ["embedding.weight"]
    assert sum(len(group["params"]) for group in groups) == len(list(lm.parameters()))
    rates = lm.learning_rates()
    assert all(group["initial_lr"] == rates[role] for role, group in by_role.items())


def test_any_torch_optimizer_fits_the_seam(tmp_path: Path) -> None:
    lm = tiny_lm(optimizer=partial(torch.optim.AdamW, weight_decay=0.0))
    trainer, watch = fit(tmp_path, lm)
    assert type(trainer.optimizers[0]) is torch.optim.AdamW and set(watch.rates[0]) >= {"matrix", "norm"}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(bptt=TruncatedBPTT(1), num_recurrences=3, horizon=FlopsBudget(1e9)),
        dict(lanes=partial(HyperConnectionLanes, num_lanes=3), n_kv_heads=2),
        dict(optimizer=partial(torch.optim.AdamW, betas=(0.9, 0.99))),
    ],
)
def test_a_checkpoint_alone_rebuilds_a_model_built_in_python(
    tmp_path: Path, overrides: dict[str, Any]
) -> None:
    """Components come back with their arguments, under weights_only."""
    lm = tiny_lm(**overrides)
    perturb(lm)
    trainer = tiny_trainer(tmp_path)
    trainer.strategy.connect(lm)
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path, weights_only=False)
    assert torch.load(path, weights_only=True)["hyper_parameters"]["batch_tokens"] == 128
    loaded = LoopedLM.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert loaded.component_specs() == lm.component_specs()
    assert dict(loaded.hparams) == dict(lm.hparams)
    inputs, _ = tokens()
    assert torch.equal(loaded(inputs), lm(inputs))


def save(folder: Path, lm: LoopedLM) -> Path:
    """A checkpoint of a module after two steps."""
    trainer, _ = fit(folder, lm, max_steps=2)
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


@pytest.mark.parametrize(
    "overrides, says",
    [
        (
            dict(bptt=TruncatedBPTT(1)),
            "bptt.class_path: 'looped_lm.FullBPTT' in the checkpoint, 'looped_lm.Trunc",
        ),
        (dict(logit_softcap=30.0), "logit_softcap: 15.0 in the checkpoint, 30.0 here"),
        (dict(rope_bf16=True), "rope_bf16: False in the checkpoint, True here"),
        (
            dict(injection=AdditiveInjection),
            "injection.class_path: 'looped_lm.LinearInjection' in the checkpoint",
        ),
    ],
)
def test_another_model_with_the_same_or_other_tensors_is_refused(
    tmp_path: Path, overrides: dict[str, Any], says: str
) -> None:
    """Also from Python, and also where every tensor would fit."""
    path = save(tmp_path, tiny_lm())
    with pytest.raises(ValueError, match=f"(?s)describes another model.*{says}"):
        tiny_trainer(tmp_path).fit(tiny_lm(**overrides), datamodule=TinyData(), ckpt_path=path)


def test_a_changed_recipe_takes_effect_after_a_resume(tmp_path: Path) -> None:
    """Optimizer and scheduler states would bring the old rates back."""
    path = save(tmp_path, tiny_lm())
    optimizer = partial(MuonH, momentum=0.5)
    lm, watch = tiny_lm(horizon=Steps(8), transfer=HyperP(matrix=0.5), optimizer=optimizer), Watch()
    trainer = tiny_trainer(tmp_path, [watch])
    trainer.fit(lm, datamodule=TinyData(), ckpt_path=path)
    base = lm.learning_rates()
    expected = [base["matrix"] * (1 - 0.9 * t / 8) for t in range(2, 8)]
    assert [rates["matrix"] for rates in watch.rates] == pytest.approx(expected)
    assert trainer.optimizers[0].param_groups[0]["momentum"] == 0.5


def test_a_finished_checkpoint_leaves_nothing_to_train(tmp_path: Path) -> None:
    path = save(tmp_path, tiny_lm())
    with pytest.raises(ValueError, match="at step 2 of 2: nothing is left to train"):
        tiny_trainer(tmp_path).fit(tiny_lm(horizon=Steps(2)), datamodule=TinyData(), ckpt_path=path)


class NoSizes(AdditiveInjection):
    def __init__(self) -> None:
        super().__init__(64)


def test_a_component_that_takes_no_sizes_is_named() -> None:
    with pytest.raises(ValueError, match=r"The injection NoSizes\(\) cannot be built from \(d_model=64\)"):
        tiny_lm(injection=NoSizes)


def test_another_optimizers_state_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, tiny_lm())
    with pytest.raises(ValueError, match="state of another class of optimizer:\n  optimizer.class_path"):
        tiny_trainer(tmp_path).fit(
            tiny_lm(optimizer=torch.optim.AdamW), datamodule=TinyData(), ckpt_path=path
        )


class StopAt(L.Callback):
    """Asks the trainer to stop at a micro-batch, as Lightning's Timer does."""

    def __init__(self, batch_idx: int) -> None:
        self.batch_idx = batch_idx

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch_idx:
            trainer.should_stop = True


def test_a_stop_asked_for_in_mid_accumulation_waits_for_the_steps_end(tmp_path: Path) -> None:
    """No step is cut short, no token is counted that no step has seen."""
    trainer = tiny_trainer(tmp_path, [StopAt(5)])
    trainer.fit(tiny_lm(), datamodule=TinyData(2))
    assert trainer.global_step == 2
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 8


def test_a_trainer_may_fit_twice_and_max_steps_may_equal_the_plan(tmp_path: Path) -> None:
    lm = tiny_lm()
    trainer = tiny_trainer(tmp_path, max_steps=4)
    trainer.fit(lm, datamodule=TinyData(2))
    trainer.fit(lm, datamodule=TinyData(2))
    assert trainer.global_step == 4 and trainer.accumulate_grad_batches == 4


def test_another_architectures_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.strategy.connect(tiny_lm())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = tiny_lm(lanes=HyperConnectionLanes)
    with pytest.raises(ValueError, match="lanes.class_path: .*SingleLane.* in the checkpoint"):
        tiny_trainer(tmp_path).fit(other, datamodule=TinyData(), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "trainer, overrides, says",
    [
        (dict(accumulate_grad_batches=2), {}, "accumulation follows from model.batch_tokens"),
        (dict(val_check_interval=3), {}, "model.val_every_steps"),
        (dict(max_steps=9), {}, "beyond the 4 steps that model.horizon plans"),
        (dict(overfit_batches=1), {}, "overfit_batches has no effect on endless data"),
        (dict(min_steps=5), {}, "min_steps is 5, beyond the 4 steps"),
        (dict(limit_train_batches=3), dict(batch_tokens=256), "limit_train_batches is 3, which cuts short"),
        ({}, dict(batch_tokens=100), "not a multiple of one micro-batch: 8 rows x 16 tokens"),
    ],
)
def test_settings_that_contradict_the_recipe_are_refused(
    tmp_path: Path, trainer: dict[str, Any], overrides: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        fit(tmp_path, tiny_lm(**overrides), **trainer)


def test_trainer_max_steps_stops_early_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, watch = fit(tmp_path, tiny_lm(), max_steps=2)
    assert trainer.global_step == 2 and "after 2 of the 4 steps" in capsys.readouterr().out
    assert watch.rates[1]["matrix"] / watch.rates[0]["matrix"] == pytest.approx(1 - 0.9 / 4)


def test_a_data_module_without_batch_size_is_refused(tmp_path: Path) -> None:
    data = TinyData()
    del data.batch_size
    with pytest.raises(ValueError, match="no `batch_size`"):
        tiny_trainer(tmp_path).fit(tiny_lm(), datamodule=data)


@pytest.mark.parametrize(
    "overrides, says",
    [(dict(batch_tokens=0), "batch_tokens is 0"), (dict(val_every_steps=0), "val_every_steps is 0")],
)
def test_bad_values_are_refused_at_construction(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tiny_lm(**overrides)


def test_predict_gives_the_loss_of_every_token(tmp_path: Path) -> None:
    lm = tiny_lm()
    perturb(lm)
    batch = tokens()
    losses = lm.predict_step(batch, 0)
    assert losses.shape == (3, SEQ_LEN)
    assert losses.mean().item() == pytest.approx(lm.loss(batch).item(), rel=1e-6)


def test_training_learns(tmp_path: Path) -> None:
    """The recipe lowers the loss of a fixed batch far below ln V within 30 steps, at the reference's batch factor."""
    lm = tiny_lm(horizon=Steps(30), transfer=HyperP(batch_exponent=0.0))
    batch = tokens(8)
    optimizer = lm.configure_optimizers()["optimizer"]
    for _ in range(30):
        optimizer.zero_grad()
        loss = lm.loss(batch)
        loss.backward()
        optimizer.step()
    assert lm.loss(batch).item() < 0.7 * math.log(VOCAB)


def test_every_parameter_gets_a_gradient_in_every_combination() -> None:
    """DDP runs without find_unused_parameters."""
    from tests.support.shipped import COMBINATIONS

    for name, overrides in COMBINATIONS.items():
        lm = tiny_lm(**overrides)
        lm.loss(tokens()).backward()
        assert not [n for n, p in lm.named_parameters() if p.grad is None], name


def test_a_bf16_embedding_trains_and_loads_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU under bf16 autocast; a CPU is made to do it here."""
    assert keeps_embedding_in_bf16(torch.device("cuda"), "bf16-mixed")
    assert not keeps_embedding_in_bf16(torch.device("cuda"), "32-true")
    assert not keeps_embedding_in_bf16(torch.device("cpu"), "bf16-mixed")
    monkeypatch.setattr(
        "looped_lm.training.lightning_module.keeps_embedding_in_bf16", lambda device, precision: True
    )
    lm = tiny_lm()
    before = lm.model.embedding.weight.detach().clone()
    trainer = tiny_trainer(tmp_path, precision="bf16-mixed")
    trainer.fit(lm, TinyData())
    weight = lm.model.embedding.weight
    assert weight.dtype is torch.bfloat16 and not torch.equal(weight.float(), before)
    assert lm.model.head.weight.dtype is torch.float32
    trainer.save_checkpoint(tmp_path / "bf16.ckpt")
    loaded = LoopedLM.load_from_checkpoint(tmp_path / "bf16.ckpt", map_location="cpu", weights_only=True)
    assert torch.equal(loaded.model.embedding.weight, weight.float())
