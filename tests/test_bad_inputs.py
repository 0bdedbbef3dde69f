"""A table of bad inputs: each gives one message of a few lines and a status, and leaves what is there as it was.

With LOOPED_LM_BAD_INPUTS=FILE the table is written there as Markdown.
"""

# ruff: noqa: E501  a table reads best with a case in a line
from __future__ import annotations

import gzip
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import datamodules.__main__ as preparation
from looped_lm.runs import folder as run_folder
from tests.support.checkpoint_files import flip
from tests.support.cli_options import tiny_options

SMALL = [f"--model.{part}" for part in ("prelude_layers=1", "recurrent_layers=1", "coda_layers=1")]


@dataclass
class World:
    """A working folder with a finished run (runs/r4/version_0), its data (rows) and some texts."""

    folder: Path
    make_disk: Callable[[int], Path]

    @property
    def checkpoint(self) -> Path:
        return next((self.folder / "runs/r4/version_0/checkpoints").glob("step=000004.ckpt"))

    @property
    def chunk(self) -> Path:
        return next((self.folder / "rows/train").glob("*.bin"))

    def write(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)


Setup = Callable[[World], Any]


@dataclass
class Case:
    """One bad input: what it is, the command, what the message must say, and how the world is spoilt for it."""

    what: str
    command: str
    says: str
    spoil: Setup = lambda world: None

    def __str__(self) -> str:
        return self.what.replace(" ", "_").replace("/", "_")


def fit(what: str, options: str, says: str, spoil: Setup = lambda world: None) -> Case:
    return Case(what, f"fit --config r4.yaml TINY {options}", says, spoil)


def prepare(what: str, options: str, says: str, spoil: Setup = lambda world: None) -> Case:
    return Case(what, f"prepare --seq-len 16 --val-fraction 0.2 {options}", says, spoil)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def callbacks(*classes: str) -> Setup:
    content = yaml.safe_dump({"trainer": {"callbacks": [{"class_path": c} for c in classes]}})
    return lambda world: world.write("own.yaml", content)


def full_disk(world: World, kib: int = 64) -> None:
    (world.folder / "disk").symlink_to(world.make_disk(kib))


