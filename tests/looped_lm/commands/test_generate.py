"""The generate and export commands on a checkpoint of a tiny run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules import ByteTokenizer
from looped_lm import LoopedLM, LoopedTransformer
from looped_lm.commands.generate import Printer
from looped_lm.sharing.export import save_pretrained
from looped_lm.sharing.load import load_tokenizer
from tests.support.cli_options import tiny_options
from tests.support.tiny import tiny_model

PROMPTS = ["--prompt", "doc", "--prompt", "the loop runs ", "--prompt", ""]


def texts(out: str) -> list[str]:
    """The texts of a run with several prompts."""
    body = out[out.index("--- 1 of") :].split("\nnote:")[0]
    return re.split(r"\n?--- \d of 3\n", re.split(r"\n\d+ tokens in", body)[0])[1:]


def test_generate_export_and_back(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    status, out = run_cli("fit", "--config", "r8_hc.yaml", *tiny_options(tiny_data_dir, steps=4))
    assert status == 0, out
    ckpt = str(next(in_folder.rglob("*.ckpt")))

    def generate(*options: str, source: str = ckpt) -> str:
        status, out = run_cli(
            "generate", "--ckpt", source, "--max-new-tokens", "24", "--device", "cpu", *options
        )
        assert status == 0, out
        return out

    greedy = generate(*PROMPTS, "--temperature", "0", "--keep-going")
    assert "72 tokens in" in greedy and "recurrences: mean 8.00, 8 to 8 of 8" in greedy
    assert "entries of 8 of 8 recurrences" in greedy and "drift" not in greedy
    assert "may grow to 39 tokens; the model was trained on 16" in greedy
    assert [t[: len(p)] for t, p in zip(texts(greedy), PROMPTS[1::2], strict=True)] == PROMPTS[1::2]
    slow = generate(*PROMPTS, "--temperature", "0", "--keep-going", "--no-cache")
    assert texts(slow) == texts(greedy) and "KV cache" not in slow

    sampled = ["--prompt", "x", "--top-k", "50", "--top-p", "0.9", "--temperature", "0.8", "--seed", "3"]
    first, again = generate(*sampled), generate(*sampled)
    assert first.splitlines()[:-3] == again.splitlines()[:-3]
    small = generate(*PROMPTS, "--kv-budget", "2", "--recurrences", "4")
    assert re.search(r"entries of 2 of 4 recurrences\ndrift .*\|Δ log p\| mean \d\.\d+e-\d+", small), small
    early = generate(*PROMPTS, "--exit-kl", "1e9")
    assert "2 to 8 of 8" in early and "drift" in early

    status, out = run_cli("export", "--ckpt", ckpt, "--out", "shared")
    assert status == 0 and "shared:" in out, out
    own, shared = LoopedLM.load_from_checkpoint(ckpt).model, LoopedTransformer.from_pretrained("shared")
    inputs = torch.arange(10)[None]
    assert torch.equal(own(inputs), shared(inputs))
    assert texts(generate(*PROMPTS, "--temperature", "0", "--keep-going", source="shared")) == texts(greedy)
    status, out = run_cli("export", "--ckpt", ckpt, "--out", "shared")
    assert status == 1 and "nothing is overwritten" in out
    status, out = run_cli("convert", "--to", "reference", ckpt, "--out", "theirs")
    assert status == 0 and "moves by" not in out and "rounds its rotary tables" in out, out
    status, out = run_cli("convert", "--from", "reference", "theirs", "--out", "back.ckpt")
    assert status == 0 and Path("back.run.json").is_file(), out
    # The architecture comes from the checkpoint, the data from the user.
    data = [f"--data.data_dir={tiny_data_dir}", "--data.seq_len=16", "--data.final_val_rows=4"]
    status, out = run_cli("validate", "--ckpt_path", "back.ckpt", "--trainer.accelerator=cpu", *data)
    assert status == 0, out
    found = re.search(r"val/loss\W+(\d+\.\d+)", out)
    record = json.loads(next(in_folder.rglob("step=*.run.json")).read_text())
    # Rotary tables in bfloat16 move it a little.
    assert found and float(found[1]) == pytest.approx(record["val_loss"], abs=1e-2)
    status, out = run_cli("generate", "--ckpt", "back.ckpt")
    assert status == 1 and "does not say what data" in out and "datamodules.ByteTokenizer" in out
    back = generate("--tokenizer", "datamodules.ByteTokenizer", source="back.ckpt")
    assert "tokens in" in back


@pytest.mark.parametrize("command", ["generate", "export", "convert"])
def test_help_and_missing_options(run_cli: Any, command: str) -> None:
    status, out = run_cli(command, "--help")
    assert status == 0 and f"python -m looped_lm {command}" in out
    status, out = run_cli(command)
    assert status == 2 and "required" in out


def test_a_plain_file_is_one_message_with_a_way_out(run_cli: Any, in_folder: Path) -> None:
    Path("notes.txt").write_text("mine")
    for command in (["generate"], ["export", "--out", "m"], ["evaluate"]):
        status, out = run_cli(*command, "--ckpt", "notes.txt")
        assert status == 1 and "Traceback" not in out and "mmap" not in out, out
        assert (
            "notes.txt cannot be read as a checkpoint" in out
            and "Give a checkpoint of a run, or a folder" in out
        )


@pytest.mark.parametrize(
    "options, says",
    [
        (["--ckpt", "nowhere.ckpt"], "nowhere.ckpt is neither a checkpoint nor a folder"),
        (["--ckpt", "x", "--no-cache", "--kv-budget", "2"], "--no-cache keeps nothing"),
        (["--ckpt", "x", "--exit-kl", "-1"], "exit threshold is -1.0"),
        (["--ckpt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["--ckpt", "x", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_options_are_named(run_cli: Any, in_folder: Path, options: list[str], says: str) -> None:
    status, out = run_cli("generate", *options)
    assert status == 1 and says in out and "Traceback" not in out


def test_a_model_can_be_used_from_a_file_of_prompts(run_cli: Any, in_folder: Path) -> None:
    save_pretrained(tiny_model(vocab_size=300), "m", ByteTokenizer())
    Path("prompts.txt").write_text("one\x0c\u2028\nzwei ü\n")
    status, out = run_cli("generate", "--ckpt", "m", "--prompt-file", "prompts.txt", "--max-new-tokens", "4")
    assert status == 0 and "--- 2 of 2\nzwei ü" in out, out


def test_what_is_beside_a_model_is_checked(tmp_path: Path) -> None:
    """A shared folder must not make us call just anything, nor read ids by another tokenizer."""
    folder = save_pretrained(tiny_model(vocab_size=300), tmp_path / "m", ByteTokenizer())
    file = folder / "config.json"
    config = json.loads(file.read_text())

    def refused(says: str, **changes: Any) -> None:
        file.write_text(json.dumps({**config, "tokenizer": {**config["tokenizer"], **changes}}))
        with pytest.raises(ValueError, match=says):
            load_tokenizer(folder)

    refused("'os.path', which is not a class of tokenizers", class_path="os.path")
    refused("'os.system', which is not a class of tokenizers", class_path="os.system")
    refused("is not available .*tokenizer.json", class_path="datamodules.FileTokenizer", bos_token=None)
    bpe = {"class_path": "datamodules.BPETokenizer", "vocab_size": 300, "train_characters": 9}
    refused("is not available .*No such file", **bpe)
    refused("is not the one it was exported with", sha256="0" * 64)


def test_texts_stream_in_order_and_characters_whole(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer(ByteTokenizer(), ["a", "b"], [[256, 97], [256, 98]])
    a, b = "xü".encode(), b"yz"
    shown = []
    for i in range(3):
        printer.add([a[i], b[i] if i < 2 else None])
        shown.append(capsys.readouterr().out)
    assert shown == ["--- 1 of 2\nax", "", "ü"], "half a character waits for its other half"
    printer.add([None, None])
    printer.close()
    assert capsys.readouterr().out == "\n\n--- 2 of 2\nbyz\n"
