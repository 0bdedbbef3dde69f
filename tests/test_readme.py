"""Every command, path and code sample of the README is run or resolved."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import looped_lm
from fitting.records import RunRecord
from looped_lm.configuration.config_files import SHIPPED
from looped_lm.sweeps.expansion import expand
from looped_lm.sweeps.files import load
from tests.fitting.test_records import record_fields
from tests.support.cli_options import tiny_options
from tests.support.documents import code_blocks

ROOT = Path(looped_lm.__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "fitting/README.md"]
README = (ROOT / "README.md").read_text()


def commands(text: str = README) -> list[list[str]]:
    """Words of every command of the bash blocks, split at &&."""
    lines = [line for block in code_blocks(text, "bash") for line in block.splitlines() if line.strip()]
    return [shlex.split(part) for line in lines for part in line.split("&&")]


def lm_commands() -> list[list[str]]:
    return [c[3:] for c in commands() if c[:3] == ["python", "-m", "looped_lm"]]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_linked_file_exists(document: str) -> None:
    """F30."""
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    local = [link for link in links if not link.startswith("http")]
    assert local or document != "README.md"
    assert not [link for link in local if not (path.parent / link).exists()]


def test_every_config_named_exists_and_every_shipped_one_is_named() -> None:
    named = set(re.findall(r"\b([\w]+\.yaml)", README)) - {"config.yaml"}
    assert named == {p.name for folder in ("", "sweeps") for p in (SHIPPED / folder).glob("*.yaml")}


def test_the_sample_sweep_and_the_table_of_sweeps_are_right(in_folder: Path) -> None:
    sample = next(block for block in code_blocks(README, "yaml") if "grid:" in block)
    (in_folder / "mine.yaml").write_text(sample)
    assert len(expand(load(in_folder / "mine.yaml"))) == 14, "16 without r = 4 at size 2, two seeds"
    rows = re.findall(r"^\| ((?:`\w+\.yaml`(?:, )?)+) \| ([\d, ]+) \|", README, re.MULTILINE)
    counts = {
        n: int(c)
        for names, told in rows
        for n, c in zip(re.findall(r"\w+\.yaml", names), told.split(", "), strict=True)
    }
    assert counts == {p.name: len(expand(load(p))) for p in (SHIPPED / "sweeps").glob("*.yaml")}


def test_every_module_called_exists() -> None:
    modules = {c[2] for c in commands() if c[:2] == ["python", "-m"]} - {"venv", "pytest"}
    assert modules == {"looped_lm", "fitting", "datamodules"}
    assert all((ROOT / m / "__main__.py").exists() for m in modules | {"datamodules"})


def test_the_sample_injection_trains_with_the_sample_command(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = next(block for block in code_blocks(README, "python") if "class GatedInjection" in block)
    (in_folder / "my_injection.py").write_text(sample)
    monkeypatch.syspath_prepend(str(in_folder))
    (command,) = [c for c in lm_commands() if any("my_injection" in word for word in c)]
    status, out = run_cli(*command, *tiny_options(tiny_data_dir))
    assert status == 0, out
    assert "(completed)" in out


def test_the_sample_injection_passes_the_sample_conformance_test(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = next(block for block in code_blocks(README, "python") if "class GatedInjection" in block)
    (in_folder / "my_injection.py").write_text(sample)
    monkeypatch.syspath_prepend(str(in_folder))
    monkeypatch.delitem(sys.modules, "my_injection", raising=False)
    namespace: dict[str, Any] = {}
    exec(next(block for block in code_blocks(README, "python") if "conformance import" in block), namespace)
    (mark,) = namespace["test_gated_injection"].pytestmark
    names = [str(check) for check in mark.args[1]]
    assert {"gradients", "flops", "compiled", "ddp", "checkpoint", "causality"} <= set(names)
    for check in mark.args[1]:
        if str(check) != "ddp":  # Two processes more; test_conformance.py has them.
            namespace["test_gated_injection"](check)


def test_the_sample_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    sample = next(block for block in code_blocks(README, "python") if "LoopedLM(" in block)
    exec(sample, {})
    n_once, n_rec, flops, steps = capsys.readouterr().out.split()
    assert (
        int(n_rec) == 2 * (12 * 128**2 + 2 * 128) + 8 * 8
        and int(steps) > 0
        and float(flops) > 0 < int(n_once)
    )


@pytest.mark.parametrize("index", range(len(lm_commands())))
def test_the_commands_shown_work_at_tiny_scale(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = lm_commands()[index]
    sample = next(block for block in code_blocks(README, "python") if "class GatedInjection" in block)
    (in_folder / "my_injection.py").write_text(sample)
    monkeypatch.syspath_prepend(str(in_folder))
    if "--help" in command:
        status, out = run_cli(*command)
        assert status == 0 and "--model.num_recurrences" in out
        return
    if command[0] == "sweep":
        # A file of that name in the working folder goes before the shipped one; its only run is finished.
        (in_folder / command[2]).write_text("grid: {config: r4.yaml, model.size: 1}")
        (run,) = expand(load(in_folder / command[2]))
        record = RunRecord.from_dict({**record_fields(), "run_name": run.id})
        record.save(in_folder / "runs" / run.sweep / "records" / f"{run.id}.run.json")
        status, out = run_cli(*command)
        assert status == 0 and "1 runs" in out, out
        return
    options = tiny_options(tiny_data_dir)
    if "my_data" in command:
        options = [o for o in options if "data_dir" not in o]
        command = [str(tiny_data_dir) if word == "my_data" else word for word in command]
    if "PATH/TO/step.ckpt" in command:
        status, out = run_cli("fit", "--config", "r4.yaml", *options)
        assert status == 0, out
        checkpoint = str(next(in_folder.rglob("*.ckpt")))
        command, options = [word.replace("PATH/TO/step.ckpt", checkpoint) for word in command], []
    if command[0] == "evaluate":
        # Rows of 16 bytes hold no question of a probe.
        options = ["--examples", "2", "--context", "200"]
    if "--model.horizon.flops" in command:
        options = [o for o in options if "horizon" not in o] + ["--model.horizon.flops=1e9"]
    status, out = run_cli(*command, *options)
    assert status == 0, out


def test_the_two_commands_install_and_run_what_they_say() -> None:
    first, second = [b for b in code_blocks(README, "bash") if "venv" in b]
    assert first.strip().endswith("python -m looped_lm fit --config r8_hc.yaml") and "pip install ." in first
    assert second.strip().endswith("python -m pytest") and 'pip install -e ".[dev]"' in second


def test_make_targets_named_in_contributing_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_help_documents_every_key(run_cli: Any) -> None:
    """No key of the model, the data or the run is without a sentence."""
    status, out = run_cli("fit", "--help")
    assert status == 0
    entries = re.split(r"\n  (?=--)", out)
    assert "--data.packing_buffer" in out, "the data module's keys are documented, too"
    silent = []
    for entry in entries[1:]:
        name = entry.split()[0]
        words = " ".join(entry.split("\n", 1)[0].split()[1:] + entry.split("\n")[1:])
        described = re.sub(
            r"\(required|\(type:.*|--\S+|\[?[A-Z_]{3,}\]?|\{true,false\}", " ", words, flags=re.DOTALL
        )
        if name.startswith(("--model.", "--data", "--run_name")) and len(described.split()) < 3:
            silent.append(name)
    assert not silent
