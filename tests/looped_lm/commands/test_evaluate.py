"""The evaluate command on a checkpoint of a tiny run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules import ByteTokenizer
from looped_lm.commands.evaluate import default_tasks
from looped_lm.evaluation import public
from looped_lm.loop.lanes import HyperConnectionLanes
from looped_lm.sharing.export import save_pretrained
from tests.support.cli_options import tiny_options
from tests.support.tiny import tiny_model


class NoRuleLanes(HyperConnectionLanes):
    """Lanes that say nothing of recurrences beyond the trained ones."""

    def beyond_trained(self, i: int, trained: int) -> int:
        return super(HyperConnectionLanes, self).beyond_trained(i, trained)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


PROBES = ["--examples", "3", "--context", "700", "--device", "cpu"]


def test_evaluate_a_checkpoint_and_its_export(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    options = [
        *tiny_options(tiny_data_dir, steps=2),
        "--model.num_recurrences=2",
        "--model.recurrent_layers=1",
    ]
    lanes = ["--model.lanes=tests.looped_lm.commands.test_evaluate.NoRuleLanes"]
    status, out = run_cli("fit", "--config", "r8_hc.yaml", *options, *lanes)
    assert status == 0, out
    ckpt = next(in_folder.rglob("*.ckpt"))
    file = ckpt.with_suffix(".eval.json")

    def validated(r: int) -> float:
        status, out = run_cli("validate", "--ckpt_path", str(ckpt), f"--model.eval_recurrences={r}")
        found = re.search(r"val/loss\W+(\d+\.\d+)", out)
        assert status == 0 and found, out
        return float(found[1])

    status, out = run_cli("evaluate", "--ckpt", str(ckpt), *PROBES)
    assert status == 0, out
    found = json.loads(file.read_text())
    one, two, four, eight = found["validation_loss"]
    assert found["complete"] and (found["context"], found["seed"]) == (700, 0)
    manifest = json.loads((tiny_data_dir / "manifest.json").read_text())
    assert found["tokenizer"]["sha256"] == manifest["tokenizer"]["sha256"]
    assert found["data"] == {"given": None, "manifest_hash": manifest["hash"]}
    record = json.loads(next(in_folder.rglob("step=*.run.json")).read_text())
    assert (
        two["loss"] == pytest.approx(record["val_loss"], rel=1e-6) and two["tokens"] == record["val_tokens"]
    )
    assert one["loss"] == pytest.approx(validated(1), abs=1e-6) and one["loss"] != two["loss"]
    assert [row["recurrences"] for row in (one, two, four, eight)] == [1, 2, 4, 8]
    assert "no rule for recurrence 3" in four["refused"] and four["expected"] and eight["loss"] is None
    assert [row["task"] for row in found["tasks"]][:2] == ["induction_head", "variable_assignment_0_math"]
    (axis,) = found["axes"]
    assert axis["loss"] == pytest.approx(sum(row["loss"] for row in found["tasks"]) / 5)
    assert f"{two['loss']:.4f}" in out and "reasoning_primitives" in out and "not measured" in out

    status, out = run_cli("evaluate", "--ckpt", str(ckpt), *PROBES)
    assert status == 1 and "exists: name another file by --out, or give --overwrite" in out
    before = file.read_text()
    asked = ["--tasks", "recurrences", "induction_head", "--recurrences", "1", "4", "1"]
    status, out = run_cli("evaluate", "--ckpt", str(ckpt), *PROBES, *asked, "--overwrite")
    again = json.loads(file.read_text())
    assert status == 3 and file.read_text() != before and not again["complete"], "4 was asked for"
    assert again["validation_loss"][0]["loss"] == one["loss"]
    assert sorted((row["recurrences"], row["loss"] is None) for row in again["tasks"]) == [
        (1, False),
        (4, True),
    ]

    status, out = run_cli("export", "--ckpt", str(ckpt), "--out", "shared")
    assert status == 0, out
    status, out = run_cli("evaluate", "--ckpt", "shared", *PROBES)
    assert status == 0 and "names no data" in out, out
    shared = json.loads(Path("shared.eval.json").read_text())
    assert shared["validation_loss"] == []
    for a, b in zip(shared["tasks"], found["tasks"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    init_args = f"{{data_dir: '{tiny_data_dir}', seq_len: 16, final_val_rows: 4}}"
    data = f"{{class_path: datamodules.TokenDataModule, init_args: {init_args}}}"
    more = ["--tasks", "recurrences", "--recurrences", "2", "--data", data, "--out", "other.json"]
    status, out = run_cli("evaluate", "--ckpt", "shared", "--device", "cpu", *more)
    assert status == 0, out
    # What an interrupted evaluation left is replaced; a whole one is not, and not by a part.
    other = Path("other.json")
    half = {**json.loads(other.read_text()), "finished": False, "complete": False}
    other.write_text(json.dumps(half))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("looped_lm.evaluation.session.Evaluation._tasks", _interrupt)
        both = ["--tasks", "recurrences", "probes", *more[2:]]
        assert run_cli("evaluate", "--ckpt", "shared", "--device", "cpu", *both)[0] == 130
        assert json.loads(other.read_text())["validation_loss"] and not Path("other.json.partial").exists()
        other.write_text(json.dumps({**half, "finished": True, "complete": True}))
        kept = other.read_text()
        assert run_cli("evaluate", "--ckpt", "shared", "--device", "cpu", *both, "--overwrite")[0] == 130
        assert other.read_text() == kept and Path("other.json.partial").exists()
    other.write_text(json.dumps(half))
    status, out = run_cli("evaluate", "--ckpt", "shared", "--device", "cpu", *more)
    assert status == 0, out
    # Ids of another tokenizer would give a number that means nothing.
    config = json.loads(Path("shared/config.json").read_text())
    config["tokenizer"]["sha256"] = "0" * 64
    Path("shared/config.json").write_text(json.dumps(config))
    status, out = run_cli("evaluate", "--ckpt", "shared", "--device", "cpu", *more, "--overwrite")
    assert status == 1 and "prepared with another tokenizer" in out
    # A model that came without one reads by that of the data.
    del config["tokenizer"]
    Path("shared/config.json").write_text(json.dumps(config))
    alone = ["--data", data, "--out", "alone.json", "--examples", "2", "--context", "700"]
    status, out = run_cli("evaluate", "--ckpt", "shared", "--device", "cpu", *alone)
    assert status == 0 and len(json.loads(Path("alone.json").read_text())["tasks"]) == 5, out
    assert json.loads(Path("other.json").read_text())["validation_loss"][0]["loss"] == pytest.approx(
        two["loss"], rel=1e-5
    )


def test_by_default_only_data_that_is_known_is_asked_for(tmp_path: Path) -> None:
    """Converted checkpoints name none."""
    for data, expected in (({}, ["probes"]), ({"class_path": "x.Data"}, ["recurrences", "probes"])):
        checkpoint = {
            "state_dict": {},
            "hyper_parameters": {},
            "global_step": 1,
            "run_record": {"config": {"data": data}},
        }
        torch.save(checkpoint | {"pytorch-lightning_version": "2.6.6"}, tmp_path / "a.ckpt")
        assert default_tasks(tmp_path / "a.ckpt", None) == expected
        assert default_tasks(tmp_path / "a.ckpt", "x.Data") == ["recurrences", "probes"]


def test_a_context_that_is_too_short_is_said(run_cli: Any, in_folder: Path) -> None:
    save_pretrained(tiny_model(vocab_size=257), "m", ByteTokenizer())
    status, out = run_cli("evaluate", "--ckpt", "m", "--examples", "2", "--device", "cpu")
    assert status == 3 and "takes up to 108 tokens, and the context has 16" in out and "--context" in out
    assert not json.loads(Path("m.eval.json").read_text())["complete"]


@pytest.mark.parametrize(
    "options, says",
    [
        (["--ckpt", "nowhere.ckpt"], "nowhere.ckpt is neither a checkpoint nor a folder"),
        (["--ckpt", "text.ckpt"], "text.ckpt cannot be read as a checkpoint"),
        (["--ckpt", "m", "--tasks", "recurrences"], "m does not say what data it was trained on"),
        (["--ckpt", "m", "--data", "datamodules.Nope"], "has no 'Nope'"),
        (
            [
                "--ckpt",
                "m",
                "--data",
                "{class_path: datamodules.TokenDataModule, init_args: {data_dir: nowhere}}",
            ],
            "is not available",
        ),
        (["--ckpt", "m", "--examples", "0"], "--examples is 0"),
        (
            ["--ckpt", "m", "--out", "text.ckpt", "--overwrite"],
            "text.ckpt holds something other than results",
        ),
        (["--ckpt", "m", "--out", "nowhere/x.json"], "nowhere is not a writable folder"),
        (["--ckpt", "m", "--tasks", "indction_head"], "Did you mean 'induction_head'?"),
        (["--ckpt", "m", "--tokenizer", "os.getcwd"], "gives a str, which is not a tokenizer"),
        (["--ckpt", "m", "--device", "meta"], "device 'meta' cannot be used"),
        (["--ckpt", "m", "--tasks", "recurrences", "--context", "9"], "--context is for probes and tasks"),
        (["--ckpt", "m", "--batch-size", "0"], "batch size is 0"),
        (["--ckpt", "m", "--context", "1"], "context is 1"),
        (["--ckpt", "m", "--device", "toaster"], "device 'toaster' cannot be used"),
        (["--ckpt", "m", "--tasks", "triviaqa"], "pip install 'looped-lm[eval]'"),
        (["--ckpt", "m", "--tokenizer", "datamodules.Nope"], "has no 'Nope'"),
        (["--ckpt", "m", "--tokenizer", "{class_path: "], "names no class"),
        (["--ckpt", "m", "--data", "[1, 2]"], "names no class"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    run_cli: Any, in_folder: Path, options: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("looped_lm.configuration.command_line.refuse_shadowing", lambda: None)
    save_pretrained(tiny_model(vocab_size=257), "m", ByteTokenizer())
    Path("text.ckpt").write_text("no checkpoint")
    status, out = run_cli("evaluate", *options)
    assert status == 1 and says in out and "Traceback" not in out, out
    assert not list(in_folder.glob("*.json"))


def test_a_stopped_evaluation_keeps_what_it_has_found(in_folder: Path) -> None:
    """SIGTERM while the probes run."""
    save_pretrained(tiny_model(vocab_size=257), "m", ByteTokenizer())
    script = (
        "import os, signal, sys\n"
        "from looped_lm.evaluation import session\n"
        "found = session.probe_rows\n"
        "def probe_rows(probe, *rest):\n"
        "    if probe.name != 'induction_head': os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return found(probe, *rest)\n"
        "session.probe_rows = probe_rows\n"
        "from looped_lm.cli import cli\n"
        f"sys.exit(cli(['evaluate', '--ckpt', 'm', *{PROBES!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 143 and "Traceback" not in done.stderr, done.stderr
    found = json.loads(Path("m.eval.json").read_text())
    assert [row["task"] for row in found["tasks"]] == ["induction_head"] and not found["finished"]
    assert "induction_head" in done.stdout
