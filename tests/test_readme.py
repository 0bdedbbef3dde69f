"""Every command, path, name and sample of the README and of the pages it points to is run or resolved."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import looped_lm
from fitting.published import load_grid
from fitting.records import RunRecord
from looped_lm.configuration.config_files import SHIPPED
from looped_lm.seams import SEAMS
from looped_lm.sweeps.expansion import expand
from looped_lm.sweeps.files import load
from tests.support.cli_options import tiny_options
from tests.support.document_checks import CHECKS
from tests.support.documents import ROOT, Page, code_blocks
from tests.support.run_records import record_fields
from tests.test_imports import ORDER

README = Page.at("README.md")
#: Pages on a task each, which may use what the README says to save.
TASKS = [Page(path, path.read_text(encoding="utf-8")) for path in sorted((ROOT / "docs").glob("*.md"))]
STORIES = [Page(p, p.read_text(encoding="utf-8")) for p in sorted((ROOT / "examples").glob("*/README.md"))]
OTHERS = [Page.at(name) for name in ("CONTRIBUTING.md", "results/README.md", "fitting/README.md")]
PAGES = {str(page.path.relative_to(ROOT)): page for page in [README, *TASKS, *STORIES, *OTHERS]}


def page_of_task(name: str) -> Page:
    return PAGES[f"docs/{name}.md"]


def lm_commands() -> list[tuple[str, ...]]:
    """Words after `python -m looped_lm` of every command of the README and of the pages on tasks, each once."""
    commands = [words for page in [README, *TASKS] for words in page.commands()]
    return list(dict.fromkeys(tuple(w[3:]) for w in commands if w[:3] == ["python", "-m", "looped_lm"]))


def save_injection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    README.save_samples(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_injection", raising=False)


# ---- Every page -----------------------------------------------------------------------------------------------------


@pytest.fixture
def check(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Page], list[str]]:
    """Run a check of a page where its samples are saved, and the files of its story lie."""

    def run(name: str, page: Page) -> list[str]:
        if page.path.is_relative_to(ROOT / "examples"):
            shutil.copytree(page.path.parent, in_folder, dirs_exist_ok=True)
        monkeypatch.syspath_prepend(str(in_folder))
        monkeypatch.delitem(sys.modules, "my_injection", raising=False)
        page.save_samples(in_folder)
        return CHECKS[name](page)

    return run


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", CHECKS)
def test_what_a_page_names_is_there(name: str, page: str, check: Callable[[str, Page], list[str]]) -> None:
    assert not check(name, PAGES[page])


#: What each check must find: a page, a text of it and a wrong one in its place.
FAULTS = [
    ("wrong_links", "README.md", "(docs/resuming.md)", "(docs/resume.md)"),
    ("wrong_links", "README.md", "nano_report/profile.png", "nano_report/profil.png"),
    ("wrong_links", "examples/slurm_grid/README.md", "(profile.yaml)", "(profil.yaml)"),
    ("wrong_paths", "README.md", "`tests/test_imports.py`", "`tests/test_import.py`"),
    ("wrong_paths", "docs/fitting.md", "fit results/nano_iso_depth", "fit results/nano_grid"),
    ("wrong_commands", "README.md", "fit --config r8_hc.yaml --resume", "fit --config r8_hc.yaml --resum"),
    ("wrong_commands", "README.md", "--config gated.yaml", "--config gate.yaml"),
    ("wrong_commands", "README.md", "pytest test_my_injection.py", "pytest test_my_class.py"),
    ("wrong_commands", "docs/training.md", "--model.size 3", "--model.size three"),
    ("wrong_commands", "docs/extending.md", "--model.injection.gate 0.5", "--model.injection.gait 0.5"),
    ("wrong_commands", "docs/sweeps.md", "sweep retry", "sweep redo"),
    ("wrong_commands", "docs/sweeps.md", "`python -m fitting plan`", "`python -m fitting design`"),
    ("wrong_commands", "docs/generation.md", "--exit-kl", "--exit-lk"),
    ("wrong_commands", "docs/devices-and-speed.md", "-m looped_lm fit", "-m looped_lm fitt"),
    ("wrong_commands", "docs/resuming.md", "exec python -m looped_lm fit", "exec python -m looped_lm go"),
    ("wrong_commands", "docs/data.md", "--no-cut-documents", "--uncut-documents"),
    ("wrong_commands", "results/README.md", "-m fitting verify", "-m fitting check"),
    ("wrong_commands", "examples/new_injection/README.md", "--delta-phi", "--delta"),
    ("wrong_commands", "examples/someone_elses_runs/README.md", "$ python -m fitting verify", "$ python -m fit verify"),
    ("wrong_options", "docs/evaluation.md", "`--context`", "`--length`"),
    ("wrong_options", "docs/training.md", "2e11 --data.final_val_rows 16", "2e11 --data.last_val_rows 16"),
    ("wrong_options", "docs/devices-and-speed.md", "compile_layers true", "compile_layers perhaps"),
    ("wrong_keys", "docs/training.md", "`model.recurrences`", "`model.recurrence`"),
    ("wrong_configs", "docs/training.md", "`r4_mhc.yaml`", "`r4_mhcl.yaml`"),
    ("wrong_configs", "examples/new_injection/README.md", "`nano_iso_depth.yaml`", "`nano_depth.yaml`"),
    ("wrong_yaml", "README.md", "gate: 0.5", "gait: 0.5"),
    ("wrong_yaml", "docs/tensorboard.md", "pytorch.loggers.WandbLogger\n", "pytorch.loggers.WandLogger\n"),
    ("wrong_yaml", "docs/sweeps.md", "seed_everything: [1, 2]\nskip", "seed_everything: [1, 2]\nskips"),
    ("wrong_python", "README.md", "import Injection", "import Injector"),
    ("wrong_python", "docs/training.md", "num_recurrences=8,", "num_recurrences=8 8,"),
    ("wrong_class_paths", "docs/extending.md", "`looped_lm.Residual`", "`looped_lm.Residue`"),
    ("wrong_class_paths", "docs/tensorboard.md", "loggers.CSVLogger", "loggers.CVSLogger"),
    ("wrong_class_paths", "CONTRIBUTING.md", "fitting.records", "fitting.recordings"),
    ("wrong_classes", "docs/extending.md", "`ScaledResidual`", "`ScalingResidual`"),
    ("wrong_classes", "README.md", "`LoopedTransformer._loop`", "`LoopedTransformer._run`"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "page", "right", "wrong"), FAULTS)
def test_a_wrong_name_is_found(
    name: str, page: str, right: str, wrong: str, check: Callable[[str, Page], list[str]]
) -> None:
    sound = PAGES[page]
    assert right in sound.text
    assert check(name, Page(sound.path, sound.text.replace(right, wrong)))


def test_every_check_is_shown_to_fail() -> None:
    assert {name for name, *_ in FAULTS} == set(CHECKS)


# ---- The README -----------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(README.text.splitlines()) <= 180
    assert not [name for name in PAGES if name != "README.md" and f"]({name})" not in README.text]


def test_every_question_of_a_newcomer_has_a_section_in_the_readme() -> None:
    titles = re.findall(r"(?m)^## (.*)$", README.text)
    wanted = {
        "What is φ?",
        "Install and run",
        "How do I resume?",
        "How do I add an injection?",
        "Where is the loop?",
    }
    assert wanted <= set(titles)


def test_the_tree_of_the_readme_is_that_of_the_packages() -> None:
    (tree,) = code_blocks(README.text, "text")
    told: dict[str, list[str]] = {}
    package = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            told[package].append(name)
        else:
            package = name.removesuffix("/")
            told[package], name = [], ""
        assert (ROOT / package / name).exists(), line
    for package, order in ORDER.items():
        rooms = [room.removesuffix("/").removesuffix(".py") for room in told[package]]
        lowest_first = [room for together in order for room in together]
        assert rooms == [r for r in lowest_first if (ROOT / package / r).is_dir() or r in rooms], package


def test_the_phi_of_the_readme_is_that_of_its_report() -> None:
    told = re.search(
        r"φ = (\S+), 95% interval \[(\S+), (\S+)\], status ([\w ]+), from (\d+) runs\*\* with r = ([\d, and]+) on two",
        README.text,
    )
    report = json.loads((ROOT / "results/nano_report/fit.json").read_text())
    (interval,) = [one for one in report["fit"]["intervals"]["phi"] if one["recommended"]]
    fit, published, data = report["fit"], report["published"], report["data"]
    assert told is not None
    value, low, high, status, runs, recurrences = told.groups()
    assert [value, low, high] == [
        f"{x:.2f}" for x in (fit["parameters"]["phi"], interval["low"], interval["high"])
    ]
    assert (status, int(runs)) == (fit["status"], fit["runs"])
    assert re.findall(r"\d+", recurrences) == [f"{r:g}" for r in data["recurrences"]]
    papers = re.search(r"paper found (\S+) \[(\S+), (\S+)\]", README.text)
    assert papers is not None
    assert papers.groups() == tuple(f"{x:.2f}" for x in (published["phi"], *published["interval"]))
    times = load_grid().budget.max() / max(data["budgets"]) / 1e6
    assert round(times) == 5 and "five million times" in README.text


def test_the_commands_of_the_readme_install_and_run_what_they_say() -> None:
    (block,) = [b for b in code_blocks(README.text, "bash") if "venv" in b]
    install, run = block.strip().splitlines()
    assert install.endswith("pip install .") and run == "python -m looped_lm fit --config r8_hc.yaml"
    (tests,) = [b for b in code_blocks(page_of_task("installing").text, "bash") if "pytest" in b]
    assert tests.strip().endswith("python -m pytest") and 'pip install -e ".[dev]"' in tests


def test_the_sample_injection_trains_with_the_sample_command(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_injection(in_folder, monkeypatch)
    (command,) = [words[3:] for words in README.commands() if "gated.yaml" in words]
    status, out = run_cli(*command, *tiny_options(tiny_data_dir))
    assert status == 0, out
    assert "(completed)" in out
    record = RunRecord.load(next(in_folder.rglob("*.run.json")))
    assert record.components["injection"] == {
        "class_path": "my_injection.GatedInjection",
        "init_args": {"gate": 0.5},
    }


def test_the_sample_injection_passes_the_sample_conformance_test(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_injection(in_folder, monkeypatch)
    namespace: dict[str, Any] = {}
    exec((in_folder / "test_my_injection.py").read_text(), namespace)
    (mark,) = namespace["test_gated_injection"].pytestmark
    names = [str(check) for check in mark.args[1]]
    assert {"gradients", "flops", "compiled", "ddp", "checkpoint", "causality"} <= set(names)
    for check in mark.args[1]:
        if str(check) != "ddp":  # Two processes more; test_conformance.py has them.
            namespace["test_gated_injection"](check)


# ---- The pages on tasks ---------------------------------------------------------------------------------------------


def test_every_shipped_config_is_named() -> None:
    named = {name for page in [README, *TASKS] for name in re.findall(r"\b(\w+\.yaml)", page.text)}
    assert {p.name for folder in ("", "sweeps") for p in (SHIPPED / folder).glob("*.yaml")} <= named


def test_the_sample_sweep_and_the_table_of_sweeps_are_right(in_folder: Path) -> None:
    text = page_of_task("sweeps").text
    sample = next(block for block in code_blocks(text, "yaml") if "grid:" in block)
    (in_folder / "mine.yaml").write_text(sample)
    assert len(expand(load(in_folder / "mine.yaml"))) == 14, "16 without r = 4 at size 2, two seeds"
    rows = re.findall(r"^\| ((?:`\w+\.yaml`(?:, )?)+) \| ([\d, ]+) \|", text, re.MULTILINE)
    counts = {
        n: int(c)
        for names, told in rows
        for n, c in zip(re.findall(r"\w+\.yaml", names), told.split(", "), strict=True)
    }
    assert counts == {p.name: len(expand(load(p))) for p in (SHIPPED / "sweeps").glob("*.yaml")}


def test_the_table_of_axes_is_that_of_the_code() -> None:
    rows = re.findall(r"(?m)^\| .* \| `looped_lm\.(\w+)` \| (.*) \|$", page_of_task("extending").text)
    told = {base: set(re.findall(r"`(\w+)`", shipped)) for base, shipped in rows}
    assert {seam.base.__name__ for seam in SEAMS.values()} <= set(told)
    public = [one for name in looped_lm.__all__ if isinstance(one := getattr(looped_lm, name), type)]
    for name, shipped in told.items():
        base = getattr(looped_lm, name)
        assert shipped == {one.__name__ for one in public if issubclass(one, base) and one is not base}


def test_every_module_called_exists() -> None:
    commands = [words for page in PAGES.values() for words in page.commands()]
    modules = {c[2] for c in commands if c[:2] == ["python", "-m"]} - {"venv", "pytest"}
    assert modules == {"looped_lm", "fitting", "datamodules"}
    assert all((ROOT / m / "__main__.py").exists() for m in modules)


def test_the_sample_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    sample = next(
        block for block in code_blocks(page_of_task("training").text, "python") if "LoopedLM(" in block
    )
    exec(sample, {})
    n_once, n_rec, flops, steps = capsys.readouterr().out.split()
    assert (
        int(n_rec) == 2 * (12 * 128**2 + 2 * 128) + 8 * 8
        and int(steps) > 0
        and float(flops) > 0 < int(n_once)
    )


def test_the_sample_reads_what_its_command_exports(
    run_cli: Any, in_folder: Path, tiny_data_dir: Path
) -> None:
    page = page_of_task("generation")
    status, out = run_cli("fit", "--config", "r4.yaml", *tiny_options(tiny_data_dir))
    assert status == 0, out
    (export,) = [words[3:] for words in page.commands() if "export" in words]
    status, out = run_cli(*_with_checkpoint(export, in_folder))
    assert status == 0, out
    (sample,) = code_blocks(page.text, "python")
    namespace: dict[str, Any] = {}
    exec(sample, namespace)
    assert namespace["model"].num_recurrences == 4


def _with_checkpoint(words: list[str] | tuple[str, ...], folder: Path) -> list[str]:
    checkpoint = str(next(folder.rglob("*.ckpt")))
    return [word.replace("PATH/TO/step=000121.ckpt", checkpoint) for word in words]


@pytest.mark.parametrize("command", lm_commands(), ids=shlex.join)
def test_the_commands_shown_work_at_tiny_scale(
    run_cli: Any,
    in_folder: Path,
    tiny_data_dir: Path,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if command[0] == "convert" or "--trainer.devices" in command:
        pytest.skip("needs the authors' files, or two processes: test_convert.py and test_ddp.py have them")
    save_injection(in_folder, monkeypatch)
    for page in TASKS:
        page.save_samples(in_folder)
    if "--help" in command:
        status, out = run_cli(*command)
        assert status == 0 and "--model.num_recurrences" in out
        return
    if command[0] == "sweep":
        # A file of that name in the working folder goes before the shipped one; its only run is finished.
        (in_folder / command[2]).write_text("grid: {config: r4.yaml, model.size: 1}")
        (run,) = expand(load(in_folder / command[2]))
        record = RunRecord.from_dict({**record_fields(), "run_name": run.id})
        records = in_folder / "runs" / run.sweep / "records"
        if "--records" in command:
            records = in_folder / command[command.index("--records") + 1]
        record.save(records / f"{run.id}.run.json")
        status, out = run_cli(*command)
        assert status == 0 and "1 runs" in out, out
        assert command[1] == "plan" or "1 finished" in out or "1 of 1" in out, out
        return
    options = tiny_options(tiny_data_dir)
    words = list(command)
    if "my_data" in words:
        options = [o for o in options if "data_dir" not in o]
        words = [str(tiny_data_dir) if word == "my_data" else word for word in words]
    if "PATH/TO/step=000121.ckpt" in words:
        status, out = run_cli("fit", "--config", "r4.yaml", *options)
        assert status == 0, out
        words, options = _with_checkpoint(words, in_folder), []
    if words[0] == "evaluate":
        # Rows of 16 bytes hold no question of a probe.
        options = ["--examples", "2", "--context", "200"]
    if "--model.horizon.flops" in words:
        options = [o for o in options if "horizon" not in o] + ["--model.horizon.flops=1e9"]
    status, out = run_cli(*words, *options)
    assert status == 0, out


def test_make_targets_named_in_contributing_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([\w-]+)", PAGES["CONTRIBUTING.md"].text)):
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
