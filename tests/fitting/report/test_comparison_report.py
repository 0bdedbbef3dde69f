"""A comparison's report: its numbers are those of `compare`, and `verify` names what was changed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from fitting import compare, load_runs
from fitting.__main__ import main
from fitting.data.plain import read
from fitting.published import load_grid
from fitting.records import RunRecord
from fitting.report.comparison_sections import comparison_sections
from fitting.studies.comparison import Comparison
from tests.support.run_records import record_fields


def save_runs(folder: Path, study: bool) -> None:
    """Records of the lower budgets of the shipped grid; in the study looped runs are worse by a truth of its own."""
    grid = load_grid().where("budget<=2.15e18")
    noise = np.random.default_rng(int(study)).standard_normal(len(grid)) * 0.001
    for i in range(len(grid)):
        r = int(grid.r[i])
        if study and r == 1:
            continue
        size = grid.n_once[i] + r ** (0.33 if study else 0.43) * grid.n_rec[i]
        loss = 1.57 + 28 * size**-0.2 + 930 * grid.tokens[i] ** -0.37
        layers = (0, 20, 0) if r == 1 else (2, 16 // r, 2)
        RunRecord(
            **record_fields(
                run_name=f"run{i}", d_model=int(grid.d_model[i]), num_recurrences=r,
                prelude_layers=layers[0], recurrent_layers=layers[1], coda_layers=layers[2],
                n_once=int(grid.n_once[i]), n_rec=int(grid.n_rec[i]),
                parameters={"injection": int(grid.n_injection[i])}, tokens=int(grid.tokens[i]),
                flops_per_token=float(grid.flops_per_token[i]), flops_budget=float(grid.flops_budget[i]),
                val_loss=float(loss * math.exp(noise[i])), training_flops=float(grid.training_flops[i]),
            )
        ).save(folder / f"run{i}.run.json")  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    save_runs(folder / "base", study=False)
    save_runs(folder / "study", study=True)
    arguments = [str(folder / "base"), str(folder / "study"), "--report", str(folder / "report")]
    options = ["--starts", "20", "--bootstrap", "20", "--quiet"]
    assert main(["compare", *arguments, *options]) == 0
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """The same in another place, like a clone."""
    shutil.copytree(made, tmp_path / "clone")
    return tmp_path / "clone"


def verify(capsys: pytest.CaptureFixture[str], folder: Path, *runs: str) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["verify", str(folder / "report"), *runs, "--quiet"])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_the_report_holds_what_compare_finds(made: Path) -> None:
    stored = json.loads((made / "report" / "comparison.json").read_text())
    arms = [load_runs(made / arm) for arm in ("base", "study")]
    found = compare(*arms, starts=20, resamples=20)
    paired = next(e for e in stored["estimates"] if e["method"] == "paired")
    assert paired["delta_phi"] == found.paired.delta_phi == pytest.approx(-0.1, abs=0.02)
    interval = next(i for i in paired["intervals"] if i["recommended"])
    assert (interval["low"], interval["high"]) == (
        found.paired.intervals[0].low,
        found.paired.intervals[0].high,
    )
    assert stored["status"] == "ok" and stored["runs"] == list(found.runs)
    # Every run that entered, with its loss and what the paired law says of it.
    points = {(p["arm"], p["source"]): p for p in stored["points"]}
    record = RunRecord.load(made / "study" / "run30.run.json")
    point = points["study", "../study/run30.run.json"]
    assert (point["loss"], point["tokens"]) == (record.val_loss, record.tokens)
    law = next(reading for reading in stored["readings"] if reading["name"] == "delta phi")["parameters"]
    size = record.n_once + record.num_recurrences ** (law["phi"] + law["delta_phi"]) * record.n_rec
    expected = law["E"] + law["A"] * size ** -law["alpha"] + law["B"] * record.tokens ** -law["beta"]
    assert point["predicted"] == pytest.approx(expected, rel=1e-6)


def test_text_and_figures_come_from_the_json(made: Path) -> None:
    folder = made / "report"
    stored, text = json.loads((folder / "comparison.json").read_text()), (folder / "report.md").read_text()
    assert all(section.markdown() in text for section in comparison_sections(read(Comparison, stored)))
    for name in ("delta_phi", "losses", "channels"):
        assert (folder / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and f"({name}.png)" in text
    assert "shift (nats)" in text and "comparison.json" in text


def test_an_untouched_report_passes_in_another_place(
    capsys: pytest.CaptureFixture[str], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copied)
    status, out = verify(capsys, Path())
    assert status == 0 and "all the same" in out, out
    assert "clone" not in (copied / "report" / "comparison.json").read_text()


def test_a_changed_number_and_a_changed_record_are_named(
    capsys: pytest.CaptureFixture[str], copied: Path
) -> None:
    path = copied / "report" / "comparison.json"
    stored = json.loads(path.read_text())
    stored["estimates"][1]["delta_phi"] = 0.123
    stored["provenance"]["training"]["tokens"] += 1000
    path.write_text(json.dumps(stored))
    record_path = copied / "study" / "run30.run.json"
    record = json.loads(record_path.read_text())
    record_path.write_text(json.dumps(record | {"val_loss": record["val_loss"] + 0.5, "wall_seconds": 7.5}))
    status, out = verify(capsys, copied)
    assert status == 1 and out.startswith("record ../study/run30.run.json: 'sha256 ")
    index = [p["source"] for p in stored["points"]].index("../study/run30.run.json")
    loss = record["val_loss"]
    assert f"points[{index}].loss: {loss!r} in the report, {loss + 0.5!r} from the records" in out
    assert "estimates[1].delta_phi: 0.123 in the report, -0." in out
    assert "provenance.training.tokens" in out and "provenance.training.wall_seconds" in out
    assert "report.md: 'no such line' in the report" in out


def test_a_report_from_before_there_were_grids_keeps_its_rule_and_passes(
    capsys: pytest.CaptureFixture[str], copied: Path
) -> None:
    arms = [str(copied / "base"), str(copied / "study"), "--report", str(copied / "report"), "--overwrite"]
    assert main(["compare", *arms, "--starts", "20", "--bootstrap", "0", "--grids", "0", "--quiet"]) == 0
    path = copied / "report" / "comparison.json"
    stored = json.loads(path.read_text())
    for name in ("grids", "more_budgets", "more_widths"):
        del stored["settings"][name]
    assert "claims" not in stored and "in AICc" in stored["verdict"]
    path.write_text(json.dumps(stored))
    status, out = verify(capsys, copied)
    assert status == 0, out


@pytest.mark.parametrize(("option", "value", "words"), [
    ("--grids", "19", "19 simulated grids give no verdict"),
    ("--grids", "-1", "--grids -1 is too small"),
    ("--more-budgets", "0", "A further budget must be positive, not 0"),
    ("--more-widths", "-8", "A further width must be positive, not -8"),
])  # fmt: skip
def test_what_gives_no_verdict_is_refused(
    capsys: pytest.CaptureFixture[str], made: Path, option: str, value: str, words: str
) -> None:
    arms = [str(made / "base"), str(made / "study"), "--starts", "20", "--bootstrap", "0", "--quiet"]
    assert main(["compare", *arms, option, value]) == 2
    assert words in capsys.readouterr().err


def test_both_arms_are_named_or_none(capsys: pytest.CaptureFixture[str], copied: Path) -> None:
    status, out = verify(capsys, copied, str(copied / "base"))
    assert status == 2 and "two arms" in out


def test_a_folder_holds_one_report(capsys: pytest.CaptureFixture[str], copied: Path) -> None:
    report = str(copied / "report")
    arms = [str(copied / "base"), str(copied / "study")]
    assert main(["compare", *arms, "--report", report, "--quiet"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["fit", arms[0], "--report", report, "--overwrite", "--quiet"]) == 2
    assert "another kind (comparison.json)" in capsys.readouterr().err
