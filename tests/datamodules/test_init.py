"""The package's public names, resolved when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import datamodules


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, datamodules\n"
        "print([m for m in ('torch', 'lightning', 'litdata', 'numpy', 'tokenizers', 'fsspec') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_every_public_name_is_there():
    for name in datamodules.__all__:
        assert getattr(datamodules, name).__name__ == name
    assert dir(datamodules) == datamodules.__all__


def test_an_unknown_name_is_answered_with_those_that_exist():
    with pytest.raises(
        AttributeError, match="no attribute 'Tokeniser'; it has BPETokenizer, ByteTokenizer, "
    ):
        datamodules.Tokeniser  # noqa: B018


def test_modules_are_found_under_the_names_they_had_in_version_0_1_0():
    code = (
        "import datamodules, datamodules.tabular\n"
        "from datamodules.pretrained import FileTokenizer\n"
        "from datamodules.records import JSONLines\n"
        "from datamodules.settings import PrepareSettings\n"
        "from datamodules.tokens import TokenDataModule\n"
        "for found in (FileTokenizer, JSONLines, PrepareSettings, TokenDataModule):\n"
        "    assert found is getattr(datamodules, found.__name__)\n"
        "assert datamodules.tabular.__spec__.name == 'datamodules.tabular'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
