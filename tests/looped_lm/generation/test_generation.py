"""Generation: the cache against whole passes, early exit, sampling."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from datamodules import ByteTokenizer
from datamodules.tokenizers import JSONTokenizer
from looped_lm import (
    AdditiveInjection,
    HyperConnectionLanes,
    LinearInjection,
    LoopContext,
    PassthroughInjection,
)
from looped_lm.generation import (
    CachedDecoder,
    Decoder,
    ExitRule,
    Generated,
    KLChange,
    RelativeChange,
    Sampling,
    UncachedDecoder,
    continuation,
    drift,
    stream,
)
from looped_lm.model.transformer import LoopedTransformer
from tests.support.tiny import VOCAB, perturb, tiny_model, tokens

PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], [11, 12, 13]]
LOOPS: dict[str, dict[str, Any]] = {
    "linear": {"injection": LinearInjection},
    "additive": {"injection": AdditiveInjection},
    "lanes": {"injection": PassthroughInjection, "lanes": HyperConnectionLanes},
}


def perturbed(loop: str = "linear", r: int = 4, **overrides: Any) -> LoopedTransformer:
    """With logits far apart, so that rounding does not decide the most likely token, and states that keep changing."""
    model = tiny_model(num_recurrences=r, **{**LOOPS[loop], **overrides})
    perturb(model)
    with torch.no_grad():
        model.head.weight.mul_(4.0)
        if loop != "lanes":
            for layer in model.block:
                layer.attn.out.weight.mul_(3.0)  # type: ignore[union-attr, operator]
        if loop == "linear":
            # As a contraction the loop would settle at once, and all recurrences would have the same entries.
            turn = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))[0]
            model.injection.proj.weight[:, 64:] -= 2.0 * turn  # type: ignore[union-attr, operator]
    return model


def decode(decoder: Decoder, n: int = 64, **options: Any) -> Generated:
    return Generated.collect(stream(decoder, n, **options))


@pytest.mark.parametrize("r", [1, 2, 4, 8])
@pytest.mark.parametrize("loop", LOOPS)
def test_cached_and_uncached_greedy_decoding_agree(loop: str, r: int) -> None:
    """64 tokens, prompts of different lengths in one batch, far past the 16 tokens of training."""
    model = perturbed(loop, r, n_kv_heads=2)
    cached = decode(CachedDecoder(model, PROMPTS, 64))
    uncached = decode(UncachedDecoder(model, PROMPTS, 64))
    assert cached.tokens == uncached.tokens
    assert [len(row) for row in cached.tokens] == [64] * 3
    torch.testing.assert_close(
        torch.tensor(cached.log_probs), torch.tensor(uncached.log_probs), atol=1e-4, rtol=1e-4
    )
    assert len({tuple(row) for row in cached.tokens}) == 3, "prompts that are ignored would agree, too"


@pytest.mark.parametrize("r", [1, 3, 8])
def test_any_number_of_recurrences(r: int) -> None:
    model = perturbed(r=4)
    cached = decode(CachedDecoder(model, PROMPTS, 16, r), 16)
    assert cached.tokens == decode(UncachedDecoder(model, PROMPTS, 16, r), 16).tokens
    assert cached.recurrences == [[r] * 16] * 3
    with pytest.raises(ValueError, match="num_recurrences is 0"):
        CachedDecoder(model, PROMPTS, 16, 0)


def test_a_row_does_not_depend_on_its_batch() -> None:
    model = perturbed()
    sampling = Sampling(temperature=1.0, seed=3)
    together = decode(CachedDecoder(model, PROMPTS, 16), 16, sampling=sampling)
    alone = decode(CachedDecoder(model, PROMPTS[:1], 16), 16, sampling=sampling)
    assert together.tokens[0] == alone.tokens[0]


def slot_reference(model: LoopedTransformer, ids: list[int], used: list[int], k: int) -> torch.Tensor:
    """Logits after every decoded token and the last one of the prompt, one token at a time, from the rule of slots.

    Plain lists keep what the block reads, for every token and each of its `used` recurrences. A later token at
    recurrence i sees of an earlier one the last recurrence that is i modulo k, or its very last if there is none.
    """
    # The pass over the prompt, in which each recurrence sees the same one of earlier tokens, gave the first new token.
    prompt = len(ids) - len(used) + 1
    r = model.num_recurrences
    entries: list[list[torch.Tensor]] = []
    once: dict[str, list[torch.Tensor]] = {"prelude": [], "coda": []}
    out = []

    def layer(module: Any, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        """The layer at the last position, if it reads `past` at earlier positions."""
        both = torch.stack([*past, x])[None]
        context = LoopContext(*model.rotary(both.shape[1]))
        return module(both, context)[0, -1]

    def seen(own: list[torch.Tensor], i: int) -> torch.Tensor:
        return own[max((n for n in range(len(own)) if n % k == i % k), default=len(own) - 1)]

    for t, token in enumerate(ids):
        e = model.norm_emb(model.embedding.weight[token])
        past, x = list(once["prelude"]), e
        once["prelude"].append(x)
        e = layer(model.prelude[0], x, past)
        s, own = model.injection.initial_state(e), []
        for i in range(r if t < prompt else used[t - prompt + 1]):
            u = model.injection(e, s, i)
            own.append(u)
            s = model.norm_recur(
                layer(model.block[0], u, [p[i] if t < prompt else seen(p, i) for p in entries])
            )
        entries.append(own)
        past = list(once["coda"])
        once["coda"].append(s)
        out.append(model.logits(model.norm_final(layer(model.coda[0], s, past))))
    return torch.stack(out[prompt - 1 :])


@pytest.mark.parametrize("rule", [None, RelativeChange(0.4)], ids=["all", "early exit"])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
@torch.no_grad()
def test_budget_and_early_exit_follow_the_rule_of_slots(k: int, rule: ExitRule | None) -> None:
    model = perturbed(r=8)
    decoder = CachedDecoder(model, PROMPTS[1:2], 12, budget=k, exit_rule=rule)
    generated = decode(decoder, 12)
    (new,), (used,), (log_probs,) = generated.tokens, generated.recurrences, generated.log_probs
    if rule is not None:
        assert 2 < min(used) < 8, "choose another threshold: this one leaves at once, or never"
    logits = slot_reference(model, [*PROMPTS[1], *new[:-1]], used, k)
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=1e-4)
    # Prelude and coda have a layer each, the block has one with k slots: keys and values, 8 + 12 tokens, 4 heads of 16.
    assert decoder.cache.bytes == (2 + k) * 2 * 20 * 64 * 4


def test_a_smaller_budget_reports_its_drift() -> None:
    model = perturbed()
    budgets = {}
    for k in (1, 2, 4):
        decoder = CachedDecoder(model, PROMPTS, 32, budget=k)
        budgets[k] = drift(decoder, decode(decoder, 32))
    assert budgets[4].mean < 1e-5 and budgets[4].tokens == 96
    assert budgets[1].mean > 1e-3 and budgets[2].mean > 1e-3
    assert "nats over 96 tokens" in str(budgets[1])


@pytest.mark.parametrize("budget", [0, 5])
def test_an_impossible_budget_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"KV budget is {budget}.*1 to the 4"):
        CachedDecoder(perturbed(), PROMPTS, 4, budget=budget)


@pytest.mark.parametrize("rule", [RelativeChange, KLChange])
@pytest.mark.parametrize("loop", LOOPS)
def test_early_exit_leaves_when_the_state_has_settled(rule: type[ExitRule], loop: str) -> None:
    model = perturbed(loop, 4)
    never = decode(CachedDecoder(model, PROMPTS, 24, exit_rule=rule(1e-30)), 24)
    plain = decode(CachedDecoder(model, PROMPTS, 24), 24)
    assert never.tokens == plain.tokens and never.recurrences == plain.recurrences
    at_once = decode(CachedDecoder(model, PROMPTS, 24, exit_rule=rule(1e30)), 24)
    # Two states are needed to see a change; the prompt always gets all recurrences.
    assert at_once.recurrences == [[4] + [2] * 23] * 3


def test_a_row_exits_alone_as_in_company() -> None:
    """Rows leave at different recurrences, and that changes neither them nor the others."""
    model = perturbed(r=8)
    rule = RelativeChange(0.3)
    together = decode(CachedDecoder(model, PROMPTS, 24, exit_rule=rule), 24)
    used = {n for row in together.recurrences for n in row[1:]}
    assert len(used) > 1, "choose another threshold: this one separates nothing"
    for prompt, row, recurrences in zip(PROMPTS, together.tokens, together.recurrences, strict=True):
        alone = decode(CachedDecoder(model, [prompt], 24, exit_rule=rule), 24)
        assert alone.tokens == [row] and alone.recurrences == [recurrences]


@torch.no_grad()
def test_early_exit_stops_where_the_states_of_a_whole_pass_say() -> None:
    """The first decoded token, whose past has all recurrences, against the observer's states of an uncached pass."""
    model = perturbed(r=8)
    prompt = PROMPTS[1]
    decoder = CachedDecoder(model, [prompt], 2, exit_rule=RelativeChange(0.3))
    generated = decode(decoder, 2)
    states: list[torch.Tensor] = []
    model.observer = lambda i, state: states.append(state[0, -1])
    model(torch.tensor([[*prompt, generated.tokens[0][0]]]))
    changes = [float((b - a).norm() / b.norm()) for a, b in zip(states, states[1:], strict=False)]
    expected = next(i + 2 for i, change in enumerate(changes) if change < 0.3)
    assert 2 < expected < 8 and generated.recurrences[0][1] == expected


