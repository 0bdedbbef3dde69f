"""Tasks of lm-eval on a tiny model: local files of every kind against plain loops, and refusals without network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from datamodules import ByteTokenizer
from looped_lm.evaluation import public
from looped_lm.evaluation.harness import HarnessLM
from looped_lm.evaluation.public import TaskLibrary, measure
from looped_lm.evaluation.scoring import Encoder, Scorer
from looped_lm.evaluation.suite import PUBLIC, PublicTask
from looped_lm.sharing.export import save_pretrained
from tests.support.tiny import perturb, tiny_model

DOCUMENTS = [
    {"q": "one and one", "a": "two", "wrong": "three", "right": 0},
    {"q": "two and two", "a": "four", "wrong": "five", "right": 0},
    {"q": "two and one", "a": "three", "wrong": "four", "right": 0},
    {"q": "three and one", "a": "four", "wrong": "two", "right": 0},
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{{data}}}
  cache_dir: {cache}
test_split: test
doc_to_text: "{{{{q}}}} is"
{rest}
"""
KINDS = {
    "said": 'output_type: loglikelihood\ndoc_to_target: " {{a}}"\nmetric_list: [{metric: acc}, {metric: perplexity}]',
    "chosen": "output_type: multiple_choice\ndoc_to_target: right\ndoc_to_choice: '{{[a, wrong]}}'\n"
    "metric_list: [{metric: acc}]",
    "written": 'output_type: generate_until\ndoc_to_target: "{{a}}"\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 6}\n'
    "metric_list: [{metric: exact_match}]",
    "whole": 'output_type: loglikelihood_rolling\ndoc_to_target: "{{q}} {{a}}"\nmetric_list: [{metric: bits_per_byte}]',
}


def write_task(folder: Path, kind: str, extra: str = "", split: str = "test") -> Path:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    file = folder / f"{kind}.yaml"
    rest = KINDS[kind] + "\n" + extra
    file.write_text(TASK.format(name=kind, data=f"{split}: {rows}", cache=folder / "cache", rest=rest))
    return file


def harness(context: int = 128) -> HarnessLM:
    model = tiny_model(vocab_size=257, seq_len=128).eval()
    perturb(model)
    return HarnessLM(Scorer(model, batch_size=3), Encoder(ByteTokenizer(), context), num_recurrences=3)


@torch.no_grad()
def by_hand(lm: HarnessLM, prompt: str, continuation: str) -> float:
    """-log p of a continuation in nats, from the logits of the whole text."""
    text = torch.tensor([[256, *prompt.encode(), *continuation.encode()]])
    logs = lm.scorer.model(text, num_recurrences=3)[0].double().log_softmax(-1)
    return -sum(float(logs[i - 1, text[0, i]]) for i in range(1 + len(prompt.encode()), text.shape[1]))


@torch.no_grad()
def greedy(lm: HarnessLM, prompt: str, tokens: int) -> str:
    text = [256, *prompt.encode()]
    for _ in range(tokens):
        logits = lm.scorer.model(torch.tensor([text]), num_recurrences=3)[0, -1]
        text.append(int(logits.argmax()))
        if text[-1] == 256:
            break
    return ByteTokenizer().decode([t for t in text[1 + len(prompt.encode()) :] if t != 256])


@pytest.mark.parametrize("kind", ["said", "chosen", "written"])
def test_a_task_file_is_measured_as_a_plain_loop_does(tmp_path: Path, kind: str) -> None:
    lm = harness()
    task = PublicTask(kind, spec=str(write_task(tmp_path, kind)))
    (row,) = measure(task, TaskLibrary(), lm, None, seed=0)
    assert row.refused is None, row
    losses = {w: [by_hand(lm, f"{d['q']} is", f" {d[w]}") for d in DOCUMENTS] for w in ("a", "wrong")}
    tokens = sum(1 + len(str(d["a"])) for d in DOCUMENTS)
    assert row.loss == pytest.approx(sum(losses["a"]) / tokens, rel=1e-5)
    assert (row.examples, row.tokens, row.shots, row.cut, row.axis) == (4, tokens, 0, 0, None)
    assert row.metric == ("exact_match" if kind == "written" else "acc")
    if kind == "chosen":
        right = [a < b for a, b in zip(losses["a"], losses["wrong"], strict=True)]
        assert row.accuracy == sum(right) / 4
    (two,) = measure(task, TaskLibrary(), lm, 2, seed=0)
    assert two.examples == 2


