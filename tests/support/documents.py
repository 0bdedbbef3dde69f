"""Code blocks of Markdown files."""

from __future__ import annotations

import re


def code_blocks(text: str, language: str) -> list[str]:
    """Content of the fenced blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
