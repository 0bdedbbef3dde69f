"""A Markdown page: its code blocks, commands and samples."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import looped_lm

ROOT = Path(looped_lm.__file__).parent.parent


def code_blocks(text: str, language: str) -> list[str]:
    """Content of the fenced blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A Markdown page.

    Args:
        path: of the file; links start from its folder.
        text: its content.
    """

    path: Path
    text: str

    @classmethod
    def at(cls, name: str) -> Page:
        """The page of that name, as seen from the root of the project."""
        return cls(ROOT / name, (ROOT / name).read_text(encoding="utf-8"))

    def prose(self) -> str:
        """The text without its fenced blocks."""
        return re.sub(r"(?ms)^```.*?^```", "", self.text)

    def code(self) -> list[str]:
        """Inline code, each with single spaces."""
        return [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", self.prose())]

    def commands(self) -> list[list[str]]:
        """Words of every command of the bash blocks (split at &&), of a `$` in a text block, and of inline code."""
        lines = [line for block in code_blocks(self.text, "bash") for line in block.splitlines()]
        # Four words name a command without what it needs: its help must exist.
        inline = [words for words in self.code() if words.startswith("python -m ")]
        named = ("python -m looped_lm", "python -m fitting", "python -m datamodules")
        lines += [w + " --help" if w.startswith(named) and w.count(" ") == 3 else w for w in inline]
        for block in code_blocks(self.text, "text"):
            lines += [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
        parts = [part for line in lines if not line.lstrip().startswith("#") for part in line.split("&&")]
        words = [shlex.split(part) for part in parts if part.strip()]
        return [line[1:] if line[0] == "exec" else line for line in words]

    def samples(self) -> dict[str, str]:
        """Python and YAML blocks that the paragraph before them says to save, by the name given there.

        The last file named in that paragraph is the one.
        """
        found = {}
        for before, content in re.findall(
            r"\n\n([^\n](?:(?!\n\n).)*)\n\n```(?:python|yaml)\n(.*?)```", self.text, re.DOTALL
        ):
            names = re.findall(r"[Ss]ave(?:d)? [^.]*?`(\w+\.(?:py|yaml))`", before)
            if names:
                found[names[-1]] = content
        return found

    def save_samples(self, folder: Path) -> None:
        """Save what the page and the README, which the others build on, say to save."""
        for page in (Page.at("README.md"), self):
            for name, content in page.samples().items():
                (folder / name).write_text(content, encoding="utf-8")
