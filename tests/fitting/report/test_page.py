"""Pages from templates: every kind of field, every mistake in one, and the lines that a page has wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fitting.__main__ import main
from fitting.report.page import changed_lines, fill

REPORT = {
    "fit": {"parameters": {"phi": 0.43321}, "status": "ok", "intervals": {"phi": [
        {"method": "block", "low": 0.1, "recommended": False}, {"method": "widened", "low": -0.25, "recommended": True},
    ]}},
    "minima": [
        {"r": 1.0, "budget": 5e11, "d_model": 32.0, "interior": True},
        {"r": 1.0, "budget": 5e12, "d_model": 64.0, "interior": False},
    ],
    "runs": 48, "tokens": 1234567, "nothing": None,
}  # fmt: skip


@pytest.fixture
def template(tmp_path: Path) -> Path:
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "fit.json").write_text(json.dumps(REPORT))
    return tmp_path / "page.md.in"


@pytest.mark.parametrize(("field", "text"), [
    ("fit.parameters.phi:.3f", "0.433"),
    ("fit.status", "ok"),
    ("runs", "48"),
    ("tokens:,", "1,234,567"),
    ("fit.intervals.phi[1].low:+.3f", "-0.250"),
    ("fit.intervals.phi[recommended=true].low:+.2f", "-0.25"),
    ("fit.intervals.phi[method=block].low", "0.1"),
    ("minima[r=1,budget=5e11].d_model:g", "32"),
    ("minima[r=1,budget=5000000000000].interior", "no"),
])  # fmt: skip
def test_a_field_is_the_value_it_names(template: Path, field: str, text: str) -> None:
    template.write_text(f"# phi\n\n| a | {{nano/fit.json#{field}}} |, {{{{1, 2}}}}\n")
    assert fill(template) == f"# phi\n\n| a | {text} |, {{1, 2}}\n"


@pytest.mark.parametrize(("field", "words"), [
    ("{nano/gone.json#a}", "there is no file"),
    ("{nano/fit.json#fit.parameter.phi}", "no key 'parameter'. Did you mean 'parameters'?"),
    ("{nano/fit.json#nothing:.2f}", "null"),
    ("{nano/fit.json#fit.parameters}", "no single value; it holds phi"),
    ("{nano/fit.json#minima[2].r}", "has 2 items, so no [2]"),
    ("{nano/fit.json#minima[r=1].d_model}", "2 of 2 items of minima have r=1; one must"),
    ("{nano/fit.json#minima[r=3].d_model}", "0 of 2 items"),
    ("{nano/fit.json#minima[r].d_model}", "neither a number nor key=value"),
    ("{nano/fit.json#runs[0]}", "no list"),
    ("{nano/fit.json#runs.a}", "has no keys"),
    ("{nano/fit.json#runs..a}", "cannot be read from"),
    ("{nano/fit.json#}", "cannot be read from"),
    ("{nano/fit.json#fit.status:.3f}", "cannot be written as '.3f'"),
    ("{nano/fit.json#minima[0].interior:d}", "yes or no"),
    ("{1, 2, 4}", "is no field"),
    ("an open { brace", "for braces that are no field"),
])  # fmt: skip
def test_what_is_wrong_with_a_field_is_one_message(
    template: Path, capsys: pytest.CaptureFixture[str], field: str, words: str
) -> None:
    template.write_text(f"fine\n{field}\n")
    assert main(["page", str(template)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.splitlines()) == 1
    assert err.startswith(f"error: {template}:2: ") and not template.with_suffix("").exists()


def test_a_page_is_written_checked_and_not_lost(template: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template.write_text("a\nphi {nano/fit.json#fit.parameters.phi:.3f}\nb\n")
    page = template.with_suffix("")
    assert main(["page", str(template), "--check"]) == 2 and "no page" in capsys.readouterr().err
    assert main(["page", str(template)]) == 0 and page.read_text() == "a\nphi 0.433\nb\n"
    assert main(["page", str(template), "--check"]) == 0
    page.write_text("a\nphi 0.459\nb\n")
    capsys.readouterr()
    assert main(["page", str(template), "--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{page}: line 2 of the page: phi 0.459", f"{page}: line 2 from the template: phi 0.433",
        f"{page}: 2 lines differ",
    ]  # fmt: skip
    assert main(["page", str(template)]) == 2 and "--overwrite" in capsys.readouterr().err
    assert page.read_text() == "a\nphi 0.459\nb\n"
    assert main(["page", str(template), "--overwrite"]) == 0 and "0.433" in page.read_text()
    other = template.parent / "other.md"
    assert main(["page", str(template), "--out", str(other)]) == 0 and other.read_text() == page.read_text()
    assert main(["page", str(template), "--out", str(template)]) == 2
    assert main(["page", str(other)]) == 2 and "Give --out" in capsys.readouterr().err


def test_added_and_missing_lines_are_named() -> None:
    assert list(changed_lines("a\nc\n", "a\nb\nc\n")) == ["line 2 from the template: b"]
    assert list(changed_lines("a\nb\n", "b\n")) == ["line 1 of the page: a"]
    assert list(changed_lines("a", "a\n")) == ["the ends of lines"]
