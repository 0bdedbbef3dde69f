"""What is read after each recurrence, and at exits, against plain loops over tokens."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from looped_lm import ExitDistribution
from looped_lm.common.errors import UserError
from looped_lm.evaluation.lens import Lens, exit_steps
from looped_lm.generation import CachedDecoder, ExitProbability
from tests.support.cli_options import tiny_options
from tests.support.tiny import perturb, tiny_model


def exit_model(r: int = 4) -> Any:
    model = tiny_model(num_recurrences=r, objective=ExitDistribution)
    perturb(model)
    with torch.no_grad():
        model.objective.gate.weight.mul_(20)
    return model.double()


def hazards(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """lambda_i (B,T) by its formula."""
    gate = model.objective.gate
    return [1 / (1 + torch.exp(-(state @ gate.weight[0] + gate.bias[0]))) for state in model.states(tokens)]


def test_each_reading_against_a_plain_loop() -> None:
    model = exit_model()
    rows = torch.randint(61, (3, 10), generator=torch.Generator().manual_seed(0))
    tokens, targets = rows[:, :-1], rows[:, 1:]
    lens = Lens(model, (0.2, 0.6, 1.0))
    for part in (slice(0, 1), slice(1, 3)):
        lens.add(tokens[part], targets[part])
    with torch.no_grad():
        logits = [model(tokens, num_recurrences=i + 1) for i in range(4)]
        gates = hazards(model, tokens)
    p = [x.softmax(dim=-1) for x in logits]
    where = [(b, t) for b in range(3) for t in range(9)]
    for i, row in enumerate(lens.depths()):
        loss = [-math.log(p[i][b, t, targets[b, t]]) for b, t in where]
        same = [int(p[i][b, t].argmax()) == int(p[3][b, t].argmax()) for b, t in where]
        kl = [float((p[3][b, t] * (p[3][b, t] / p[i][b, t]).log()).sum()) for b, t in where]
        assert row.recurrences == i + 1
        assert row.loss == pytest.approx(sum(loss) / 27) and row.agreement == pytest.approx(sum(same) / 27)
        assert row.kl == pytest.approx(sum(kl) / 27, abs=1e-12)
    assert row.loss == pytest.approx(float(model.cross_entropy(tokens, targets)))
    for row in lens.exits():
        steps, losses = [], []
        for b, t in where:
            stay, i = 1.0, 0
            while i < 3 and 1 - stay * (1 - float(gates[i][b, t])) < row.threshold:
                stay, i = stay * (1 - float(gates[i][b, t])), i + 1
            steps.append(i + 1)
            losses.append(-math.log(p[i][b, t, targets[b, t]]))
        assert row.mean_exit == pytest.approx(sum(steps) / 27) and row.loss == pytest.approx(sum(losses) / 27)
    means = [row.mean_exit for row in lens.exits()]
    assert means == sorted(means) and means[0] < means[-1]
    assert Lens(tiny_model()).exits() == []


def test_an_exit_step_is_the_first_that_reaches_the_threshold() -> None:
    log_p = torch.tensor([[0.2, 0.6], [0.3, 0.3], [0.5, 0.1]]).log()
    assert exit_steps(log_p, 0.45).tolist() == [1, 0] and exit_steps(log_p, 2.0).tolist() == [2, 2]


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.95])
def test_decoding_leaves_where_the_exit_distribution_has_left(threshold: float) -> None:
    """One row of one token after a prompt: its state is that of a whole pass as long as no earlier token left."""
    model = exit_model()
    decoder = CachedDecoder(model, [[1, 2, 3]], 2, exit_rule=ExitProbability(threshold, model.objective))
    with torch.inference_mode():
        decoder.logits()
        assert decoder.recurrences.tolist() == [4], "prompts run all recurrences"
        decoder.append(torch.tensor([7]))
        decoder.logits()
        gates = [float(g[0, -1]) for g in hazards(model, torch.tensor([[1, 2, 3, 7]]))]
    stay, used = 1.0, 0
    while used < 4:
        stay, used = stay * (1 - gates[used]), used + 1
        if 1 - stay >= threshold:
            break
    assert decoder.recurrences.tolist() == [used]


def test_an_exit_probability_needs_exits_and_a_probability() -> None:
    with pytest.raises(
        UserError, match="trained with ExitDistribution or PonderCost; this one has FinalCross"
    ):
        ExitProbability(0.5, tiny_model().objective)
    with pytest.raises(UserError, match="The exit probability is 1.5"):
        ExitProbability(1.5, exit_model().objective)


def test_evaluate_shows_every_reading(run_cli: Any, trained_exit: str, in_folder: Any) -> None:
    status, out = run_cli("evaluate", "--ckpt", trained_exit, "--tasks", "recurrences", "--out", "found.json")
    assert status == 0, out
    assert "same top token" in out and "exit threshold" in out
    found = json.loads((in_folder / "found.json").read_text())
    last = found["after_each_recurrence"][-1]
    (at_r,) = [row for row in found["validation_loss"] if row["recurrences"] == last["recurrences"]]
    assert last["loss"] == pytest.approx(at_r["loss"], abs=1e-6)
    assert last["agreement"] == 1 and last["kl"] == 0 and len(found["exits"]) == 6


@pytest.fixture
def trained_exit(run_cli: Any, in_folder: Any, tiny_data_dir: Any) -> str:
    status, out = run_cli("fit", "--config", "r4_exit.yaml", *tiny_options(tiny_data_dir, steps=1))
    assert status == 0, out
    (path,) = in_folder.glob("runs/r4_exit/version_0/checkpoints/*.ckpt")
    return str(path)
