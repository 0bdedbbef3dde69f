"""Objectives against plain loops; what they cost, log and are refused for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from callbacks import DivergenceGuard
from looped_lm import (
    ExitDistribution,
    FinalCrossEntropy,
    HyperConnectionLanes,
    LogNormalPoisson,
    LoopedLM,
    LoopedTransformer,
    MixtureLayer,
    Objective,
    PonderCost,
    PreNormLayer,
    SingleLane,
    Steps,
    TruncatedBPTT,
    WeightedRecurrences,
)
from looped_lm.common.errors import UserError
from looped_lm.model.accounting import count_parameters, flops_per_token, parameter_roles
from tests.support.own_components import GatedLosses
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

R = 3


def moved(**overrides: Any) -> LoopedTransformer:
    """A tiny model with r = 3 in float64 whose weights are off their initial values."""
    model = tiny_model(torch.float64, num_recurrences=R, **overrides)
    perturb(model)
    return model


def gradients(model: LoopedTransformer, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward(retain_graph=True)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: LoopedTransformer, loss: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    got, want = gradients(model, loss), gradients(model, expected)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-13)


# ---- The seam ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_is_the_cross_entropy_after_the_last_recurrence_in_every_bit(dtype: torch.dtype) -> None:
    model = tiny_model(dtype, num_recurrences=R, lanes=HyperConnectionLanes)
    perturb(model)
    total, terms = model.losses(*tokens())
    expected = model.cross_entropy(*tokens())
    assert torch.equal(total, expected) and terms == {}
    got, want = gradients(model, total), gradients(model, expected)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_state_that_is_read_early_is_that_of_a_shorter_loop() -> None:
    """Lanes are reduced, and weights belong to tokens."""
    model = moved(objective=GatedLosses, lanes=HyperConnectionLanes)
    states = []
    model.observer = lambda i, state: states.append(model.lanes.reduce(state))
    total, terms = model.losses(*tokens())
    inputs, targets = tokens()
    share = (states[0] @ model.objective.gate.weight.T).sigmoid().squeeze(-1)  # type: ignore[union-attr, operator]

    def losses(r: int) -> Tensor:
        logs = model(inputs, num_recurrences=r).log_softmax(-1)
        return -logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    expected = (share * losses(1) + (1 - share) * losses(R)).mean() - 0.1 * share.mean()
    torch.testing.assert_close(terms["share"], share.mean())
    assert_same(model, total, expected)


def test_counts_roles_and_flops_of_an_objective() -> None:
    model, plain = tiny_model(objective=GatedLosses), tiny_model()
    sections = count_parameters(model)
    assert (
        sections.norms - count_parameters(plain).norms == 64
        and sections.block == count_parameters(plain).block
    )
    assert sum(sections.as_dict().values()) == sum(p.numel() for p in model.parameters())
    assert parameter_roles(model)["objective.gate.weight"] == "norm"
    coda, head = 2 * sections.coda + 4 * 64 * 16, 2 * sections.head
    assert flops_per_token(model, 16) - flops_per_token(plain, 16) == 3 * (coda + head) + 3 * 2 * 2 * 64


class Wants(FinalCrossEntropy):
    """Says that it reads what it is told to."""

    def __init__(self, d_model: int, num_recurrences: int, recurrences: Any) -> None:
        super().__init__(d_model, num_recurrences)
        self.recurrences = recurrences

    def wanted(self, num_recurrences: int) -> Any:
        return self.recurrences


@pytest.mark.parametrize(
    "recurrences, says",
    [
        (
            [0, 3],
            r"Wants wants the states after recurrences \[0, 3\] in a step of 3, which runs 0 to 2: want fewer",
        ),
        ([-1, 2], r"after recurrences \[-1, 2\] in a step of 3, which runs 0 to 2"),
        ([0, 1], r"without the last, 2: .*would never train"),
        ([], "without the last, 2"),
        ([2, 2], r"\[2, 2\] in a step of 3: .*name it once"),
    ],
)
def test_states_that_a_step_does_not_have_are_refused(recurrences: list[int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        tiny_model(num_recurrences=R, objective=partial(Wants, recurrences=recurrences))


def test_states_that_keep_no_gradient_are_refused() -> None:
    first = partial(WeightedRecurrences, recurrences=[0, -1])
    says = r"TruncatedBPTT runs 2 of 4 recurrences without gradients, and WeightedRecurrences reads .* \[0\] among"
    with pytest.raises(UserError, match=says + ".*from 2 on"):
        tiny_model(num_recurrences=4, objective=first, bptt=TruncatedBPTT())
    tiny_model(num_recurrences=4, objective=WeightedRecurrences, bptt=TruncatedBPTT())


def test_fixed_indices_are_refused_where_counts_may_be_smaller() -> None:
    counts = {"num_recurrences": 5, "recurrences": partial(LogNormalPoisson, seed=1), "horizon": Steps(40)}
    with pytest.raises(UserError, match=r"WeightedRecurrences wants .* in a step of \d+, "):
        tiny_lm(objective=partial(WeightedRecurrences, recurrences=[2, -1]), **counts)
    drawn = tiny_lm(objective=partial(WeightedRecurrences, recurrences=[-1]), **counts).drawn
    assert len(drawn) > 1


class Reads(Objective):
    """Wants the last state and reads what it is told."""

    at: Any = -1

    def forward(self, states: Any, read: Any, auxiliary: Any) -> Any:
        return read(states[self.at], None), {}


def test_a_state_that_was_not_wanted_or_a_total_without_gradients_is_told_with_the_name() -> None:
    lm = tiny_lm(objective=Reads, num_recurrences=R)
    with pytest.raises(
        UserError, match=r"Reads reads the state after recurrence -1, but wants those after \[2\]"
    ):
        lm.loss(tokens())
    lm.model.objective.forward = lambda states, read, auxiliary: (read(states[2], None).detach(), {})
    with pytest.raises(UserError, match="The total of Reads has no gradients"):
        lm.loss(tokens())
    with torch.no_grad():
        assert lm.loss(tokens()).isfinite()


@pytest.mark.parametrize("wanted", [None, [0.5, 2], 2])
def test_recurrences_that_are_no_whole_numbers_are_refused(
    wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reads, "wanted", lambda self, r: wanted)
    with pytest.raises(UserError, match="Reads wants the states after .*: name recurrences by ints"):
        tiny_model(objective=Reads, num_recurrences=R)


class Returns(Objective):
    """Returns what it is told to."""

    given: Any = None

    def forward(self, states: Any, read: Any, auxiliary: Any) -> Any:
        return self.given


@pytest.mark.parametrize(
    "given, says",
    [
        (None, "Returns returns a NoneType: forward must return"),
        (torch.ones(()), "Returns returns a Tensor"),
        ((1.5, {}), r"The total of Returns is a 1\.5; it must be a scalar tensor"),
        ((torch.ones(2), {}), r"The total of Returns is a tensor of shape \(2,\)"),
        ((torch.ones(()), {"part": 2.0}), r"The term 'part' of Returns is a 2\.0"),
        (
            (torch.ones(()), {"loss": torch.ones(())}),
            "Returns calls a term 'loss', but train/loss is logged already",
        ),
    ],
)
def test_what_is_no_scalar_tensor_is_told_with_its_name(
    given: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Returns, "given", given)
    with pytest.raises(UserError, match=says):
        tiny_lm(objective=Returns).loss(tokens())


class Telling(PreNormLayer):
    """Reports what it is given."""

    given: Any = None

    def auxiliary(self, memory: Any) -> Any:
        return self.given


@pytest.mark.parametrize(
    "given, says",
    [
        ({"extra": torch.ones(3)}, r"The auxiliary 'extra' of the layers is a tensor of shape \(3,\)"),
        ({"extra": 2.0}, r"The auxiliary 'extra' of the layers is a 2\.0"),
        ({"loss": torch.ones(())}, r"Layer\.auxiliary calls a term 'loss', but train/loss is logged already"),
    ],
)
def test_what_a_layer_reports_is_held_to_the_same_rules(
    given: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Telling, "given", given)
    with pytest.raises(UserError, match=says):
        tiny_lm(layer=Telling).loss(tokens())


def test_a_term_does_not_hide_what_layers_report() -> None:
    class Hides(FinalCrossEntropy):
        def forward(self, states: Any, read: Any, auxiliary: Any) -> Any:
            return super().forward(states, read, auxiliary)[0], {"balance": torch.zeros(())}

    lm = tiny_lm(layer=MixtureLayer, layer_in_block_only=True)
    lm.model.objective = Hides(lm.model.objective.d_model, 2)
    with pytest.raises(UserError, match="Hides calls a term 'balance', but train/balance is logged already"):
        lm.loss(tokens())


# ---- In training -------------------------------------------------------------------------------------------------


class Broken(FinalCrossEntropy):
    """Has a term that is not a number, and is not one itself."""

    def forward(self, states: Any, read: Any, auxiliary: Any) -> Any:
        total, _ = super().forward(states, read, auxiliary)
        return total * float("nan"), {"cross_entropy": total, "broken": total * float("nan")}


def test_a_total_that_is_no_number_stops_the_run_and_names_objective_and_term(tmp_path: Path) -> None:
    says = r"train/loss is nan \(Broken; train/broken is nan\) at step 1: training diverged"
    with pytest.raises(UserError, match=says):
        tiny_trainer(tmp_path, [DivergenceGuard()]).fit(tiny_lm(objective=Broken), TinyData())


class Logged(L.Callback):
    """Values of a metric at the ends of steps."""

    def __init__(self, name: str) -> None:
        self.name, self.values = name, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        if pl_module.ends_step(rest[-1]):
            self.values.append(float(trainer.callback_metrics[self.name]))


def test_terms_are_logged_as_means_of_the_step_and_validation_is_the_cross_entropy(tmp_path: Path) -> None:
    lm = tiny_lm(objective=GatedLosses)
    (first,), (rows,) = (DataLoader(RandomRows(SEQ_LEN, n), batch_size=n) for n in (8, 12))
    with torch.no_grad():
        expected = float(lm.model.losses(*first)[1]["share"])
    logged = Logged("train/share")
    trainer = tiny_trainer(tmp_path, [logged])
    trainer.fit(lm, TinyData(batch_size=4))  # Two micro-batches a step.
    assert len(logged.values) == lm.plan.steps and logged.values[0] == pytest.approx(expected, rel=1e-5)
    trainer.validate(lm, TinyData(), verbose=False)
    assert lm.evaluated is not None
    with torch.no_grad():
        assert lm.evaluated[0] == pytest.approx(float(lm.model.cross_entropy(*rows)), rel=1e-5)
        assert lm.evaluated[0] != pytest.approx(float(lm.loss(rows)), rel=1e-3)


def test_what_layers_report_is_logged(tmp_path: Path) -> None:
    lm = tiny_lm(layer=MixtureLayer, layer_in_block_only=True)
    (first,) = DataLoader(RandomRows(SEQ_LEN, 8), batch_size=8)
    with torch.no_grad():
        expected = float(lm.model.losses(*first)[1]["balance"])
    logged = Logged("train/balance")
    tiny_trainer(tmp_path, [logged]).fit(lm, TinyData(batch_size=4))  # Two micro-batches a step.
    assert len(logged.values) == lm.plan.steps and logged.values[0] == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_alone_rebuilds_the_objective() -> None:
    lm = tiny_lm(objective=partial(WeightedRecurrences, recurrences=[-1, 0], weights=[1.0, 2.0]))
    again = LoopedLM(**lm.hparams)
    assert again.component_specs() == lm.component_specs()


# ---- Losses at several recurrences -------------------------------------------------------------------------------


def test_weighted_losses_are_those_of_shorter_loops() -> None:
    model = moved(objective=partial(WeightedRecurrences, recurrences=[-1, 0], weights=[3.0, 1.0]))
    total, terms = model.losses(*tokens())
    after = {n: model.cross_entropy(*tokens(), num_recurrences=n) for n in (1, R)}
    assert list(terms) == ["loss_after_1", "loss_after_3"]
    for n, loss in after.items():
        torch.testing.assert_close(terms[f"loss_after_{n}"], loss, rtol=1e-12, atol=0)
    assert_same(model, total, (3 * after[R] + after[1]) / 4)


def test_weighted_losses_count_from_the_end_for_every_count() -> None:
    model = moved(objective=WeightedRecurrences)
    for r in (2, 3, 5):
        total, terms = model.losses(*tokens(), num_recurrences=r)
        assert list(terms) == [f"loss_after_{r - 1}", f"loss_after_{r}"]
        after = [float(model.cross_entropy(*tokens(), num_recurrences=n)) for n in (r - 1, r)]
        assert float(total) == pytest.approx(sum(after) / 2, rel=1e-12)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"recurrences": []}, r"0 weights for the recurrences \[\]: give at least one"),
        ({"weights": [1.0]}, r"1 weights for the recurrences \[-2, -1\]"),
        ({"weights": [1.0, 0.0]}, r"weights are \[1.0, 0.0\]; each must be positive"),
        ({"weights": [1.0, float("nan")]}, "each must be positive and finite"),
    ],
)
def test_bad_weights_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        WeightedRecurrences(8, 4, **arguments)


# ---- Exits -------------------------------------------------------------------------------------------------------


def plain_exits(model: LoopedTransformer, r: int) -> tuple[Tensor, Tensor]:
    """p and losses (r,N) of every token, one token and recurrence at a time."""
    states: list[Tensor] = []
    model.observer = lambda i, state: states.append(model.lanes.reduce(state))
    inputs, targets = tokens()
    model(inputs, num_recurrences=r)
    model.observer = None
    weight, bias = model.objective.gate.weight[0], model.objective.gate.bias[0]  # type: ignore[union-attr, index]
    losses, p = [], []
    for n in range(1, r + 1):
        logs = model(inputs, num_recurrences=n).log_softmax(-1)
        losses.append(-logs.gather(-1, targets.unsqueeze(-1)).flatten())
    stays = torch.ones(targets.numel(), dtype=torch.float64)
    for i, state in enumerate(states):
        leaves = (
            1 / (1 + torch.exp(-(state.flatten(0, 1) @ weight + bias)))
            if i < r - 1
            else torch.ones_like(stays)
        )
        p.append(stays * leaves)
        stays = stays * (1 - leaves)
    return torch.stack(p), torch.stack(losses)


@pytest.mark.parametrize("r, lanes", [(2, SingleLane), (5, SingleLane), (R, HyperConnectionLanes)])
def test_the_exit_distribution_is_the_plain_loop(r: int, lanes: Any) -> None:
    model = moved(objective=partial(ExitDistribution, beta=0.2), lanes=lanes)
    total, terms = model.losses(*tokens(), num_recurrences=r)
    p, losses = plain_exits(model, r)
    torch.testing.assert_close(p.sum(0), torch.ones_like(p[0]), rtol=1e-12, atol=0)
    expected, entropy = (p * losses).sum(0).mean(), -(p * p.log()).sum(0).mean()
    assert list(terms) == ["expected_loss", "mean_exit_step", "exit_entropy"]
    torch.testing.assert_close(terms["expected_loss"], expected)
    torch.testing.assert_close(terms["exit_entropy"], entropy)
    torch.testing.assert_close(terms["mean_exit_step"], sum((i + 1) * p[i].mean() for i in range(r)))
    assert_same(model, total, expected - 0.2 * entropy)


@pytest.mark.parametrize("r", [2, R, 5])
def test_the_ponder_cost_is_the_plain_loop(r: int) -> None:
    model = moved(objective=partial(PonderCost, beta=0.2, prior=0.4))
    total, terms = model.losses(*tokens(), num_recurrences=r)
    p, losses = plain_exits(model, r)
    q = [0.4 * 0.6**i for i in range(r)]
    divergence = sum((p[i] * (p[i] * sum(q) / q[i]).log()).mean() for i in range(r))
    expected = (p * losses).sum(0).mean()
    torch.testing.assert_close(terms["prior_kl"], divergence)
    assert list(terms) == ["expected_loss", "mean_exit_step", "prior_kl"]
    assert_same(model, total, expected + 0.2 * divergence)


@pytest.mark.parametrize("objective", [ExitDistribution, PonderCost])
def test_exits_start_at_one_half_and_cost_a_reading_of_every_state(objective: type[Objective]) -> None:
    model, plain = tiny_model(num_recurrences=R, objective=objective), tiny_model(num_recurrences=R)
    states = {i: torch.randn(2, 5, 64) for i in range(R)}
    p = model.objective.log_probabilities(states).exp()  # type: ignore[operator]
    torch.testing.assert_close(p[:, 0, 0], torch.tensor([0.5, 0.25, 0.25]))
    assert parameter_roles(model)["objective.gate.weight"] == "norm"
    sections = count_parameters(model)
    coda, head = 2 * sections.coda + 4 * 64 * 16, 2 * sections.head
    gates = 3 * R * 2 * 65
    assert flops_per_token(model, 16) - flops_per_token(plain, 16) == 3 * (R - 1) * (coda + head) + gates


def test_a_gate_far_out_gives_finite_losses_and_gradients() -> None:
    model = moved(objective=ExitDistribution)
    with torch.no_grad():
        model.objective.gate.bias.fill_(800.0)  # type: ignore[union-attr, operator]
    total, terms = model.losses(*tokens())
    assert float(terms["mean_exit_step"]) == pytest.approx(1.0) and bool(total.isfinite())
    assert all(bool(g.isfinite().all()) for g in gradients(model, total).values())


def test_exits_that_cannot_train_are_refused() -> None:
    with pytest.raises(
        UserError, match="ExitDistribution needs at least 2 recurrences in every step: with 1"
    ):
        tiny_model(num_recurrences=1, objective=ExitDistribution)
    with pytest.raises(UserError, match=r"PonderCost reads the states after recurrences \[0, 1\]"):
        tiny_model(num_recurrences=4, objective=PonderCost, bptt=TruncatedBPTT())
    for beta in (-0.1, float("inf"), float("nan")):
        with pytest.raises(UserError, match="beta is .*; it must be finite and not negative"):
            ExitDistribution(8, 2, beta=beta)
    for prior in (0.0, 1.0):
        with pytest.raises(UserError, match=r"prior is .*; it must lie in \(0, 1\)"):
            PonderCost(8, 2, prior=prior)
