"""The command line: what answers without torch, what is refused and how, and what a checkpoint may not silently do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

import looped_lm
from looped_lm.cli import COMMANDS, cli
from looped_lm.configuration.command_line import message_of, refuse_shadowing
from looped_lm.configuration.config_files import BASE, resolve_arguments, resolve_config, run_name
from tests.support.cli_options import tiny_options

ROOT = Path(looped_lm.__file__).parent.parent


def in_process_of_its_own(*args: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "looped_lm", *args]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )


@pytest.mark.parametrize("args, status", [(["--help"], 0), ([], 0), (["fitt"], 2), (["--version"], 0)])
def test_help_and_wrong_commands_answer_without_torch(args: list[str], status: int) -> None:
    code = (
        "import sys; from looped_lm.cli import cli; "
        f"status = cli({args!r}); assert not {{'torch', 'lightning', 'jsonargparse'}} & set(sys.modules); "
        "sys.exit(status)"
    )
    done = in_process_of_its_own(code=code)
    assert done.returncode == status, done.stderr
    if not args or args == ["--help"]:
        assert all(command in done.stdout for command in COMMANDS)
    if status == 2:
        assert "Did you mean 'fit'" in done.stderr


@pytest.mark.parametrize(
    "options, says",
    [
        (
            ["--model.sise=3"],
            ["unrecognized arguments: --model.sise", "Did you mean 'model.size'", "model.head_dim"],
        ),
        (["--modle.size=3"], ["Did you mean 'model'", "trainer"]),
        (["--trainer.max_step=3"], ["Did you mean 'trainer.max_steps'"]),
        (
            ["--model.injection=looped_lm.LinearInjektion"],
            ["Did you mean 'looped_lm.LinearInjection'", "AdditiveInj"],
        ),
        (["--model.injection=LinearInjektion"], ["Did you mean 'looped_lm.LinearInjection'"]),
        (["--model.lanes=HyperConnectionLanes", "--model.lanes.num_lane=3"], ["Did you mean 'num_lanes'"]),
        (["--data.seq_length=3"], ["Did you mean 'seq_len'", "batch_size"]),
        (["--data.tokenizer=datamodules.ByteTokeniser"], ["Did you mean 'datamodules.ByteTokenizer'"]),
        (["--model.size=big"], ['"model.size"', "Given value: big"]),
    ],
)
def test_what_is_mistyped_is_answered_with_what_exists(
    run_cli: Any, options: list[str], says: list[str]
) -> None:
    status, out = run_cli("fit", *options)
    assert status == 2
    assert all(part in out for part in says), out


def test_unknown_keys_in_a_file_are_errors_too(run_cli: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model:\n  sise: 3\n")
    status, out = run_cli("fit", "--config", str(wrong))
    assert status == 2 and "Did you mean 'model.size'" in out
    wrong.write_text(
        "model:\n  lanes:\n    class_path: looped_lm.HyperConnectionLanes\n    init_args: {lanes: 3}\n"
    )
    status, out = run_cli("fit", "--config", str(wrong))
    assert status == 2 and "num_lanes" in out
    wrong.write_text("trainer: {callbacks+: [{class_path: callbacks.Checkpointz}]}\n")
    status, out = run_cli("fit", "--config", str(wrong))
    assert status == 2 and "Did you mean 'callbacks.Checkpoints'" in out


@pytest.mark.parametrize(
    "options, says",
    [
        (["--config", "r8hc.yaml"], "Did you mean 'r8_hc.yaml'? Shipped: base.yaml"),
        (["--model.size=0"], "size is 0"),
        (["--model.bptt=TruncatedBPTT", "--model.injection=PassthroughInjection"], "no gradient at all"),
        (["--model.horizon=FlopsBudget", "--model.horizon.flops=1"], "less than one optimizer step"),
    ],
)
def test_bad_values_give_one_message_and_a_status(run_cli: Any, options: list[str], says: str) -> None:
    status, out = run_cli("plan", *options)
    assert status == 1 and says in out and "Traceback" not in out


@pytest.mark.parametrize(
    "options, says",
    [
        (["--data.batch_size=0"], "batch_size is 0"),
        (["--model.schedule.warmup=0.5"], "warmup 0.5 and warmdown 1.0 overlap"),
        (["--model.bptt=TruncatedBPTT", "--model.bptt.window=0"], "window is 0"),
        (["--model.transfer.data_exponent=-1e9"], "exponent"),
        (["--model.optimizer=MuonH", "--model.optimizer.betas=[2,3]"], "betas are (2.0, 3.0)"),
    ],
)
def test_the_message_of_a_component_is_not_buried(run_cli: Any, options: list[str], says: str) -> None:
    status, out = run_cli("plan", *options)
    assert status in (1, 2) and says in out and "Traceback" not in out
    assert len(out) < 600 and "Union" not in out, out


def test_the_message_of_a_reading_process_is_not_buried() -> None:
    class Reading(torch.utils.data.Dataset):
        def __getitem__(self, index: int) -> int:
            raise ValueError(f"row {index} is damaged: restore it")

        def __len__(self) -> int:
            return 1

    with pytest.raises(ValueError) as caught:
        next(iter(torch.utils.data.DataLoader(Reading(), num_workers=1)))
    assert "Traceback" in str(caught.value)
    assert message_of(caught.value) == "row 0 is damaged: restore it"


def test_a_config_given_without_its_flag_is_explained(run_cli: Any) -> None:
    status, out = run_cli("fit", "r4.yaml")
    assert status == 2 and "given as --config FILE" in out


@pytest.mark.parametrize(
    "content, says",
    [("", "own.yaml is empty"), ("- 1\n", "own.yaml is a list"), ("a: [1\n", "own.yaml is not YAML")],
)
def test_a_config_that_is_none_is_named(run_cli: Any, in_folder: Path, content: str, says: str) -> None:
    (in_folder / "own.yaml").write_text(content)
    status, out = run_cli("plan", "--config", "own.yaml")
    assert status == 1 and says in out


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_untrained_weights_are_not_judged(run_cli: Any, in_folder: Path, command: str) -> None:
    status, out = run_cli(command)
    assert status == 1 and f"{command} needs --ckpt_path FILE" in out
    status, out = run_cli(command, "--ckpt_path=last")
    assert status == 1 and "'last' is not a file" in out


def test_a_run_name_is_no_path(run_cli: Any, in_folder: Path) -> None:
    status, out = run_cli("plan", "--run_name=../escape")
    assert status == 1 and "run_name '../escape' is a path" in out


def test_lightnings_own_refusals_are_messages(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    own = [
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        "--trainer.enable_checkpointing=false",
    ]
    status, out = run_cli("fit", *tiny_options(tiny_data_dir), *own)
    assert status == 1 and "error: " in out and "Traceback" not in out


def test_a_run_without_logger_can_be_repeated(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> None:
    for _ in range(2):
        status, out = run_cli("fit", *tiny_options(tiny_data_dir), "--trainer.logger=false")
        assert status == 0, out


def test_sigterm_is_no_success(run_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> None:
        raise SIGTERMException

    monkeypatch.setattr("looped_lm.configuration.parser.main", stopped)
    status, out = run_cli("fit")
    assert status == 143 and "stopped by SIGTERM; resume" in out


def test_a_worker_is_the_command_line_to_lightnings_launcher() -> None:
    """Lightning starts the other processes of a run from `__main__` and sys.argv."""
    code = (
        "import sys; from looped_lm.configuration.command_line import run_as_command_line\n"
        "status = run_as_command_line(['fit', '--model.size=0'])\n"
        "from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd\n"
        "print(*_basic_subprocess_cmd()[1:]); sys.exit(status)"
    )
    done = in_process_of_its_own(code=code)
    assert done.returncode == 1 and "size is 0" in done.stderr, done.stderr
    command = f"-m looped_lm.__main__ fit --config {BASE} --model.size=0"
    assert done.stdout.strip().endswith(command), done.stdout


# ---- configuration files -------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_early_is_told_nothing(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli(["sweep", "plan", "injection_ablation.yaml"]) == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == ""


def test_another_pipe_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(args: list[str]) -> int:
        raise BrokenPipeError("a service has gone")

    monkeypatch.setattr("looped_lm.cli.run", broken)
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(BrokenPipeError, match="a service has gone"):
            cli(["sweep", "plan", "injection_ablation.yaml"])


def test_a_bare_name_is_taken_from_the_working_folder_first(in_folder: Path) -> None:
    assert resolve_config("r4.yaml") == str(BASE.parent / "r4.yaml")
    (in_folder / "r4.yaml").write_text("model: {}\n")
    assert resolve_config("r4.yaml") == "r4.yaml"


def test_base_lies_underneath_and_resolving_twice_changes_nothing() -> None:
    """A launcher of several processes runs the resolved command line again."""
    once = resolve_arguments(["--config", "r8_hc.yaml", "--config=paper.yaml", "--model.size=3"])
    assert once[:2] == ["--config", str(BASE)]
    assert once[2:4] == ["--config", str(BASE.parent / "r8_hc.yaml")]
    assert once[4] == f"--config={BASE.parent / 'paper.yaml'}" and once[5] == "--model.size=3"
    assert resolve_arguments(once) == once
    assert run_name(["fit", *once]) == "r8_hc-paper" and run_name(["fit", *resolve_arguments([])]) == "base"


def test_the_shipped_config_named_twice_is_still_under_the_rest() -> None:
    assert resolve_arguments(["--config", "base.yaml"]) == ["--config", str(BASE)]


# ---- shadowing -----------------------------------------------------------------------------------------------------


def test_a_folder_that_hides_a_package_is_named(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = in_folder / "callbacks"
    own.mkdir()
    (own / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "callbacks", raising=False)
    monkeypatch.syspath_prepend(str(in_folder))
    with pytest.raises(ValueError, match=r"callbacks/__init__.py hides the package 'callbacks' of looped_lm"):
        refuse_shadowing()


def test_a_torchvision_that_does_not_match_is_explained(
    run_cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "looped_lm.configuration.parser":
                raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.delitem(sys.modules, "looped_lm.configuration.parser", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delattr(looped_lm, "cli", raising=False)
    status, out = run_cli("fit")
    assert status == 1 and "pip uninstall torchvision" in out


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(run_cli: Any, in_folder: Path, tiny_data_dir: Path) -> Path:
    """Checkpoint of a tiny r4 run."""
    status, out = run_cli("fit", "--config", "r4.yaml", *tiny_options(tiny_data_dir))
    assert status == 0, out
    return next(in_folder.glob("runs/r4/version_0/checkpoints/*.ckpt"))


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(
    run_cli: Any, trained: Path, tiny_data_dir: Path
) -> None:
    """Lightning would let the checkpoint's hyperparameters win without a word."""
    options = tiny_options(tiny_data_dir)
    options += ["--config", "r4_additive.yaml", "--model.bptt=TruncatedBPTT", "--model.logit_softcap=20"]
    for subcommand in ("fit", "validate"):
        status, out = run_cli(subcommand, *options, "--ckpt_path", str(trained))
        assert status == 1
        for difference in (
            "bptt.class_path: 'looped_lm.FullBPTT' in the checkpoint, 'looped_lm.TruncatedBPTT' here",
            "injection.class_path: 'looped_lm.LinearInjection' in the checkpoint, 'looped_lm.AdditiveInjection' here",
            "logit_softcap: 15.0 in the checkpoint, 20.0 here",
        ):
            assert difference in out