CASES = [
    # ---- configuration
    Case("no such config", "fit --config r4x.yaml", "Did you mean 'r4.yaml'"),
    Case("empty config", "fit --config own.yaml", "own.yaml is empty", lambda w: w.write("own.yaml", "")),
    Case("config is no YAML", "fit --config own.yaml", "is not YAML", lambda w: w.write("own.yaml", "a: [")),
    Case(
        "binary config", "fit --config own.yaml", "is not YAML", lambda w: w.write("own.yaml", b"\xff\xfe\x00a")
    ),
    *[
        Case(f"{section} is {value}", "fit --config own.yaml", f"for {section}, which must map keys", lambda w, line=f"{section}: {value}": w.write("own.yaml", line))
        for section, value in (("model", "null"), ("model", "[1]"), ("trainer", "null"))
    ],
    Case("unknown command", "train --config r4.yaml", "Commands: fit"),
    fit("unknown key", "--model.sise=3", "Did you mean 'model.size'"),
    fit("unknown class", "--model.lanes=HyperLanes", "HyperConnectionLanes"),
    fit("unknown argument of a class", "--data.seq_length=3", "Did you mean 'seq_len'"),
    fit("argument of a class that takes none", "--model.injection.d_model=3", "Keys: none"),
    fit("null for a number of a callback", "--callbacks.Checkpoints.keep=null", "Got value: None"),
    fit("null for a number of an optimizer", "--model.optimizer.momentum=null", "Got value: None"),
    fit("null for a number of the data", "--data.num_workers=null", "Got value: None"),
    fit("rate that torch refuses", "--model.optimizer=torch.optim.AdamW --model.optimizer.lr=-1", "AdamW: Invalid learning rate"),
    fit("logger without its package", "--trainer.logger=lightning.pytorch.loggers.CometLogger", "CometLogger: "),
    fit("negative seed", "--seed_everything=-1", "seed_everything: -1"),
    fit("text for devices", "--trainer.devices=x", "devices"),
    fit("text for a number", "--model.size=big", "Given value: big"),
    fit("run name is a path", "--run_name=../escape", "is a path"),
    fit("no GPU here", "--trainer.accelerator=gpu --trainer.devices=99", "accelerator auto|devices"),
    fit("unknown precision", "--trainer.precision=fp7", "precision"),
    Case(
        "list of callbacks without FlopsMonitor",
        "fit --config own.yaml TINY",
        "`trainer.callbacks+` appends",
        callbacks("callbacks.RunRecordWriter"),
    ),
    Case(
        "a callback twice",
        "fit --config own.yaml TINY",
        "trainer.callbacks names FlopsMonitor twice",
        callbacks("callbacks.FlopsMonitor", "callbacks.FlopsMonitor"),
    ),
    # ---- sizes and recipe
    fit("size zero", "--model.size=0", "size is 0"),
    fit("negative layers", "--model.recurrent_layers=-1", "-1"),
    fit("no recurrence", "--model.num_recurrences=0", "num_recurrences is 0"),
    fit("odd head dimension", "--model.head_dim=7", "head_dim"),
    fit("negative batch", "--model.batch_tokens=-32", "batch_tokens is -32"),
    fit("batch that rows do not fill", "--model.batch_tokens=40", "40"),
    fit("zero steps", "--model.horizon.steps=0", "0"),
    fit("a budget below one step", "--model.horizon=FlopsBudget --model.horizon.flops=1", "less than one"),
    fit("validation every 0 steps", "--model.val_every_steps=0", "val_every_steps is 0"),
    fit("accumulation set by hand", "--trainer.accumulate_grad_batches=3", "batch_tokens"),
    fit("no validation", "--trainer.limit_val_batches=0", "no loss to record"),
    fit("rows of a process: 0", "--data.batch_size=0", "batch_size is 0"),
    fit("negative workers", "--data.num_workers=-1", "num_workers is -1"),
    fit("negative data seed", "--data.seed=-1", "seed is -1"),
    fit("weights that diverge at once", "--model.transfer.norm=1e30 --trainer.log_every_n_steps=1", "diverged"),
    # ---- data
    fit("no such data", "--data.data_dir=nowhere", "nowhere"),
    fit("data that is not prepared", "--data.data_dir=texts", "texts"),
    fit("another row length than the data's", "--data.seq_len=32", "seq_len is 32"),
    fit("another tokenizer than the data's", "--data.tokenizer=BPETokenizer", "tokenizer"),
    fit("vocabulary below the tokenizer's", "--data.vocab_size=100", "vocab_size is 100"),
    fit("damaged manifest", "", "manifest", lambda w: cut(w.folder / "rows/manifest.json")),
    fit("damaged index", "", "index.json", lambda w: cut(w.folder / "rows/train/index.json")),
    fit("missing chunk", "", "chunk", lambda w: w.chunk.unlink()),
    fit("flipped byte in a chunk", "", "damaged", lambda w: flip(w.chunk, 500)),
    fit("truncated chunk", "", "damaged", lambda w: cut(w.chunk)),
    # ---- checkpoints
    Case("nothing to validate", "validate --config r4.yaml", "needs --ckpt_path FILE"),
    fit("no such checkpoint", "--ckpt_path=nowhere.ckpt", "is not a file"),
    fit("folder for a checkpoint", "--ckpt_path=runs", "is not a file"),
    fit("truncated checkpoint", "--ckpt_path=CKPT", "truncated", lambda w: cut(w.checkpoint)),
    fit(
        "flipped byte in a checkpoint",
        "--ckpt_path=CKPT",
        "The newest whole checkpoint beside it",
        lambda w: flip(w.checkpoint, w.checkpoint.stat().st_size // 2),
    ),
    fit(
        "a text for a checkpoint", "--ckpt_path=a.ckpt", "cannot be read", lambda w: w.write("a.ckpt", "hello")
    ),
    Case(
        "validate a damaged checkpoint", "validate --ckpt_path=CKPT", "truncated", lambda w: cut(w.checkpoint)
    ),
    fit("checkpoint of another model", "--ckpt_path=CKPT --model.size=2", "size: 1 in the checkpoint, 2"),
    fit(
        "checkpoint of another optimizer",
        "--ckpt_path=CKPT --model.horizon.steps=6 --model.optimizer=torch.optim.SGD",
        "'looped_lm.MuonH' in the checkpoint, 'torch.optim.sgd.SGD' here",
    ),
    fit("checkpoint of a run that is complete", "--ckpt_path=CKPT", "nothing is left to train"),
    fit(
        "checkpoint of other data",
        "--ckpt_path=CKPT --data.data_dir=rows2 --model.horizon.steps=6",
        "the checkpoint was trained with",
    ),
    fit("--resume and --ckpt_path", "--resume=auto --ckpt_path=CKPT", "Leave one out"),
    fit("--resume of no run", "--resume=nowhere", "not a run's folder with a whole checkpoint"),
    fit("--resume of a folder above the run's", "--resume=runs/r4", "Give runs/NAME/version_N"),
    fit("--resume with another seed", "--resume=auto --seed_everything=7", "that is another run"),
    Case("--resume for validate", "validate --ckpt_path=CKPT --resume=auto", "resume is for fit"),
    # ---- where results go
    fit("a file in the folder's place", "--trainer.logger.save_dir=mine", "Not a directory"),
    fit("a folder with results", "--trainer.logger.version=0", "not overwritten"),
    fit("a full disk", "--trainer.logger.save_dir=disk", "No space left on device", full_disk),
    Case("validate onto a full disk", "validate --ckpt_path=CKPT --trainer.logger.save_dir=disk", "No space", lambda w: full_disk(w, 4)),
    Case("export onto a full disk", "export --ckpt CKPT --out disk/new", "disk/new could not be written", full_disk),
    Case("prompts from no file", "generate --ckpt CKPT --prompt-file none.txt", "none.txt"),
    # ---- preparation
    prepare("no such source", "--source nowhere --tokenizer bytes --out new", "no file at 'nowhere'"),
    prepare("empty folder", "--source void --tokenizer bytes --out new", "no file", lambda w: (w.folder / "void").mkdir()),
    prepare("only empty documents", "--source e.txt --tokenizer bytes --out new", "no document with any text", lambda w: w.write("e.txt", "")),
    prepare("one document", "--source one.txt --tokenizer bytes --out new", "documents", lambda w: w.write("one.txt", "a word " * 99)),
    prepare("too little text for a row", "--source texts --tokenizer bytes --out new --seq-len 99999", "does not|do not fill"),
    prepare("binary file", "--source b.txt --tokenizer bytes --out new", "b.txt", lambda w: w.write("b.txt", b"\xff\x00\xfe" * 99)),
    prepare("broken JSON line", "--source a.jsonl --tokenizer bytes --out new", "a.jsonl", lambda w: w.write("a.jsonl", '{"text": "a"}\n{"text": ')),
    prepare("JSON lines without the key", "--source a.jsonl --tokenizer bytes --out new", "text", lambda w: w.write("a.jsonl", '{"body": "a"}\n')),
    prepare("truncated gzip", "--source a.jsonl.gz --tokenizer bytes --out new", "a.jsonl.gz", lambda w: w.write("a.jsonl.gz", gzip.compress(b'{"text": "' + os.urandom(4000).hex().encode() + b'"}')[:900])),
    prepare("parquet that is none", "--source a.parquet --tokenizer bytes --out new", "a.parquet|pyarrow", lambda w: w.write("a.parquet", "hello")),
    prepare("unknown tokenizer", "--source texts --tokenizer gpt9 --out new", "--tokenizer gpt9"),
    prepare("damaged tokenizer.json", "--source texts --tokenizer t.json --out new", "t.json", lambda w: w.write("t.json", "{")),
    prepare("no such tokenizer.json", "--source texts --tokenizer none.json --out new", "none.json"),
    prepare("negative row length", "--source texts --tokenizer bytes --out new --seq-len -4", "-4"),
    prepare("impossible validation share", "--source texts --tokenizer bytes --out new --val-fraction 2", "val_fraction is 2"),
    prepare("zero workers", "--source texts --tokenizer bytes --out new --workers 0", "workers is 0"),
    prepare("a file in the output's place", "--source texts --tokenizer bytes --out mine", "mine exists"),
    prepare("output below a file", "--source texts --tokenizer bytes --out mine/new", "mine"),
    prepare("output with another recipe", "--source texts --tokenizer bytes --out rows --seed 3", "another recipe"),
    prepare("scheme without its package", "--source nope://bucket/a.txt --tokenizer bytes --out new", "nope://"),
    prepare("preparation onto a full disk", "--source long.txt texts --tokenizer bytes --out disk/new", "No space left on device", lambda w: (full_disk(w), w.write("long.txt", "many words " * 30000))),
    Case("inspect no data", "inspect texts", "texts"),
    Case("verify a flipped byte", "verify rows", "chunk|.bin", lambda w: flip(w.chunk, 500)),
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a World, to be copied."""
    from looped_lm.cli import cli

    folder = tmp_path_factory.mktemp("world")
    for i in range(40):
        path = folder / f"texts/{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"document {i}: " + "the loop runs once more " * (3 + i % 5))
    (folder / "mine").write_text("mine")
    common = ["--source", str(folder / "texts"), "--tokenizer", "bytes", "--seq-len", "16"]
    for name, seed in (("rows", "0"), ("rows2", "1")):
        out = str(folder / name)
        assert not preparation.main(
            ["prepare", *common, "--val-fraction", "0.2", "--out", out, "--seed", seed]
        )
    before, argv = os.getcwd(), sys.argv
    os.chdir(folder)
    try:
        options = [*tiny_options(Path("rows"), steps=4), *SMALL]
        assert not cli(["fit", "--config", "r4.yaml", *options])
    finally:
        os.chdir(before)
        sys.argv = argv
    return folder


@pytest.fixture
def world(
    finished: Path, tmp_path: Path, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> World:
    shutil.copytree(finished, tmp_path / "world")
    monkeypatch.chdir(tmp_path / "world")
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.0)
    return World(tmp_path / "world", small_disk)


TABLE: list[tuple[str, str, int, str]] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    if out := os.environ.get("LOOPED_LM_BAD_INPUTS"):
        rows = ["| # | input | command | status | message |", "|---|---|---|---|---|"]
        for i, (what, command, status, message) in enumerate(TABLE, 1):
            shown = message.replace("|", "\\|").replace("\n", "<br>")
            rows.append(f"| {i} | {what} | `{command}` | {status} | {shown} |")
        Path(out).write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bad_input(case: Case, world: World, run_cli: Any, capfd: pytest.CaptureFixture[str]) -> None:
    case.spoil(world)
    tiny = [*tiny_options(Path("rows"), steps=4), *SMALL]
    command: list[str] = []
    for word in case.command.split():
        word = word.replace("CKPT", str(world.checkpoint.relative_to(world.folder)))
        command += tiny if word == "TINY" else [word]
    before = _contents(world.folder)
    if command[0] in ("prepare", "inspect", "verify"):
        capfd.readouterr()
        try:
            status = preparation.main(command)
        except SystemExit as stop:
            status = int(stop.code or 0)
        out = "".join(capfd.readouterr())
    else:
        status, out = run_cli(*command)
    message = _message(out)
    TABLE.append((case.what, case.command.replace("TINY ", ""), status, message))
    assert status not in (0, 70) and "Traceback" not in out, out
    assert any(part in message for part in case.says.split("|")), out
    assert len(message.splitlines()) <= 12 and len(message) < 1500, message
    after = _contents(world.folder)
    assert {path: after.get(path) for path in before} == before, "something that was there was changed"


def _message(out: str) -> str:
    """What a user is told: from the last line that begins with `error:` or `usage:` on."""
    lines = out.splitlines()
    starts = [i for i, line in enumerate(lines) if "error:" in line]
    text = "\n".join(lines[starts[0] :] if starts else lines)
    # A progress bar may stand before it on the same line.
    return text[text.find("error:") :] if starts else text


def _contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"}


def test_the_table_has_no_case_twice() -> None:
    assert len({case.what for case in CASES}) == len(CASES) >= 40
