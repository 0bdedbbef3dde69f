"""What is committed under results/ holds: the page is what its template gives, every report follows from its runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fitting.__main__ import main
from fitting.report.verification import REPORTS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def reports() -> list[Path]:
    found = sorted(path for name in REPORTS for path in RESULTS.rglob(name))
    assert found, f"no report under {RESULTS}"
    return found


def made_page(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "make_readme.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_page_is_what_its_template_gives() -> None:
    done = made_page(RESULTS, "--check")
    assert done.returncode == 0, done.stderr


def test_the_table_of_variants_follows_from_classes_and_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_variants.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, f"run docs/make_variants.py\n{done.stderr}"


def test_a_number_that_changed_is_found_and_written(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("*.png"))
    page, report = folder / "README.md", folder / "nano_report" / "fit.json"
    analysis = json.loads(report.read_text(encoding="utf-8"))
    analysis["fit"]["parameters"]["phi"] = 0.123
    report.write_text(json.dumps(analysis), encoding="utf-8")
    record = next((folder / "nano_hyperconnections").glob("r2-flops=4e11-size=1-*.run.json"))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"val_loss": 1.234}), encoding="utf-8")
    done = made_page(folder, "--check")
    assert done.returncode == 1 and "is not what README.md.in gives" in done.stderr
    assert made_page(folder).returncode == 0 and made_page(folder, "--check").returncode == 0
    text = page.read_text(encoding="utf-8")
    assert "**0.12**" in text and "**1.234**" in text


def test_a_field_that_names_nothing_leaves_the_page_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("*.png"))
    page, template = folder / "README.md", folder / "README.md.in"
    before = page.read_text(encoding="utf-8")
    template.write_text(
        template.read_text(encoding="utf-8") + "{fit[fit][parameters][psi]}", encoding="utf-8"
    )
    done = made_page(folder)
    assert done.returncode == 1 and "KeyError: 'psi'" in done.stderr
    assert page.read_text(encoding="utf-8") == before


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
