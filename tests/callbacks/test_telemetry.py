"""Learning rates, norms of gradients and updates, and the loop's states, each against a value computed apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from callbacks import GradientNorm, LearningRates, LoopStats, UpdateNorms
from callbacks.loop_stats import largest_singular_value
from callbacks.optimizer import norm
from looped_lm import (
    DoublyStochasticLanes,
    HyperConnectionLanes,
    LinearInjection,
    LoopedLM,
    PassthroughInjection,
    SingleLane,
    Steps,
    TruncatedBPTT,
    accounting,
)
from tests.support.own_components import FewerAndFewer
from tests.support.recording_logger import RecordingLogger
from tests.support.tiny import TinyData, perturb, tiny_lm, tiny_trainer


def test_learning_rates_are_logged_by_role(tmp_path: Path) -> None:
    lm, logger = tiny_lm(), RecordingLogger()
    tiny_trainer(tmp_path, [LearningRates()], logger=logger).fit(lm, datamodule=TinyData(4))
    base = lm.learning_rates()
    for role in ("matrix", "embedding", "head", "norm"):
        assert logger.series(f"lr/{role}") == [
            (t + 1, pytest.approx(base[role] * (1 - 0.9 * t / 4), rel=1e-6)) for t in range(4)
        ]


class OwnNorm(L.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        self.norms.append(sum(float((p.grad.double() ** 2).sum()) for p in pl_module.parameters()) ** 0.5)  # type: ignore[union-attr]


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_the_gradient_norm_is_that_of_the_accumulated_gradient(tmp_path: Path, clip: float | None) -> None:
    """Before it is clipped."""
    logger, own = RecordingLogger(), OwnNorm()
    trainer = tiny_trainer(tmp_path, [GradientNorm(), own], logger=logger, gradient_clip_val=clip)
    trainer.fit(tiny_lm(), datamodule=TinyData(2))
    assert min(own.norms) > 0.1
    assert [v for _, v in logger.series("grad/norm")] == pytest.approx(own.norms, rel=1e-5)
    assert [s for s, _ in logger.series("grad/norm")] == [1, 2, 3, 4]


def test_telemetry_is_taken_at_logging_steps_only(tmp_path: Path) -> None:
    logger = RecordingLogger()
    callbacks = [GradientNorm(), UpdateNorms(), LoopStats(), LearningRates()]
    tiny_trainer(tmp_path, callbacks, logger=logger, log_every_n_steps=2).fit(
        tiny_lm(), datamodule=TinyData(2)
    )
    for name in ("grad/norm", "update/norm_matrix", "loop/state_norm_0", "lr/matrix", "train/loss"):
        assert [s for s, _ in logger.series(name)] == [2, 4], name


class PairLanes(SingleLane):
    """A state that is a pair of tensors."""

    def expand(self, s: torch.Tensor) -> Any:
        return (s, s)

    def read(self, state: Any, i: int) -> torch.Tensor:
        return state[0]

    def write(self, state: Any, y: torch.Tensor, i: int) -> Any:
        return (y, state[0])

    def reduce(self, state: Any) -> torch.Tensor:
        return state[0] + state[1]


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed"])
def test_telemetry_takes_any_state_at_any_precision(tmp_path: Path, precision: str) -> None:
    logger = RecordingLogger()
    trainer = tiny_trainer(
        tmp_path, [LoopStats(), GradientNorm(), UpdateNorms()], logger=logger, precision=precision
    )
    trainer.fit(tiny_lm(lanes=PairLanes), datamodule=TinyData())
    assert [s for s, _ in logger.series("loop/state_norm_1")] == [1, 2, 3, 4]


def collect_states(lm: LoopedLM) -> list[Any]:
    """Fills with copies of what the lanes write in training, one per recurrence."""
    states: list[Any] = []
    write = lm.model.lanes.write

    def spy(state: Any, y: torch.Tensor, i: int) -> Any:
        after = write(state, y, i)
        if lm.training:
            states.append(tree_map(lambda t: t.detach().double().numpy().copy(), after))
        return after

    lm.model.lanes.write = spy  # type: ignore[method-assign]
    return states


VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "truncated": {"bptt": TruncatedBPTT(1)},
    "lanes": {"lanes": HyperConnectionLanes, "injection": PassthroughInjection},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_state_is_described_by_norm_change_and_cosine(tmp_path: Path, variant: str) -> None:
    lm = tiny_lm(num_recurrences=3, horizon=Steps(1), **VARIANTS[variant])
    perturb(lm.model)
    logger, states = RecordingLogger(), collect_states(lm)
    tiny_trainer(tmp_path, [LoopStats(rows=3)], logger=logger).fit(lm, datamodule=TinyData(4))
    assert len(states) == 6, "two micro-batches of three recurrences"
    samples = [s[..., :3, :, :].ravel() for s in states[3:]]
    for i, s in enumerate(samples):
        expected = {f"loop/state_norm_{i}": math.sqrt(sum(x * x for x in s) / len(s))}
        if i:
            before = samples[i - 1]
            expected[f"loop/change_{i}"] = np.sqrt(((s - before) ** 2).sum() / (before**2).sum())
            expected[f"loop/cosine_{i}"] = np.dot(s, before) / math.sqrt(
                np.dot(s, s) * np.dot(before, before)
            )
        for name, value in expected.items():
            assert logger.series(name) == [(1, pytest.approx(value, rel=1e-5))], name
    assert not logger.series("loop/change_0") and not logger.series("loop/state_norm_3")
    assert lm.model.observer is None


def test_a_recomputed_recurrence_is_seen_once(tmp_path: Path) -> None:
    lm = tiny_lm(num_recurrences=3, horizon=Steps(1))
    perturb(lm.model)
    logger, states, calls = RecordingLogger(), collect_states(lm), []
    loop, stats = lm.model._loop, LoopStats(rows=8)
    lm.model._loop = lambda *args: checkpoint(loop, *args, use_reentrant=False)  # type: ignore[method-assign]
    observe = stats._observe
    stats._observe = lambda i, state: (calls.append(i), observe(i, state))  # type: ignore[method-assign]
    tiny_trainer(tmp_path, [stats], logger=logger).fit(lm, datamodule=TinyData())
    assert len(states) > 3, "the backward pass computes recurrences again"
    assert calls == [0, 1, 2]
    assert logger.series("loop/state_norm_2") == [
        (1, pytest.approx(float(np.sqrt((states[2] ** 2).mean())), rel=1e-5))
    ]


def test_a_recurrence_that_does_not_run_is_not_logged_again(tmp_path: Path) -> None:
    """The number of recurrences may change from step to step."""
    lm = tiny_lm(num_recurrences=3, horizon=Steps(2), recurrences=FewerAndFewer)
    logger = RecordingLogger()
    tiny_trainer(tmp_path, [LoopStats()], logger=logger).fit(lm, datamodule=TinyData())
    assert [s for s, _ in logger.series("loop/state_norm_1")] == [1, 2]
    assert [s for s, _ in logger.series("loop/state_norm_2")] == [1]


@pytest.mark.parametrize("lanes", [HyperConnectionLanes, DoublyStochasticLanes])
def test_the_largest_singular_value_of_every_mixing_matrix(tmp_path: Path, lanes: type) -> None:
    lm = tiny_lm(lanes=lambda d, r: lanes(d, r, 3), injection=PassthroughInjection)
    perturb(lm.model)
    logger, after = RecordingLogger(), []

    class Copy(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            mixing = pl_module.model.lanes.mixing_matrix
            after.append([mixing(i).detach().double().numpy().copy() for i in range(2)])

    tiny_trainer(tmp_path, [LoopStats(), Copy()], logger=logger).fit(lm, datamodule=TinyData())
    for i in range(2):
        expected = [math.sqrt(np.linalg.eigvalsh(m[i].T @ m[i])[-1]) for m in after]
        assert [v for _, v in logger.series(f"loop/mixing_{i}")] == pytest.approx(expected, rel=1e-5)
    assert math.isnan(largest_singular_value(np.array([[1.0, np.nan], [0.0, 1.0]])))


def test_single_lanes_have_no_mixing_and_no_logger_means_no_work(tmp_path: Path) -> None:
    logger, stats = RecordingLogger(), LoopStats()
    tiny_trainer(tmp_path, [LoopStats()], logger=logger).fit(tiny_lm(), datamodule=TinyData())
    assert not any("mixing" in name for _, row in logger.rows for name in row)
    stats._observe = lambda *_: pytest.fail("observed for nobody")  # type: ignore[method-assign]
    tiny_trainer(tmp_path, [stats]).fit(tiny_lm(), datamodule=TinyData())
    with pytest.raises(ValueError, match="needs at least 1 row"):
        LoopStats(rows=0)


def test_update_norms_per_role_are_those_of_the_weights_before_and_after(tmp_path: Path) -> None:
    """MuonH's matrices and AdamW's tables, norms and lanes."""
    lm = tiny_lm(lanes=HyperConnectionLanes, injection=LinearInjection)
    perturb(lm.model)
    logger = RecordingLogger()
    weights: list[dict[str, np.ndarray]] = []
    gradients: list[dict[str, np.ndarray]] = []

    def copies(values: Any) -> dict[str, np.ndarray]:
        return {name: t.detach().double().numpy().copy() for name, t in values}

    class Copy(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            weights.append(copies(pl_module.model.named_parameters()))

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients.append(copies((n, p.grad) for n, p in pl_module.model.named_parameters()))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, o: Any, b: Any, batch_idx: int) -> None:
            if batch_idx % 2:
                weights.append(copies(pl_module.model.named_parameters()))

    callbacks = [GradientNorm(), UpdateNorms(), Copy()]
    tiny_trainer(tmp_path, callbacks, logger=logger, log_every_n_steps=2).fit(lm, datamodule=TinyData(4))
    roles = accounting.parameter_roles(lm.model)
    assert set(roles.values()) == {"matrix", "embedding", "head", "norm", "lanes"}
    for role in set(roles.values()):
        names = [n for n in roles if roles[n] == role]

        def length(of: dict[str, np.ndarray], names: list[str] = names) -> float:
            return math.sqrt(sum((of[n] ** 2).sum() for n in names))

        moved = [
            length({n: weights[t][n] - weights[t - 1][n] for n in names}) for t in range(len(weights)) if t
        ]
        steps = {
            f"update/norm_{role}": moved,
            f"update/relative_{role}": [m / length(w) for m, w in zip(moved, weights, strict=False)],
            f"grad/norm_{role}": [length(g) for g in gradients],
        }
        assert moved[1] > 0 and moved[3] > 0
        for name, values in steps.items():
            assert logger.series(name) == [(s, pytest.approx(values[s - 1], rel=1e-4)) for s in (2, 4)], name


def test_norms_of_bf16_weights_are_not_rounded_to_bf16() -> None:
    values = [torch.randn(50, 7, generator=torch.Generator().manual_seed(s)).bfloat16() for s in range(3)]
    expected = math.sqrt(sum(float((v.double() ** 2).sum()) for v in values))
    assert float(norm(values)) == pytest.approx(expected, rel=1e-6)
