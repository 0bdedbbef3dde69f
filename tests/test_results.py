"""What is committed under results/ holds: every page is what its template gives, every report follows from its runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fitting.__main__ import main
from fitting.report.provenance import REPORTS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def reports() -> list[Path]:
    found = sorted(path for name in REPORTS for path in RESULTS.rglob(name))
    assert found, f"no report under {RESULTS}"
    return found


def test_every_page_is_what_its_template_gives(capsys: pytest.CaptureFixture[str]) -> None:
    templates = sorted(RESULTS.rglob("*.md.in"))
    assert templates
    for template in templates:
        status = main(["page", str(template), "--check"])
        assert status == 0, capsys.readouterr()


def test_every_report_follows_from_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for path in reports():
        status = main(["verify", str(path.parent), "--quiet"])
        assert status == 0, capsys.readouterr().out


def test_reports_name_runs_that_are_committed_with_them() -> None:
    """A report that points out of the project could not be verified on another clone."""
    for path in reports():
        for name in json.loads(path.read_text(encoding="utf-8"))["provenance"]["sha256"]:
            inside = name == "published" or (path.parent / name).resolve().is_relative_to(ROOT)
            assert inside and not re.match(r"/|\w:", name), f"{path}: {name}"


def test_what_is_set_in_bold_is_the_lowest_loss_of_its_line() -> None:
    lines = [
        line for line in (RESULTS / "README.md").read_text(encoding="utf-8").splitlines() if "**" in line
    ]
    checked = 0
    for line in lines:
        losses = re.findall(r"\*{0,2}\d\.\d{3}\*{0,2}", line)
        if line.startswith("|") and losses:
            assert min(losses, key=lambda cell: float(cell.strip("*"))).startswith("**"), line
            checked += 1
    assert checked > 20
