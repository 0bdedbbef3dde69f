"""A report is derived again from its runs; whatever was changed in either is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fitting.__main__ import main
from fitting.commands.sources import located, naming
from fitting.data.provenance import source_files
from fitting.published import GRID
from fitting.report.verification import changed_files, differences

QUICK = ["--starts", "40", "--bootstrap", "20", "--no-rivals", "--quiet"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs.csv, the lower budgets of the grid, and the report on them."""
    folder = tmp_path_factory.mktemp("verify")
    shutil.copy(GRID, folder / "runs.csv")
    options = ["--where", "budget<=2.15e18", "--exclude", "d_model>896", *QUICK]
    assert main(["fit", str(folder / "runs.csv"), "--report", str(folder / "report"), *options]) in (0, 1)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def verify(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["verify", str(folder / "report"), "--quiet", "--workers", "1"])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_an_untouched_report_passes_also_elsewhere(capsys: pytest.CaptureFixture[str], copied: Path) -> None:
    status, out = verify(capsys, copied)
    assert status == 0 and "all the same" in out, out
    stored = json.loads((copied / "report" / "fit.json").read_text())
    assert stored["provenance"]["options"]["where"] == ["budget<=2.15e18"]
    # Seen from the report, so that both may lie anywhere together.
    assert stored["provenance"]["runs"] == ["../runs.csv"]
    assert list(stored["provenance"]["sha256"]) == ["../runs.csv"]
    assert {p["source"].partition(":")[0] for p in stored["data"]["points"]} == {"../runs.csv"}
    assert str(copied.parent) not in json.dumps(stored)


def test_runs_that_moved_can_be_named(capsys: pytest.CaptureFixture[str], copied: Path) -> None:
    (copied / "elsewhere").mkdir()
    (copied / "runs.csv").rename(copied / "elsewhere" / "runs.csv")
    status, out = verify(capsys, copied)
    assert status == 2 and "runs.csv: does not exist" in out
    where = str(copied / "elsewhere" / "runs.csv")
    assert main(["verify", str(copied / "report"), where, "--quiet"]) == 0


def test_the_shipped_grid_has_one_name_everywhere(tmp_path: Path) -> None:
    name = naming(tmp_path / "report")
    assert (name(str(GRID)), name(f"{GRID}:7")) == ("published", "published:7")
    assert located(["published"], tmp_path / "report") == [str(GRID)]
    assert name(str(tmp_path / "runs" / "x.run.json")) == "../runs/x.run.json"