def test_generated_text_is_greedy_decoding_up_to_a_stop_text() -> None:
    lm = harness()
    prompts = ["a", "a longer prompt than that", "b b"]
    full = [greedy(lm, p, 8) for p in prompts]
    options: dict[str, Any] = {"until": [], "max_gen_toks": 8}
    requests = [Instance("generate_until", {}, (p, options), i) for i, p in enumerate(prompts)]
    assert lm.generate_until(requests) == full
    stop = full[1][3]
    requests = [
        Instance("generate_until", {}, (p, {**options, "until": stop}), i) for i, p in enumerate(prompts)
    ]
    assert lm.generate_until(requests) == [text.partition(stop)[0] for text in full]
    # At most a quarter of the context is for new tokens; the prompt is cut to the rest.
    small = harness(context=16)
    (text,) = small.generate_until([Instance("generate_until", {}, ("x" * 40, {"until": []}), 0)])
    assert text == greedy(small, "x" * 11, 4)


def test_whole_texts_are_read_in_windows_of_the_context(tmp_path: Path) -> None:
    lm, text = harness(context=10), "the loop runs once more"
    (found,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    ids, total = [256, *text.encode()], 0.0
    with torch.no_grad():
        for first in range(0, len(text), 9):
            # The first window begins with BOS, each later one with the last token of the one before.
            last = min(first + 9, len(text))
            start = max(0, last - 9)
            logs = lm.scorer.model(torch.tensor([ids[start : last + 1]]), num_recurrences=3)[0].log_softmax(
                -1
            )
            total += sum(float(logs[i - 1 - start, ids[i]]) for i in range(first + 1, last + 1))
    assert found == pytest.approx(total, rel=1e-5)
    (row,) = measure(
        PublicTask("whole", spec=str(write_task(tmp_path, "whole"))), TaskLibrary(), harness(), None, 0
    )
    assert row.refused is None and row.loss is None and row.metrics["bits_per_byte,none"] > 0


def test_shots_come_before_the_question_and_are_never_the_question(tmp_path: Path) -> None:
    lm, seen = harness(), list[str]()
    scores = lm.scores
    lm.scores = lambda pairs, title: seen.extend(p for p, _ in pairs) or scores(pairs, title)  # type: ignore[method-assign]
    file = write_task(tmp_path, "said", "num_fewshot: 3")
    (row,) = measure(PublicTask("said", spec=str(file)), TaskLibrary(), lm, None, seed=0)
    assert row.shots == 3 and row.refused is None
    for prompt, document in zip(seen, DOCUMENTS, strict=False):
        *shots, asked = prompt.split("\n\n")
        assert asked == f"{document['q']} is" and len(shots) == 3
        assert not any(shot.startswith(asked) for shot in shots), "all four documents are in the one split"
    (short,) = measure(PublicTask("said", spec=str(file)), TaskLibrary(), harness(context=40), None, seed=0)
    assert short.cut == 4


def test_tasks_from_the_command_line_without_network(
    run_cli: Any, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Refuse the network, as on a machine without one.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    save_pretrained(tiny_model(vocab_size=257, seq_len=128), "m", ByteTokenizer())
    own = str(write_task(in_folder, "chosen"))
    common = ["evaluate", "--ckpt", "m", "--device", "cpu", "--examples", "2", "--tasks"]
    status, out = run_cli(*common, "induction_head", "svamp", "mawps", own)
    assert status == 3 and "127.0.0.1 cannot be reached" in out, out
    found = json.loads(Path("m.eval.json").read_text())
    by_name = {row["task"]: row for row in found["tasks"]}
    assert list(by_name) == ["induction_head", "svamp", "mawps", "chosen"] and not found["complete"]
    for name in ("svamp", "mawps"):
        assert "no network" in by_name[name]["refused"] and out.count(f"not measured: {name} at r = 2") == 1
        assert by_name[name]["axis"] == "math_word_problems" and by_name[name]["shots"] == 5
    assert by_name["chosen"]["loss"] > 0 and by_name["induction_head"]["loss"] > 0
    status, out = run_cli(*common, own, "--out", "own.json")
    assert status == 0 and "chosen" in out, out


def test_files_that_are_no_tasks_are_refused(
    run_cli: Any, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_pretrained(tiny_model(vocab_size=257, seq_len=128), "m", ByteTokenizer())
    status, out = run_cli("evaluate", "--ckpt", "m", "--tasks", "nowhere.yaml")
    assert status == 1 and "There is no task file 'nowhere.yaml'" in out
    broken = write_task(in_folder, "said")
    broken.write_text(broken.read_text().replace("rows.jsonl", "missing.jsonl"))
    status, out = run_cli("evaluate", "--ckpt", "m", "--tasks", str(broken), "--device", "cpu")
    assert status == 3 and "not measured: said" in out and "missing.jsonl" in out and "Traceback" not in out


@pytest.mark.slow
def test_every_task_of_the_suite_is_known_to_lm_eval() -> None:
    """The index of all of lm-eval's files takes long to build."""
    library = TaskLibrary()
    library.refuse_unknown([task for tasks in PUBLIC.values() for task in tasks])
    with pytest.raises(ValueError, match=r"no task 'trivia_q'. Did you mean 'triviaqa'"):
        library.refuse_unknown([PublicTask("trivia_q")])


def test_a_hub_behind_a_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in str(public.hub_problem())
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert public.hub_problem() is None