@torch.no_grad()
def test_early_exit_by_kl_stops_where_the_distributions_of_shorter_passes_say() -> None:
    """p_i is what a pass of i recurrences predicts; without a coda nothing else of the past depends on i."""
    model = perturbed(r=8, coda_layers=0)
    prompt = PROMPTS[1]
    first = decode(CachedDecoder(model, [prompt], 1), 1).tokens[0][0]
    row = torch.tensor([[*prompt, first]])
    p = [model(row, num_recurrences=i)[0, -1].double().softmax(-1) for i in range(1, 9)]
    nats = [float((b * (b / a).log()).sum()) for a, b in zip(p, p[1:], strict=False)]
    backwards = [float((a * (a / b).log()).sum()) for a, b in zip(p, p[1:], strict=False)]

    def leaves(changes: list[float], threshold: float) -> int:
        return next((i + 2 for i, change in enumerate(changes) if change < threshold), 8)

    thresholds = [1.01 * nat for nat in nats]
    assert any(leaves(nats, t) != leaves(backwards, t) for t in thresholds), "either order would do"
    assert len({leaves(nats, t) for t in thresholds}) > 2
    for threshold in thresholds:
        generated = decode(CachedDecoder(model, [prompt], 2, exit_rule=KLChange(threshold)), 2)
        assert generated.recurrences[0][1] == leaves(nats, threshold)


