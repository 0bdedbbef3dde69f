"""Layers of one's own: what they see, what they cost, and the shipped ones against plain formulas."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from looped_lm import (
    AdapterLayer,
    ExitDistribution,
    FinalCrossEntropy,
    LoopContext,
    LoopModulatedLayer,
    MixtureLayer,
    PonderCost,
    PreNormLayer,
    PreviousStateLayer,
    SharedKeysValuesLayer,
    SwiGLULayer,
    TruncatedBPTT,
    WeightedRecurrences,
)
from looped_lm.common.errors import UserError
from looped_lm.generation import CachedDecoder, RelativeChange, UncachedDecoder
from looped_lm.model.accounting import active_parameters, count_parameters, flops_per_token, parameter_roles
from looped_lm.training.description import run_record
from tests.support.own_components import CarryingLayer
from tests.support.run_records import record_fields
from tests.support.tiny import VOCAB, perturb, tiny_lm, tiny_model, tokens

D, HEAD, T = 64, 16, 16
SHIPPED: dict[str, Any] = {
    "swiglu": SwiGLULayer,
    "adapters": partial(AdapterLayer, rank=3),
    "modulated": LoopModulatedLayer,
    "shared": SharedKeysValuesLayer,
    "mixture": partial(MixtureLayer, num_experts=4),
    "previous": PreviousStateLayer,
    "carrying": CarryingLayer,
}


def model_with(layer: Any, r: int = 3, **overrides: Any) -> Any:
    model = tiny_model(
        layer=layer, layer_in_block_only=True, num_recurrences=r, size=1, head_dim=HEAD, **overrides
    )
    perturb(model)
    return model.double()


class Watching(PreNormLayer):
    """Says what it sees."""

    seen: list[tuple[int, int, bool, Any]] = []

    def forward(self, x: Tensor, context: LoopContext, cache: Any = None) -> Any:
        own = None if context.memory is None else int(context.memory)
        self.seen.append((context.i, context.num_recurrences, context.e is None, own))
        count = torch.tensor(1 if own is None else own + 1)
        return super().forward(x, context, cache), count


def test_a_layer_sees_the_recurrence_and_its_own_memory() -> None:
    model = tiny_model(layer=Watching, num_recurrences=2, prelude_layers=1, recurrent_layers=1, coda_layers=1)
    Watching.seen.clear()
    model.hidden(torch.zeros(1, 4, dtype=torch.int64))
    assert Watching.seen == [(0, 1, True, None), (0, 2, False, None), (1, 2, False, 1), (0, 1, True, None)]


def test_prelude_and_coda_may_keep_the_papers_layer() -> None:
    model = tiny_model(layer=SwiGLULayer, layer_in_block_only=True)
    assert [type(layer) for layer in (*model.prelude, *model.coda)] == [PreNormLayer] * 2
    assert {type(layer) for layer in model.block} == {SwiGLULayer}
    assert {type(layer) for layer in tiny_model(layer=SwiGLULayer).layers()} == {SwiGLULayer}


@pytest.mark.parametrize("name", SHIPPED)
def test_cached_decoding_equals_uncached(name: str) -> None:
    model = model_with(SHIPPED[name], recurrent_layers=2)
    prompts = [[3, 7, 5, 1], [2, 9]]
    cached, plain = CachedDecoder(model, prompts, 6), UncachedDecoder(model, prompts, 6)
    with torch.inference_mode():
        for token in range(6):
            ours, expected = cached.logits(), plain.logits()
            assert torch.allclose(ours, expected, rtol=0, atol=1e-9)
            for decoder in (cached, plain):
                decoder.append(torch.tensor([token, token + 1]))


def test_shared_keys_and_values_keep_one_entry_per_layer() -> None:
    sizes = {}
    for layer in (PreNormLayer, SharedKeysValuesLayer):
        decoder = CachedDecoder(model_with(layer, recurrent_layers=2), [[1, 2, 3]], 4)
        with torch.inference_mode():
            decoder.logits()
        sizes[layer] = decoder.cache.bytes
    # One prelude and one coda layer, two layers of the block at r = 3.
    assert sizes[PreNormLayer] / sizes[SharedKeysValuesLayer] == (2 + 3 * 2) / (2 + 2)


def test_an_early_exit_goes_with_shared_keys_and_values() -> None:
    decoder = CachedDecoder(model_with(SharedKeysValuesLayer), [[1, 2, 3]], 4, exit_rule=RelativeChange(1e9))
    with torch.inference_mode():
        decoder.logits()
        decoder.append(torch.tensor([4]))
        decoder.logits()
    assert decoder.recurrences.tolist() == [2]


def attended(layer: Any, y: Tensor, source: Tensor) -> Tensor:
    """Causal attention of one row y (T,d) over keys and values of `source`, by plain loops over heads."""
    cos, sin = (
        torch.stack([f(torch.arange(HEAD // 2, dtype=torch.float64) * 0) for _ in y])
        for f in (torch.cos, torch.sin)
    )
    positions = torch.arange(len(y), dtype=torch.float64)
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        x = torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()

    q, k, v = y @ layer.attn.q.weight.T, source @ layer.attn.k.weight.T, source @ layer.attn.v.weight.T
    out = []
    for h in range(D // HEAD):
        part = slice(h * HEAD, (h + 1) * HEAD)
        scores = turned(q[:, part]) @ turned(k[:, part]).T / math.sqrt(HEAD)
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        out.append(scores.softmax(dim=-1) @ v[:, part])
    return torch.cat(out, dim=-1) @ layer.attn.out.weight.T


def normed(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def relu2(layer: Any, x: Tensor) -> Tensor:
    return F.relu(x @ layer.mlp.fc_in.weight.T).square() @ layer.mlp.fc_out.weight.T


def run(layer: Any, x: Tensor, i: int, memory: Any = None) -> Any:
    model = tiny_model(size=1, head_dim=HEAD).double()
    cos, sin = model.rotary._tables(len(x), torch.float64, None)
    out = layer(x[None], LoopContext(cos, sin, i, 3, x[None], memory))
    return out if isinstance(out, tuple) else (out, None)


@pytest.fixture
def stream() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, D, generator=generator, dtype=torch.float64) for _ in range(2)]


def test_later_recurrences_read_keys_and_values_of_the_first(stream: list[Tensor]) -> None:
    layer = model_with(SharedKeysValuesLayer).layer
    first, second = stream
    _, memory = run(layer, first, 0)
    out, _ = run(layer, second, 1, memory)
    x = second + attended(layer, normed(second, layer.norm_attn), normed(first, layer.norm_attn))
    expected = x + relu2(layer, normed(x, layer.norm_mlp))
    assert torch.allclose(out[0], expected, rtol=0, atol=1e-10)


def test_keys_and_values_of_the_layer_s_own_output_before(stream: list[Tensor]) -> None:
    layer = model_with(PreviousStateLayer).layer
    first, second = stream
    before, memory = run(layer, first, 0)
    assert torch.equal(before, memory)
    out, _ = run(layer, second, 1, memory)
    x = second + attended(layer, normed(second, layer.norm_attn), normed(before[0], layer.norm_attn))
    assert torch.allclose(out[0], x + relu2(layer, normed(x, layer.norm_mlp)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("i", [0, 2])
def test_adapters_are_those_of_the_recurrence(i: int, stream: list[Tensor]) -> None:
    layer = model_with(partial(AdapterLayer, rank=3)).layer
    x = stream[0]
    out, _ = run(layer, x, i)

    def adapted(adapter: Any, y: Tensor) -> Tensor:
        return (y @ adapter.down[i]) @ adapter.up[i]

    y = normed(x, layer.norm_attn)
    x = x + attended(layer, y, y) + adapted(layer.adapter_attn, y)
    y = normed(x, layer.norm_mlp)
    assert torch.allclose(out[0], x + relu2(layer, y) + adapted(layer.adapter_mlp, y), rtol=0, atol=1e-10)


@pytest.mark.parametrize("i", [0, 5])
def test_modulation_scales_the_norms_by_the_recurrence(i: int, stream: list[Tensor]) -> None:
    layer = model_with(LoopModulatedLayer).layer
    x = stream[0]
    out, _ = run(layer, x, i)
    angles = [(i + 1) * 10_000.0 ** (-2 * j / D) for j in range(D // 2)]
    p = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
    y = normed(x, layer.norm_attn) * (1 + layer.scale_attn.weight @ p)
    x = x + attended(layer, y, y)
    y = normed(x, layer.norm_mlp) * (1 + layer.scale_mlp.weight @ p)
    assert torch.allclose(out[0], x + relu2(layer, y), rtol=0, atol=1e-10)


def test_swiglu(stream: list[Tensor]) -> None:
    layer = model_with(SwiGLULayer).layer
    x = stream[0]
    out, _ = run(layer, x, 0)
    y = normed(x, layer.norm_attn)
    x = x + attended(layer, y, y)
    y, m = normed(x, layer.norm_mlp), layer.mlp
    gate = y @ m.gate.weight.T
    hidden = gate * torch.sigmoid(gate) * (y @ m.fc_in.weight.T)
    assert torch.allclose(out[0], x + hidden @ m.fc_out.weight.T, rtol=0, atol=1e-10)
    assert m.gate.out_features == 176 and 3 * 176 <= 8 * D + 24


def test_flops_by_recurrence_counts_and_roles_by_hand() -> None:
    r = 3
    plain = model_with(PreNormLayer, recurrent_layers=1)
    base = flops_per_token(plain, T)
    shared = model_with(SharedKeysValuesLayer, recurrent_layers=1)
    assert base - flops_per_token(shared, T) == 3 * (r - 1) * 2 * (2 * D * D)
    adapters = model_with(partial(AdapterLayer, rank=3), recurrent_layers=1)
    assert flops_per_token(adapters, T) - base == 3 * r * 2 * (2 * 2 * 3 * D)
    own = count_parameters(adapters).n_rec - count_parameters(plain).n_rec
    assert own == 2 * r * 2 * 3 * D
    roles = parameter_roles(adapters)
    assert roles["block.0.adapter_attn.down"] == "norm" and roles["block.0.attn.q.weight"] == "matrix"
    modulated = model_with(LoopModulatedLayer, recurrent_layers=1)
    assert flops_per_token(modulated, T) - base == 3 * r * 2 * D
    assert parameter_roles(modulated)["block.0.scale_mlp.weight"] == "norm"
    sections = count_parameters(modulated)
    assert active_parameters(modulated) == (sections.n_once, sections.n_rec), "no experts, so all are active"


def test_what_cannot_train_or_run_is_refused() -> None:
    with pytest.raises(UserError, match="SharedKeysValuesLayer has parameters that act in the first alone"):
        tiny_lm(layer=SharedKeysValuesLayer, num_recurrences=4, bptt=TruncatedBPTT())
    with pytest.raises(UserError, match="AdapterLayer has separate parameters for every recurrence"):
        tiny_lm(layer=AdapterLayer, num_recurrences=4, bptt=TruncatedBPTT())
    with pytest.raises(UserError, match="AdapterLayer has separate parameters for each of 3 recurrences"):
        model_with(AdapterLayer)(torch.zeros(1, 4, dtype=torch.int64), num_recurrences=4)
    with pytest.raises(UserError, match="rank is 0"):
        tiny_model(layer=partial(AdapterLayer, rank=0))


def test_states_after_each_recurrence_lead_to_the_logits_of_fewer() -> None:
    model = model_with(PreNormLayer)
    tokens = torch.arange(8)[None]
    for i, state in enumerate(model.states(tokens)):
        expected = model(tokens, num_recurrences=i + 1)
        assert torch.allclose(model.logits(model.read_out(state, tokens)), expected, rtol=0, atol=1e-12)


# ---- Mixture of experts --------------------------------------------------------------------------------------------


def test_a_token_gets_the_weighted_outputs_of_its_experts(stream: list[Tensor]) -> None:
    layer = model_with(partial(MixtureLayer, num_experts=4, hidden=24)).layer
    x = stream[0]
    out, (balance, choices) = run(layer, x, 0)
    y = normed(x, layer.norm_attn)
    x = x + attended(layer, y, y)
    y, experts = normed(x, layer.norm_mlp), layer.mlp.experts
    probabilities = (y @ layer.mlp.router.weight.T).softmax(dim=-1)
    expected, chosen = x.clone(), torch.zeros(4, dtype=torch.int64)
    for t, p in enumerate(probabilities.tolist()):
        best = sorted(range(4), key=lambda e: -p[e])[:2]
        for e in best:
            chosen[e] += 1
            mlp = F.relu(y[t] @ experts[e].fc_in.weight.T).square() @ experts[e].fc_out.weight.T
            expected[t] += p[e] / sum(p[b] for b in best) * mlp
    assert torch.allclose(out[0], expected, rtol=0, atol=1e-10) and torch.equal(choices, chosen)
    loads = chosen / chosen.sum()
    # One of three recurrences.
    assert float(balance) == pytest.approx(4 * float((loads * probabilities.mean(dim=0)).sum()) / 3)


def test_a_mixture_s_counts_by_hand() -> None:
    model = model_with(partial(MixtureLayer, num_experts=5, hidden=24), recurrent_layers=1)
    plain = model_with(PreNormLayer, recurrent_layers=1)
    expert, router, dense = 2 * 24 * D, 5 * D, 8 * D * D
    n_once, n_rec = active_parameters(model)
    assert count_parameters(model).n_rec == count_parameters(plain).n_rec - dense + router + 5 * expert
    assert n_rec == count_parameters(plain).n_rec - dense + router + 2 * expert
    assert n_once == count_parameters(plain).n_once
    saved = dense - router - 2 * expert
    assert flops_per_token(plain, T) - flops_per_token(model, T) == 3 * 3 * 2 * saved
    record = tiny_record(MixtureLayer)
    assert record["n_rec_active"] < record["n_rec"] and record["n_once_active"] == record["n_once"]
    assert tiny_record(PreNormLayer)["n_rec_active"] is None


def tiny_record(layer: Any) -> dict[str, Any]:
    of_the_run = (
        "code_version status stop_reason data_manifest_hash tokenizer unique_tokens steps steps_planned tokens "
        "tokens_target training_flops flops_budget val_loss val_tokens val_step wall_seconds hardware precision "
        "world_size flops_per_token"
    )
    fields = record_fields()
    lm = tiny_lm(layer=layer, layer_in_block_only=True)
    return run_record(lm, **{name: fields[name] for name in of_the_run.split()}).to_dict()


def test_the_balance_loss_is_added_logged_and_the_same_recomputed() -> None:
    make = partial(MixtureLayer, num_experts=4, balance=0.3)
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    gradients = []
    for recompute in (False, True):
        model = model_with(make, recompute=recompute)
        total, terms = model.losses(tokens[:, :-1], tokens[:, 1:])
        total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert float(total - terms["balance"]) == pytest.approx(
        float(model.cross_entropy(tokens[:, :-1], tokens[:, 1:])), abs=1e-12
    )
    # Two layers of the block at about 1 each.
    assert 0.3 <= float(terms["balance"]) < 2 * 0.3 * 4
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


def test_what_leaves_no_choice_of_experts_is_refused() -> None:
    for arguments, message in (
        ({"top_k": 8}, "top_k is 8 of 8 experts"),
        ({"hidden": 0}, "hidden is 0"),
        ({"balance": -1.0}, "balance is -1.0"),
        ({"balance": math.inf}, "balance is inf"),
    ):
        with pytest.raises(UserError, match=message):
            tiny_model(layer=partial(MixtureLayer, **arguments))


@pytest.mark.parametrize("layer", SHIPPED.values(), ids=SHIPPED)
def test_a_model_in_bf16_computes_what_it_computes_in_float64(layer: Any) -> None:
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for dtype in (torch.float64, torch.bfloat16):
        model = model_with(layer).to(dtype)
        loss, _ = model.losses(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        assert all(p.grad.dtype == dtype for p in model.parameters())
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], abs=0.03)


class Answers(PreNormLayer):
    """Returns what `answer` makes of its output."""

    answer: Any = None

    def forward(self, x: Tensor, context: LoopContext, cache: Any = None) -> Any:
        return self.answer(super().forward(x, context, cache))


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda x: None, "a NoneType for a stream"),
        (lambda x: [x, x], "a list for a stream"),
        (lambda x: (x, x, x), "a tuple for a stream"),
        (lambda x: x[:, :-1], "a tensor of shape"),
        (lambda x: x[:1], "a tensor of shape"),
    ],
)
def test_a_layer_that_returns_another_stream_is_named(
    answer: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "answer", staticmethod(answer))
    with pytest.raises(UserError, match=f"Answers.forward returns {says}"):
        tiny_model(layer=Answers)(tokens()[0])


def expert_shares(model: Any, rows: Tensor) -> Tensor:
    """Shares (layers, experts) of all choices, over all recurrences, that each expert gets."""
    chosen: dict[Any, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda layer, _, out: chosen.__setitem__(layer, out[1][1]))
        for layer in model.block
    ]
    with torch.no_grad():
        model.hidden(rows)
    for hook in hooks:
        hook.remove()
    counts = torch.stack([chosen[layer] for layer in model.block]).double()
    return counts / counts.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("objective", [FinalCrossEntropy, WeightedRecurrences, ExitDistribution, PonderCost])
def test_every_objective_adds_the_balance_loss(objective: Any) -> None:
    totals = []
    for balance in (0.0, 0.5):
        model = model_with(partial(MixtureLayer, balance=balance), objective=objective)
        total, terms = model.losses(*tokens())
        totals.append(float(total))
    assert totals[1] - totals[0] == pytest.approx(float(terms["balance"]), abs=1e-12)
    assert float(terms["balance"]) >= 0.4


def test_experts_without_tokens_get_gradients_of_zero() -> None:
    model = model_with(partial(MixtureLayer, num_experts=12))
    row = torch.tensor([[5]])  # One token: at most two experts at each of three recurrences.
    model.losses(row, row)[0].backward()
    shares = expert_shares(model, row)[0]
    assert (shares == 0).sum() >= 6
    for share, expert in zip(shares, model.layer.mlp.experts, strict=True):
        for p in expert.parameters():
            assert p.grad is not None and bool(p.grad.any()) == bool(share > 0)


def test_recurrences_without_gradients_do_not_push_the_router() -> None:
    model = model_with(partial(MixtureLayer, num_experts=4, balance=0.7), bptt=TruncatedBPTT(window=1))
    layer, seen = model.layer, []
    layer.mlp.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].detach()))
    _, terms = model.losses(*tokens())
    (ours,) = torch.autograd.grad(terms["balance"], layer.mlp.router.weight)
    # The formula, row by row; the last of three recurrences alone, whose input the router cannot change.
    weight = layer.mlp.router.weight.detach().requires_grad_()
    values = []
    for x in seen:
        rows = []
        for row in x:
            probabilities = (row @ weight.T).softmax(dim=-1)
            chosen = probabilities.topk(2, dim=-1).indices.flatten()
            loads = torch.bincount(chosen, minlength=4) / len(chosen)
            rows.append(4 * (loads * probabilities.mean(dim=0)).sum())
        values.append(0.7 * sum(rows) / len(rows) / 3)
    assert len(values) == 3 and float(terms["balance"]) == pytest.approx(float(sum(values)), abs=1e-7)
    (expected,) = torch.autograd.grad(values[-1], weight)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-7) and ours.abs().max() > 1e-4


@pytest.mark.slow
def test_the_balance_loss_lowers_the_share_of_the_busiest_expert() -> None:
    def walks(rows: int, seed: int) -> Tensor:
        """Rows that step up by 1 to 3 from anywhere: something to learn."""
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 4, (rows, T + 1), generator=generator).cumsum(dim=1)
        return (steps + torch.randint(VOCAB, (rows, 1), generator=generator)) % VOCAB

    probe = walks(32, 9)[:, :-1]
    before: list[float] = []
    after: dict[float, list[float]] = {0.0: [], 0.1: []}
    # A single seed tells little: the share differs by as much between seeds.
    for seed in range(3):
        for balance, shares in after.items():
            model = tiny_model(
                seed=seed,
                layer=partial(MixtureLayer, balance=balance),
                layer_in_block_only=True,
                num_recurrences=3,
            )
            before.append(float(expert_shares(model, probe).max()))
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            for step in range(60):
                rows = walks(16, 100 + step)
                optimizer.zero_grad()
                model.losses(rows[:, :-1], rows[:, 1:])[0].backward()
                optimizer.step()
            shares.append(float(expert_shares(model, probe).max()))
    mean = {balance: sum(shares) / 3 for balance, shares in after.items()}
    assert 1 / 8 <= mean[0.1] < mean[0.0] - 0.01 and mean[0.1] < sum(before) / 6


# ---- Documents within a row ----------------------------------------------------------------------------------------

BOS = 60
#: A row of three documents, the first without its beginning.
DOCUMENTS = [[7, 9, 11], [BOS, 4, 5, 6, 8], [BOS, 3, 2]]


@pytest.mark.parametrize("name", ["plain", *SHIPPED])
def test_documents_of_a_row_do_not_see_each_other(name: str) -> None:
    """Logits of each document are those of the document alone: rotary attention knows distances only.

    The tables were made in fp32, and so know them to seven digits.
    """
    layer = {"plain": PreNormLayer, **SHIPPED}[name]
    model = model_with(layer, recurrent_layers=2, document_start=BOS)
    row = torch.tensor([[token for document in DOCUMENTS for token in document]])
    with torch.no_grad():
        together = model(row)
        alone = torch.cat([model(torch.tensor([document])) for document in DOCUMENTS], dim=1)
        read = model.logits(model.read_out(model.states(row)[-1], row))
    assert torch.allclose(together, alone, rtol=0, atol=3e-6)
    assert torch.allclose(together, read, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["plain", *SHIPPED])
def test_cached_decoding_keeps_documents_apart(name: str) -> None:
    model = model_with({"plain": PreNormLayer, **SHIPPED}[name], document_start=BOS)
    prompts = [[BOS, 3, 7, BOS, 5, 1], [2, 9]]
    cached, plain = CachedDecoder(model, prompts, 8), UncachedDecoder(model, prompts, 8)
    with torch.inference_mode():
        for chosen in ([4, 5], [BOS, 6], [7, BOS], [8, 9], [1, 2], [3, 4]):
            assert torch.allclose(cached.logits(), plain.logits(), rtol=0, atol=1e-9)
            for decoder in (cached, plain):
                decoder.append(torch.tensor(chosen))


def test_without_a_document_start_a_row_is_one_context() -> None:
    model = model_with(PreNormLayer)
    assert model._start(torch.tensor([[BOS, 1, BOS]]), None)[1].mask is None
    row = torch.tensor([[1, 2, BOS, 3]])
    changed = torch.tensor([[4, 2, BOS, 3]])
    assert not torch.equal(model(row)[0, -1], model(changed)[0, -1])
