"""Probes, scores and results of an evaluation, against plain loops."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datamodules import ByteTokenizer
from looped_lm.evaluation import public
from looped_lm.evaluation.probes import PROBES, Example, Probe
from looped_lm.evaluation.results import LossRow, Results, TaskRow
from looped_lm.evaluation.scoring import Encoded, Encoder, Scorer
from looped_lm.evaluation.session import default_counts, fitted, probe_rows
from looped_lm.evaluation.suite import AXES, OWN_TASKS, PUBLIC, select
from looped_lm.model.transformer import LoopedTransformer
from tests.support.tiny import perturb, tiny_model

INDUCTION, *VARIABLES = PROBES
BYTES = ByteTokenizer()


def byte_model() -> LoopedTransformer:
    model = tiny_model(vocab_size=BYTES.vocab_size, seq_len=128).eval()
    perturb(model)
    return model


# ---- Probes ---------------------------------------------------------------------------------------------------------


def test_induction_head_is_eight_lines_and_a_key() -> None:
    for example in INDUCTION.examples(50, seed=0):
        *lines, asked = example.query.split("\n")
        pairs = dict(re.fullmatch(r"([a-z]{4}) -> ([a-z]{3})", line).groups() for line in lines)  # type: ignore[union-attr]
        assert len(pairs) == len(lines) == 8 and example.shots == ()
        assert example.answer == f" {pairs[asked.removesuffix(' ->')]}"


@pytest.mark.parametrize("probe", VARIABLES, ids=lambda p: p.name)
def test_variable_assignment_has_the_answer_that_follows(probe: Probe) -> None:
    asked_places = set()
    for example in probe.examples(50, seed=0):
        for text in (*example.shots, example.query + example.answer):
            if probe.name.endswith("code"):
                exec(text, {})  # ends in an assertion
                program, _, question = text.rpartition("\nassert ")
                assigned = [tuple(line.split(" = ")) for line in program.split("\n")]
                name, answer = question.split(" == ")
            else:
                assigned = re.findall(r"(\w)=(\w+)", text)
                name, answer = re.search(r"value of (\w) is (\d+)$", text).groups()  # type: ignore[union-attr]
            names, values = zip(*assigned, strict=True)
            direct, aliases = dict(assigned[:5]), dict(assigned[5:])
            assert len(set(names)) == len(names) == (10 if "_1_" in probe.name else 5)
            assert all(1 <= int(v) <= 25 for v in direct.values())
            # Each variable has one alias, and the question is about one of the aliases.
            assert sorted(aliases.values()) == (sorted(direct) if aliases else [])
            assert name in (aliases or direct) and direct[aliases.get(name, name)] == answer
            asked_places.add(names.index(name))
        assert len(example.shots) == 5
        assert example.prompt(5) == "".join(f"{s}\n\n" for s in example.shots) + example.query
        assert example.prompt(2).startswith(example.shots[3]) and example.prompt(0) == example.query
    assert asked_places == (set(range(5, 10)) if "_1_" in probe.name else set(range(5)))


def test_examples_are_a_function_of_the_seed() -> None:
    for probe in PROBES:
        assert probe.examples(5, 3) == probe.examples(9, 3)[:5] != probe.examples(5, 4)
        assert len({e.query for e in probe.examples(9, 3)}) == 9
    with pytest.raises(ValueError, match="0 examples"):
        INDUCTION.examples(0, 0)


# ---- Scores ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_induction_probe_equals_a_hand_computation() -> None:
    """One example at a time, from logits, token by token."""
    model = byte_model()
    (row,) = probe_rows(INDUCTION, Scorer(model, batch_size=7), Encoder(BYTES, 128), [3], 20, seed=5)
    nats, tokens, right = 0.0, 0, 0
    for example in INDUCTION.examples(20, seed=5):
        text, matches = [256, *example.query.encode()], True
        for byte in example.answer.encode():
            logits = model(torch.tensor([text]), num_recurrences=3)[0, -1].double()
            nats -= float(logits[byte] - torch.log(torch.exp(logits).sum()))
            matches &= int(logits.argmax()) == byte
            tokens += 1
            text.append(byte)
        right += matches
    assert row.tokens == tokens == 80 and row.examples == 20 and (row.cut, row.shots) == (0, 0)
    assert row.loss == pytest.approx(nats / tokens, rel=1e-6) and row.accuracy == right / 20
    assert row.axis == "reasoning_primitives"


@torch.no_grad()
def test_a_score_says_what_greedy_decoding_gives() -> None:
    model = byte_model()
    prompt = [256, *b"ab -> "]
    text = list(prompt)
    for _ in range(4):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    right = Encoded(tuple(prompt), tuple(text[len(prompt) :]))
    wrong = Encoded(right.prompt, (*right.continuation[:3], (text[-1] + 1) % 256))
    assert [s.greedy for s in Scorer(model).score([right, wrong])] == [True, False]
    # " 2" is not the answer if the model goes on to say " 22".
    whole, part = right, Encoded(right.prompt, right.continuation[:3])
    other = replace(part, end=((right.continuation[3] + 1) % 256,))
    scores = Scorer(model).score([part, replace(part, end=right.continuation[3:]), other, whole])
    assert [s.greedy for s in scores] == [True, True, False, True]
    assert scores[0].nats == pytest.approx(scores[2].nats) and scores[2].tokens == 3, "the end has no loss"


def test_only_answers_that_begin_others_need_their_end() -> None:
    assert INDUCTION.examples(1, 0)[0].end == ""
    encoded, _ = fitted(VARIABLES[0].examples(1, 0)[0], Encoder(BYTES, 10_000))
    assert encoded.end == (10,) and encoded.ids == (*encoded.prompt, *encoded.continuation, 10)


def test_scores_do_not_depend_on_the_batch() -> None:
    model = byte_model()
    rows = [Encoded((256, *range(n)), tuple(range(1 + n % 3))) for n in (0, 40, 3, 17, 8)]
    alone = [s for row in rows for s in Scorer(model, batch_size=1).score([row])]
    together = Scorer(model, batch_size=5).score(rows)
    for a, b in zip(alone, together, strict=True):
        assert a.nats == pytest.approx(b.nats, rel=1e-5) and (a.tokens, a.greedy) == (b.tokens, b.greedy)
    assert Scorer(model).score([]) == []


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match="batch size is 0"):
        Scorer(byte_model(), 0)
    with pytest.raises(ValueError, match=r"ids 1 to 61; the model knows 0 to 60"):
        Scorer(tiny_model()).score([Encoded((1,), (61,))])
    with pytest.raises(ValueError, match="context is 1"):
        Encoder(BYTES, 1)


# ---- Text to ids ----------------------------------------------------------------------------------------------------


class Pairs:
    """Ids of two letters each: the border between prompt and continuation may be inside an id."""

    bos_id, vocab_size = 0, 700

    def encode(self, texts: list[str]) -> list[list[int]]:
        pieces = [re.findall("..?", text) for text in texts]
        return [[sum(27**i * (ord(c) - 96) for i, c in enumerate(p)) for p in row] for row in pieces]


def test_prompt_and_continuation_are_one_text_where_the_border_allows_it() -> None:
    encoder = Encoder(Pairs(), 10)  # type: ignore[arg-type]
    ids = encoder.ids
    assert encoder.pair("abcd", "ef") == Encoded((0, *ids("abcd")), ids("ef"))
    # "c" alone is another id than that of "cd", so the continuation is encoded by itself.
    assert encoder.pair("abc", "de") == Encoded((0, *ids("abc")), ids("de"))
    # Nothing would be left for the continuation.
    assert encoder.pair("", "ab") == Encoded((0,), ids("ab"))


def test_a_long_prompt_is_cut_on_the_left_after_bos() -> None:
    encoder, row = Encoder(BYTES, 6), Encoded((256, 1, 2, 3, 4, 5), (7, 8))
    assert encoder.cut(row) == Encoded((256, 3, 4, 5), (7, 8), cut=True)
    assert encoder.cut(row, room=3) == Encoded((256,), (7, 8), cut=True)
    assert encoder.cut(Encoded((256, 1), (7, 8))) == Encoded((256, 1), (7, 8))
    with pytest.raises(ValueError, match="continuation of 6 tokens does not fit into a context of 6"):
        encoder.cut(row, room=4)


def test_what_does_not_fit_loses_whole_solved_examples() -> None:
    example = Example("ask", " yes", ("one 1", "two 2", "three 3"))
    lengths = [1 + len(example.prompt(k)) + 4 for k in range(4)]
    for context, kept in itertools.product(range(lengths[0], lengths[3] + 2), range(3, -1, -1)):
        if lengths[kept] <= context:
            encoded, shots = fitted(example, Encoder(BYTES, context))
            if shots == kept:
                assert bytes(encoded.prompt[1:]).decode() == example.prompt(kept)
            assert shots >= kept
    encoded, shots = fitted(example, Encoder(BYTES, 5))
    assert shots == 0 and len(encoded) > 5


def test_a_probe_says_how_many_prompts_were_cut_or_that_none_fits() -> None:
    scorer, probe = Scorer(byte_model()), VARIABLES[0]
    longest = max(1 + len(e.prompt(2)) + len(e.answer) + 1 for e in probe.examples(6, 0))
    (row,) = probe_rows(probe, scorer, Encoder(BYTES, longest), [1], 6, 0)
    assert row.cut == 6 and row.shots == 5 and 2 <= row.metrics["mean_shots"] < 3
    (row,) = probe_rows(INDUCTION, scorer, Encoder(BYTES, 100), [1], 6, 0)
    assert row.loss is None and "takes up to 108 tokens, and the context has 100" in str(row.refused)


# ---- Requests and results -------------------------------------------------------------------------------------------


def test_names_stand_for_what_they_say() -> None:
    everything = select(["all"])
    assert everything.recurrences and everything.probes == PROBES
    assert [t.name for t in everything.public] == [n for axis in PUBLIC for n in AXES[axis]]
    assert select(["public"]).public == everything.public and not select(["public"]).recurrences
    assert select(["probes", "induction_head"]).probes == PROBES == select(["reasoning_primitives"]).probes
    (svamp,) = select(["svamp"]).public
    assert svamp.shots == 5 and svamp.source == str(OWN_TASKS / "svamp.yaml")
    mine, other = select(["folder/mine.yaml", "hellaswag"]).public
    assert (mine.name, mine.source, mine.shots) == ("mine", "folder/mine.yaml", None)
    assert (other.name, other.source) == ("hellaswag", "hellaswag")


def test_the_suite_is_that_of_the_paper() -> None:
    shots = {axis: [task.shots for task in tasks] for axis, tasks in PUBLIC.items()}
    assert shots == {
        "parametric_knowledge": [5, 5, 5],
        "reading_comprehension": [0, 3, 3, 3, 1],
        "math_word_problems": [5, 5, 5],
        "compositional_symbolic": [10, 10, 10, 10],
    }
    assert [probe.shots for probe in PROBES] == [0, 5, 5, 5, 5]
    assert all(
        not task.spec or task.spec.endswith(f"{task.name}.yaml") for t in PUBLIC.values() for task in t
    )


def test_recurrences_by_default() -> None:
    assert [default_counts(r) for r in (1, 2, 3, 8)] == [
        [1, 2, 4],
        [1, 2, 4, 8],
        [1, 3, 6, 12],
        [4, 8, 16, 32],
    ]


def test_axes_are_macro_averages_of_what_was_measured() -> None:
    rows = [
        TaskRow("triviaqa", "parametric_knowledge", 4, 2.0, 0.5, "exact_match", 1000, 3000, 5, 0),
        TaskRow("nq_open", "parametric_knowledge", 4, 4.0, 0.2, "exact_match", 10, 30, 5, 0),
        TaskRow("triviaqa", "parametric_knowledge", 8, 1.0, None, None, 10, 30, 5, 0),
        TaskRow("mine", None, 4, 9.0, 0.9, "acc", 10, 30, 0, 0),
    ]
    results = Results({"seed": 0}, [LossRow(4, 3.0, 100)], rows, finished=True)
    four, eight = results.axes()
    assert (four.loss, four.accuracy, four.tasks, four.of) == (3.0, 0.35, 2, 3)
    assert (eight.recurrences, eight.loss, eight.accuracy) == (8, 1.0, None)
    assert results.complete and json.loads(results.to_json())["complete"]
    results.losses.append(LossRow(64, refused="no rule", expected=True))
    assert results.complete, "nobody asked for it"
    results.tasks.append(TaskRow("webqs", "parametric_knowledge", 4, refused="no network"))
    assert not results.complete and results.axes()[0].loss == 3.0
    table = results.table()
    assert "not measured: webqs at r = 4: no network" in table and "2 of 3" in table
    assert "not measured: validation loss at r = 64: no rule" in table
    assert not Results({}, [LossRow(4, 3.0, 100)]).complete, "interrupted"


def test_a_loss_that_is_not_finite_is_none_and_said() -> None:
    nan = TaskRow("triviaqa", "parametric_knowledge", 4, float("nan"), 0.0, "exact_match", 10, 30, 5, 0)
    results = Results({}, [LossRow(4, 3.0, 100), LossRow(16, float("inf"), 100)], [nan], finished=True)
    found = json.loads(results.to_json())
    assert not found["complete"] and found["validation_loss"][0]["loss"] == 3.0
    assert found["validation_loss"][1]["loss"] is None and found["tasks"][0]["accuracy"] is None
    assert found["axes"][0]["loss"] is None and found["axes"][0]["tasks"] == 0
    assert "validation loss at r = 16: the loss is inf" in results.table()
    assert "triviaqa at r = 4: the loss is nan" in results.table()


def test_a_task_of_a_group_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOPED_LM_TRACEBACK", raising=False)

    def one(task: Any, name: str, loaded: Any, *_: Any) -> TaskRow:
        if name == "b":
            raise KeyError("no column")
        return TaskRow(name, None, 2, 1.0)

    monkeypatch.setattr(public, "_measure", one)
    library = SimpleNamespace(load=lambda task: {"a": 1, "b": 2, "c": 3})
    rows = public.measure(public.PublicTask("group"), library, SimpleNamespace(num_recurrences=2), None, 0)  # type: ignore[arg-type]
    assert [(row.task, row.loss) for row in rows] == [("a", 1.0), ("b", None), ("c", 1.0)]
    assert "KeyError" in str(rows[1].refused)


# ---- Logged samples of lm-eval, without it --------------------------------------------------------------------------


def task(kind: str, **rest: Any) -> Any:
    return SimpleNamespace(OUTPUT_TYPE=kind, config=SimpleNamespace(target_delimiter=" "), **rest)


def test_the_gold_continuation_of_every_kind_of_task() -> None:
    gold = public.gold_continuation
    assert gold(task("loglikelihood_rolling"), {"arguments": [("text",)], "target": "x"}) is None
    assert gold(task("loglikelihood"), {"arguments": [("a", " b")], "target": " b"}) == ("a", " b")
    options = {"arguments": [("q", " x"), ("q", " y")], "doc": {}}
    choices = task("multiple_choice", multiple_input=False, doc_to_choice=lambda doc: ["x", "y"])
    assert gold(choices, {**options, "target": 1}) == ("q", " y")
    assert gold(choices, {**options, "target": ["y", "x"]}) == ("q", " y"), "of several the first counts"
    ways = task("multiple_choice", multiple_input=True, doc_to_text=lambda doc: 0)
    assert gold(ways, {"arguments": [("one", " end"), ("two", " end")], "target": 9, "doc": {}}) == (
        "one",
        " end",
    )
    written = {"arguments": [("q", {"until": ["."]})], "target": ["yes", "no"]}
    assert gold(task("generate_until"), written) == ("q", " yes")
    assert gold(task("generate_until"), {**written, "target": "\nyes"}) == ("q", "\nyes"), (
        "it begins by itself"
    )


def test_the_metric_that_counts_right_answers() -> None:
    metrics = public.plain(
        {
            "acc,none": 0.5,
            "acc_stderr,none": "N/A",
            "exact_match,strict": 0.25,
            "alias": "x",
            "bleu,none": float("nan"),
        }
    )
    assert metrics == {"acc,none": 0.5, "exact_match,strict": 0.25}
    assert public.accuracy_of(metrics, public.PublicTask("t", metric="exact_match")) == ("exact_match", 0.25)
    assert public.accuracy_of({"f1,none": 50.0}, public.PublicTask("t", metric="f1", scale=0.01)) == (
        "f1",
        0.5,
    )
    assert public.accuracy_of({}, public.PublicTask("t")) == (None, None)