@pytest.mark.slow
def test_it_passes_on_a_processor_that_rounds_differently(copied: Path) -> None:
    """OpenBLAS and numpy with the instructions of an older one, which changes last digits."""
    older = {"OPENBLAS_CORETYPE": "Nehalem", "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX2 FMA3 AVX512F"}
    done = subprocess.run(
        [sys.executable, "-m", "fitting", "verify", str(copied / "report"), "--quiet"],
        capture_output=True, text=True, env={**os.environ, **older},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_what_was_tampered_with_is_named(capsys: pytest.CaptureFixture[str], copied: Path) -> None:
    """A number of fit.json, a line of report.md and a record, each by its name."""
    path = copied / "report" / "fit.json"
    analysis = json.loads(path.read_text())
    true_phi = analysis["fit"]["parameters"]["phi"]
    analysis["fit"]["parameters"]["phi"] += 0.01
    path.write_text(json.dumps(analysis))
    page = copied / "report" / "report.md"
    text = page.read_text()
    assert "R²" in text
    page.write_text(
        text.replace("R²", "R² (nearly)").replace("\n\n## Figures", "\nphi is known.\n\n## Figures")
    )
    slider = copied / "report" / "report.html"
    slider.write_text(slider.read_text().replace('"curves"', '"curved"'))
    status, out = verify(capsys, copied)
    assert status == 1
    assert f"fit.parameters.phi: {true_phi + 0.01!r} in the report, {true_phi!r} from the records" in out
    assert "report.md: 'no such line' in the report" in out and not out.startswith("record ")
    assert "report.md: 'phi is known.' in the report, 'no such line' from the records" in out
    assert "report.html: 'no such line' in the report, '{" in out


def test_a_record_that_changed_is_named_with_what_it_changes(
    capsys: pytest.CaptureFixture[str], copied: Path
) -> None:
    csv = copied / "runs.csv"
    lines = csv.read_text().splitlines()
    cells = lines[1].split(",")
    cells[6] = str(float(cells[6]) + 0.01)
    csv.write_text("\n".join([lines[0], ",".join(cells), *lines[2:]]) + "\n")
    status, out = verify(capsys, copied)
    assert status == 1 and out.startswith("record ") and "runs.csv" in out.splitlines()[0]
    assert "data.points[0].loss" in out


def test_a_folder_without_a_report_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "cannot be read as a report" in capsys.readouterr().err
    (tmp_path / "fit.json").write_text("{}")
    assert main(["verify", str(tmp_path)]) == 2
    assert "which runs it was made of" in capsys.readouterr().err


def test_what_a_report_says_of_itself_is_checked(capsys: pytest.CaptureFixture[str], copied: Path) -> None:
    assert main(["verify", str(copied / "report"), "--tolerance", "-1"]) == 2
    assert "--tolerance is -1" in capsys.readouterr().err
    path = copied / "report" / "fit.json"
    analysis = json.loads(path.read_text())
    for changes in ({"provenance": {}}, {"settings": {**analysis["settings"], "starts": "x"}}):
        path.write_text(json.dumps({**analysis, **changes}))
        assert main(["verify", str(copied / "report"), "--quiet"]) == 2
        assert "does not say what it was made of" in capsys.readouterr().err


def test_a_bug_inside_the_analysis_is_not_called_a_malformed_report(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fitting.studies import analysis

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(analysis, "minima", broken)
    with pytest.raises(KeyError, match="a bug"):
        main(["verify", str(copied / "report"), "--quiet"])


@pytest.mark.parametrize(("place", "value", "words"), [
    (("fit", "objective"), "low", "the file.fit.objective is 'low'"),
    (("residuals", "scatter"), None, "the file.residuals.scatter is None"),
    (("provenance", "options"), {"where": []}, "provenance.options has no 'exclude'"),
])  # fmt: skip
def test_what_is_wrong_in_a_report_is_named(
    capsys: pytest.CaptureFixture[str], copied: Path, place: tuple[str, str], value: object, words: str
) -> None:
    path = copied / "report" / "fit.json"
    analysis = json.loads(path.read_text())
    analysis[place[0]][place[1]] = value
    path.write_text(json.dumps(analysis))
    status, out = verify(capsys, copied)
    assert status == 2 and words in out and "Traceback" not in out


def test_differences_find_every_kind_of_leaf() -> None:
    a = {"x": [1.0, 2.0], "s": "ok", "n": None, "only": 1, "source": "a/b.csv:2"}
    b = {"x": [1.0 + 1e-9, 2.1], "s": "bad", "n": 0.0, "source": "c/b.csv:2"}
    assert [d.where for d in differences(a, b)] == ["x[1]", "s", "n", "only"]
    assert [d.where for d in differences({"x": [1]}, {"x": [1, 2]})] == ["x"]
    assert [d.where for d in differences({"tokens": 10**9}, {"tokens": 10**9 + 1})] == ["tokens"]
    # A curve that touches zero, and what rounding decides.
    assert not list(differences({"curve": [0.0, 5.0, 4.0]}, {"curve": [1e-8, 5.0, 4.0]}))
    assert [d.where for d in differences({"curve": [0.0, 5.0]}, {"curve": [1e-3, 5.0]})] == ["curve[0]"]
    assert not list(
        differences({"gradient_norm": 1e-11, "message": "a"}, {"gradient_norm": 4e-9, "message": "b"})
    )
    assert [d.where for d in differences({"status": "ok", "message": "a"}, {"message": "b"})] == ["status"]
    before, now = {"a": "1" * 64, "b": "2" * 64}, {"moved/a": "1" * 64, "b": "3" * 64}
    assert [str(d) for d in changed_files(before, now)] == [
        f"record b: 'sha256 {'2' * 12}' in the report, 'sha256 {'3' * 12}' from the records"
    ]
    assert source_files(["a.csv:12", "a.csv:13", "r/x.run.json"]) == ["a.csv", "r/x.run.json"]