def test_validate_takes_the_run_from_the_checkpoint_and_the_rest_from_the_user(
    run_cli: Any, trained: Path
) -> None:
    status, out = run_cli(
        "validate", "--ckpt_path", str(trained), "--data.val_batch_size=1", "--run_name=mine"
    )
    assert status == 0, out
    config = next(Path("runs").glob("mine/*/config.yaml")).read_text()
    assert (
        "num_recurrences: 4" in config
        and "val_batch_size: 1" in config
        and "datamodules.ByteTokenizer" in config
    )


def test_a_changed_recipe_is_reported_and_used(run_cli: Any, trained: Path, tiny_data_dir: Path) -> None:
    options = tiny_options(tiny_data_dir, steps=5)
    status, out = run_cli("fit", "--config", "r4.yaml", *options, "--ckpt_path", str(trained))
    assert status == 0, out
    assert "horizon.init_args.steps: 3 in the checkpoint, 5 here" in out and "5 of 5" in out


def test_a_broken_or_missing_checkpoint_is_named(run_cli: Any, trained: Path, tiny_data_dir: Path) -> None:
    options = ["--config", "r4.yaml", *tiny_options(tiny_data_dir)]
    status, out = run_cli("fit", *options, "--ckpt_path", "nowhere.ckpt")
    assert status == 1 and "'nowhere.ckpt' is not a file" in out
    cut = trained.with_name("cut.ckpt")
    cut.write_bytes(trained.read_bytes()[:1000])
    status, out = run_cli("fit", *options, "--ckpt_path", str(cut))
    assert status == 1 and "cut.ckpt cannot be read as a checkpoint" in out
    torch.save({"weights": 1}, cut)
    status, out = run_cli("validate", *options, "--ckpt_path", str(cut))
    assert status == 1 and "not a checkpoint of a LoopedLM: it has no state_dict" in out


def test_results_are_never_overwritten(run_cli: Any, trained: Path, tiny_data_dir: Path) -> None:
    before = trained.read_bytes()
    status, out = run_cli("fit", "--config", "r4.yaml", *tiny_options(tiny_data_dir))
    assert status == 0 and "version_1" in out
    assert trained.read_bytes() == before