def test_the_space_that_begins_a_continuation_is_kept() -> None:
    """A decoder of word pieces drops the first space of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<s>", "\u2581hello", "\u2581world", "s"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = JSONTokenizer.__new__(Words)
    tokenizer.adopt(backend)
    assert tokenizer.decode([2]) == "world"
    assert continuation(tokenizer, [0, 1], [2, 3]) == " worlds"
    assert continuation(tokenizer, [0, 1], [0]) == "", "BOS begins a document and is no text of it"


class Words(JSONTokenizer):
    """Only the backend of a tokenizer."""

    name, vocab_size, bos_id = "words", 4, 0
    settings = serialized = load = None  # type: ignore[assignment]


def test_a_prompt_may_end_within_a_character() -> None:
    half, rest = [256, *"ü".encode()[:1]], [*"ü".encode()[1:], *b"ber"]
    assert continuation(ByteTokenizer(), half, rest) == "\ufffdber"


def test_generation_of_compiled_layers_runs_eagerly() -> None:
    model = perturbed()
    expected = decode(CachedDecoder(model, PROMPTS, 8), 8).tokens
    for layer in model.layers():
        layer.compile(backend=lambda graph, inputs: pytest.fail("compiled"))  # type: ignore[operator]
    assert decode(CachedDecoder(model, PROMPTS, 8), 8).tokens == expected


def test_a_stop_token_ends_its_row_alone() -> None:
    model = perturbed()
    free = decode(CachedDecoder(model, PROMPTS, 32), 32).tokens
    stop = free[1][5]
    decoder = CachedDecoder(model, PROMPTS, 32, exit_rule=RelativeChange(1e-30))
    stopped = decode(decoder, 32, stop_token=stop)
    for row, all_of_it in zip(stopped.tokens, free, strict=True):
        assert row == (all_of_it[: all_of_it.index(stop) + 1] if stop in all_of_it else all_of_it)
    assert drift(decoder, stopped).mean < 1e-5


def test_generation_past_the_context_leaves_the_model_trainable() -> None:
    """The rotary tables grow in inference mode, and training reads them afterwards."""
    model = perturbed()
    decode(CachedDecoder(model, PROMPTS, 16), 16)
    inputs, targets = tokens()
    model(inputs, targets).backward()
    assert model.rotary.cos.shape[0] > model.seq_len


def test_prompts_that_cannot_be_are_refused() -> None:
    model = perturbed()
    for prompts, says in (([], "at least one token"), ([[1], []], "at least one"), ([[VOCAB]], "0 to 60")):
        with pytest.raises(ValueError, match=says):
            UncachedDecoder(model, prompts, 4)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        UncachedDecoder(model, PROMPTS, 0)


# ---- Sampling


def test_logits_that_are_not_finite_are_said_and_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.5, 0.0, -9.0]])
    sampling = Sampling(temperature=1e-300)
    assert sampling.choose(logits, sampling.generators(2, logits.device)).tolist() == [1, 0]
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature)
        with pytest.raises(ValueError, match="logits are not finite"):
            sampling.choose(logits * math.nan, sampling.generators(2, logits.device))


def test_temperature_top_k_and_top_p_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
    logits = p.log() + 3.0
    torch.testing.assert_close(Sampling(1.0).probabilities(logits), p)
    torch.testing.assert_close(Sampling(0.5).probabilities(logits), p**2 / (p**2).sum())
    torch.testing.assert_close(
        Sampling(1.0, top_k=2).probabilities(logits), torch.tensor([[2 / 3, 1 / 3, 0, 0]])
    )
    torch.testing.assert_close(
        Sampling(1.0, top_p=0.8).probabilities(logits), torch.tensor([[5 / 9, 2.5 / 9, 1.5 / 9, 0]])
    )
    torch.testing.assert_close(
        Sampling(1.0, top_p=0.01).probabilities(logits), torch.tensor([[1.0, 0, 0, 0]])
    )
    # top-k first: 0.5 and 0.25 become 2/3 and 1/3, of which 0.6 needs the first alone.
    torch.testing.assert_close(
        Sampling(1.0, top_k=2, top_p=0.6).probabilities(logits), torch.tensor([[1.0, 0, 0, 0]])
    )
    assert torch.isfinite(Sampling(1e-30).probabilities(logits)).all()


def test_draws_have_the_distribution_and_the_seed() -> None:
    p = torch.tensor([0.6, 0.3, 0.1])
    sampling = Sampling(1.0, seed=5)
    generators = sampling.generators(1, torch.device("cpu"))
    drawn = torch.stack([sampling.choose(p.log()[None], generators) for _ in range(4000)]).flatten()
    frequencies = drawn.bincount(minlength=3) / 4000
    torch.testing.assert_close(frequencies, p, atol=0.03, rtol=0)
    model = perturbed()
    runs = [
        decode(CachedDecoder(model, PROMPTS, 16), 16, sampling=Sampling(1.0, seed=s)).tokens
        for s in (5, 5, 6)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_ids_that_the_tokenizer_lacks_are_never_chosen() -> None:
    model = perturbed()
    generated = decode(CachedDecoder(model, PROMPTS, 32), 32, sampling=Sampling(5.0), vocab_size=20)
    assert max(t for row in generated.tokens for t in row) < 20


@pytest.mark.parametrize(
    "options, says",
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 3}, "no effect at temperature 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_sampling_out_of_range_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sampling(**options)


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("nan")])
def test_a_threshold_that_is_none_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="exit threshold"):
        KLChange(threshold)


def test_lanes_beyond_the_trained_count_decode_as_they_run() -> None:
    model = perturbed("lanes", 2, lanes=partial(HyperConnectionLanes, num_lanes=3))
    inputs, _ = tokens(1, 8)
    prompt = [int(t) for t in inputs[0]]
    assert (
        decode(CachedDecoder(model, [prompt], 8, 5), 8).tokens
        == decode(UncachedDecoder(model, [prompt], 8, 5), 8).tokens
    )
