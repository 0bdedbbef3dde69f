"""The stories of `examples/`: their commands, the output that they show, and the same at a tiny scale."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import looped_lm
from tests.support.documents import code_blocks

ROOT = Path(looped_lm.__file__).parent.parent
EXAMPLES = ROOT / "examples"


class Story:
    """A folder of `examples/`, copied to where its commands may write.

    Args:
        name: name of the folder.
        folder: an empty folder, to which its files are copied.
    """

    def __init__(self, name: str, folder: Path) -> None:
        shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True)
        self.folder, self.text = folder, (EXAMPLES / name / "README.md").read_text()

    def blocks(self, language: str) -> list[str]:
        """Content of the code blocks in a language."""
        return code_blocks(self.text, language)

    def block(self, part: str) -> str:
        """The only shell block that contains `part`."""
        (found,) = [block for block in self.blocks("bash") if part in block]
        return found

    def commands(self, part: str = "") -> list[list[str]]:
        """The commands in shell blocks whose line contains `part`, as words."""
        return [
            shlex.split(line) for line in self.blocks("bash") for line in line.splitlines() if part in line
        ]

    def shown(self, part: str) -> tuple[list[str], list[str]]:
        """The only command after a `$` that contains `part`, as words, and the lines below it."""
        found = [
            block.removeprefix("$ ").split("\n") for block in self.blocks("text") if block.startswith("$ ")
        ]
        ((command, *lines),) = [lines for lines in found if part in lines[0]]
        return shlex.split(command), [line for line in lines if line.strip() not in ("", "...")]

    def set_axes(self, file: str, **values: str) -> None:
        """Change values of axes in a sweep file. An axis is given by the last word of its key and takes one line."""
        path = self.folder / file
        text = path.read_text()
        for key, value in values.items():
            text, count = re.subn(rf"(?m)^(  [\w.]*\b{key}: ).*$", rf"\g<1>{value}", text)
            assert count == 1, (file, key, text)
        path.write_text(text)

    def bash(self, block: str, status: int = 0) -> str:
        """Run a block as a user would, up to the first failure; returns what it printed."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == status, done.stdout
        return done.stdout


def missing(lines: list[str], printed: str) -> list[str]:
    """The lines from the first one that was not printed after those before it.

    Several blanks count as one, and `...` in a line stands for anything.
    """
    rest = [" ".join(line.split()) for line in printed.splitlines()]
    for i, line in enumerate(lines):
        parts = " ".join(line.split()).split("...")
        wanted = re.compile(".*".join(map(re.escape, parts)))
        at = next((n for n, candidate in enumerate(rest) if wanted.search(candidate)), None)
        if at is None:
            return lines[i:]
        rest = rest[at + 1 :]
    return []


def tiny_scale(data_dir: Path) -> str:
    """A config to replace a story's scale: rows of 16 bytes, steps of two rows, heads of 16."""
    return f"""
trainer: {{accelerator: cpu, devices: 1, precision: 32-true}}
model: {{size: 1, head_dim: 16, batch_tokens: 32, val_every_steps: null, compile_layers: false}}
data:
  class_path: datamodules.TokenDataModule
  init_args:
    data_dir: {data_dir}
    seq_len: 16
    batch_size: 2
    val_rows: 2
    final_val_rows: 8
"""
