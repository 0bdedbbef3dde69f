"""The worked examples of fitting/README.md run as they stand, and say what the comments beside them say."""

import re
import shlex
from pathlib import Path

import pytest

from fitting.__main__ import build_parser
from tests.support.documents import code_blocks

README = (Path(__file__).parents[2] / "fitting" / "README.md").read_text(encoding="utf-8")
BLOCKS = code_blocks(README, "python")


def test_the_worked_example_runs_and_its_comments_are_true(capsys):
    names: dict = {}
    exec(compile(BLOCKS[0], "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "Runs(116 runs" in printed and "status" not in printed.split("\n")[0]
    assert names["result"]["phi"] == pytest.approx(0.4589, abs=5e-5)
    assert names["result"].trusted and names["result"].intervals["phi"][0].recommended
    low, high = (float(value) for value in re.search(r"^(0\.4\d+) (0\.4\d+)$", printed, re.M).groups())
    assert (low, high) == pytest.approx((0.4196, 0.4671), abs=5e-5)
    assert "Verdict: no change is needed" in printed


def test_the_law_of_ones_own_fits(tmp_path):
    import numpy as np

    from fitting import fit, load_grid

    names: dict = {}
    exec(compile(BLOCKS[1], "README.md", "exec"), names)
    result = fit(load_grid(), names["TokensOnly"](), starts=60)
    assert np.isfinite(result.objective) and result.trusted


def test_every_command_in_the_readme_parses():
    lines = re.findall(r"^    (python -m fitting .*)$", README, re.M)
    assert len(lines) == 11
    for line in lines:
        build_parser().parse_args(shlex.split(line, comments=True)[3:])
    for path in re.findall(r"tests/\S+?\.py", README):
        assert (Path(__file__).parents[2] / path).exists()
    for name in re.findall(r"`([\w/]+\.py)`", README):
        assert (Path(__file__).parents[2] / "fitting" / name).exists()
