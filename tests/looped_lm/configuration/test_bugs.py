"""A bug in a class of a user's own looks like one, with type, file and line; a wrong argument is one message."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

import looped_lm
from tests.support.cli_options import tiny_options

ROOT = Path(looped_lm.__file__).parent.parent
OWN = """
import lightning as L
import torch
from datamodules import ByteTokenizer, TokenDataModule
from looped_lm import LinearInjection

class Constructor(LinearInjection):
    def __init__(self, d_model: int):
        raise TypeError("a bug of mine")

class Needs(LinearInjection):
    def __init__(self, d_model: int, gate: float):
        super().__init__(d_model)

class Forward(LinearInjection):
    def forward(self, e, s, i):
        raise ValueError("a bug of mine")

class Built(L.Callback):
    def __init__(self):
        raise ValueError("a bug of mine")

class Started(L.Callback):
    def on_train_start(self, trainer, pl_module):
        open("a bug of mine")

class Data(TokenDataModule):
    def __init__(self, **settings):
        raise TypeError("a bug of mine")

class Rows(TokenDataModule):
    def setup(self, stage):
        raise ValueError("a bug of mine")

class Tokenizer(ByteTokenizer):
    def __init__(self):
        raise ImportError("a bug of mine")

class Optimizer(torch.optim.AdamW):
    def __init__(self, params, lr: float = 0.1):
        raise ValueError("a bug of mine")
"""
BROKEN = "from looped_lm import LinearInjection\nimport a_bug_of_mine\nclass Own(LinearInjection): pass\n"


@pytest.fixture
def own(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the modules `own_parts` and `own_broken`, from which they can be imported."""
    (in_folder / "own_parts.py").write_text(OWN)
    (in_folder / "own_broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(in_folder))
    for name in ("own_parts", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return in_folder


def line(text: str) -> int:
    """The line of OWN where a class raises."""
    lines = OWN.splitlines()
    start = lines.index(next(row for row in lines if row.startswith(f"class {text}(")))
    return start + next(i for i, row in enumerate(lines[start:], 1) if "a bug of mine" in row)


@pytest.mark.parametrize("name", ["Constructor", "Forward"])
def test_file_and_line_of_a_components_bug_are_shown(own: Path, tiny_data_dir: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "looped_lm", "fit", *tiny_options(tiny_data_dir), f"--model.injection=own_parts.{name}"],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{own}"},
    )  # fmt: skip
    assert done.returncode == 1
    assert f'File "{own / "own_parts.py"}", line {line(name)}, in' in done.stderr
    assert done.stderr.rstrip().endswith("a bug of mine")


@pytest.mark.parametrize(
    "option, error",
    [
        ("--trainer.callbacks+=own_parts.Built", ValueError),
        ("--trainer.callbacks+=own_parts.Started", FileNotFoundError),
        ("--data=own_parts.Data", TypeError),
        ("--data=own_parts.Rows", ValueError),
        ("--data.tokenizer=own_parts.Tokenizer", ImportError),
        ("--model.optimizer=own_parts.Optimizer", ValueError),
    ],
)
def test_a_bug_keeps_its_type_and_its_line(
    run_cli: Any, own: Path, tiny_data_dir: Path, option: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match="a bug of mine") as caught:
        run_cli("fit", *tiny_options(tiny_data_dir), option)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno) == (str(own / "own_parts.py"), line(option.rpartition(".")[2]))


def test_an_import_that_fails_inside_a_users_module_shows_where(
    run_cli: Any, own: Path, tiny_data_dir: Path
) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_bug_of_mine") as caught:
        run_cli("plan", *tiny_options(tiny_data_dir), "--model.injection=own_broken.Own")
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == str(own / "own_broken.py")


@pytest.mark.parametrize(
    "options, says",
    [
        (["--model.injection=own_parts.Nothing"], "module 'own_parts' has no attribute 'Nothing'"),
        (["--model.injection=own_parts.Needs"], "the following arguments are required: gate"),
        (["--model.injection=no_such_module.Own"], "No module named 'no_such_module'"),
        (["--trainer.callbacks+=own_parts.Started", "--trainer.callbacks.every=3"], "every"),
    ],
)
def test_a_wrong_name_or_argument_is_one_message(
    run_cli: Any, own: Path, tiny_data_dir: Path, options: list[str], says: str
) -> None:
    status, out = run_cli("plan", *tiny_options(tiny_data_dir), *options)
    assert status == 2 and says in out and "Traceback" not in out
