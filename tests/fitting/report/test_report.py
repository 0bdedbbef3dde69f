"""The analysis, its sections, figures and report folder: one set of numbers everywhere, and no network."""

import copy
import json
import re

import numpy as np
import pytest

from fitting.data.plain import plain, read
from fitting.data.splits import REGRESSED
from fitting.errors import FitError
from fitting.estimation.fits import fit
from fitting.laws import ChinchillaLaw, JointLaw, Law
from fitting.published import load_grid
from fitting.report.plots import figures
from fitting.report.report import _page, check_folder, write_report
from fitting.report.sections import sections
from fitting.studies.analysis import Analysis, Settings, analyse
from fitting.studies.curves import effective_ratios

GRID = load_grid()
QUICK = Settings(starts=100, resamples=60, all_splits=True)


@pytest.fixture(scope="module")
def analysis():
    kept = GRID.exclude("quality=inferred_from_curve")
    return analyse(kept, settings=QUICK, without_exclusions=GRID)


@pytest.fixture(scope="module")
def told(analysis):
    """The analysis as fit.json holds it."""
    return analysis.to_dict()


@pytest.fixture(scope="module")
def folder(analysis, tmp_path_factory):
    target = tmp_path_factory.mktemp("report") / "new"
    write_report(analysis, target)
    return target


def test_effective_sizes_hardly_depend_on_the_split():
    paper = fit(GRID, starts=100)
    regressed = fit(GRID, JointLaw(split=REGRESSED), starts=100)
    for result, expected in ((paper, (0.751, 0.580, 0.467)), (regressed, (0.753, 0.584, 0.467))):
        rows = effective_ratios(GRID, result.law, result.theta, 640.0)
        assert [row.effective for row in rows] == pytest.approx([1.0, *expected], abs=6e-4)


def test_an_excluded_run_is_listed_with_its_rule_and_phi_is_given_both_ways(analysis, told):
    gone = told["data"]["excluded"]
    assert len(gone) == 7 and {g["rule"] for g in gone} == {"excluded by quality=inferred_from_curve"}
    with_them = told["with_excluded_runs"]["parameters"]["phi"]
    assert with_them == pytest.approx(0.4332, abs=1e-3) and with_them != told["fit"]["parameters"]["phi"]
    text = "\n".join(section.text() for section in sections(analysis))
    assert f"{with_them:.4f} with them" in text and "iso_depth_grid.csv:" in text


def test_the_lowest_loss_of_every_cell_is_found(told):
    """Against a plain loop over the table."""
    by: dict = {}
    for point in told["data"]["points"]:
        by.setdefault((point["r"], point["budget"]), []).append(point)
    assert [(m["r"], m["budget"]) for m in told["minima"]] == sorted(by)
    for m in told["minima"]:
        cell = sorted(by[m["r"], m["budget"]], key=lambda p: p["d_model"])
        best = min(cell, key=lambda p: p["loss"])
        assert (m["d_model"], m["loss"], m["tokens"]) == (best["d_model"], best["loss"], best["tokens"])
        assert list(m["d_models"]) == [p["d_model"] for p in cell] and m["runs"] == len(cell)
        assert m["interior"] == (best is not cell[0] and best is not cell[-1])
        parabola = m["parabola"]
        if parabola["d_model"] is not None:
            assert cell[0]["d_model"] < parabola["d_model"] < cell[-1]["d_model"]
    assert {m["interior"] for m in told["minima"]} == {True, False} or len(by) == 24
    assert told["data"]["tokens"] == pytest.approx(sum(p["tokens"] for p in told["data"]["points"]))


def test_phi_stands_beside_the_papers(told):
    found, phi = told["published"], told["fit"]["parameters"]["phi"]
    assert (found["phi"], found["split"], found["interval"]) == (0.459, "regressed", [0.41, 0.53])
    assert found["difference"] == pytest.approx(phi - 0.459)
    refit = found["refit"]
    assert refit["split"] == "paper" and refit["phi"] == pytest.approx(0.4332, abs=1e-3)
    assert refit["difference"] == pytest.approx(phi - refit["phi"]) and refit["status"] == "ok"
    interval = next(i for i in told["fit"]["intervals"]["phi"] if i["recommended"])
    assert refit["inside_interval"] == (interval["low"] <= refit["phi"] <= interval["high"])


def test_what_json_cannot_hold_becomes_null():
    found = plain({"a": [1.5, float("nan")], "b": (float("inf"), "text", None, True)})
    assert found == {"a": [1.5, None], "b": [None, "text", None, True]}


def test_every_split_is_named_beside_its_phi(told):
    assert [row["split"] for row in told["splits"]] == ["paper", "injection_once", "regressed"]
    assert all(row["intervals"]["phi"] and row["effective_ratios"] for row in told["splits"])


def test_every_number_of_the_report_comes_from_fit_json(folder):
    stored = json.loads((folder / "fit.json").read_text())
    markdown = (folder / "report.md").read_text()
    for section in sections(read(Analysis, stored)):
        assert section.markdown() in markdown
    changed = copy.deepcopy(stored)
    changed["fit"]["parameters"]["phi"] = 0.98765
    changed["residuals"]["scatter"]["run"] = 0.1234
    text = "\n".join(section.text() for section in sections(read(Analysis, changed)))
    assert "0.98765" in text and "0.1234" in text and "0.98765" not in markdown


def test_the_report_says_what_to_trust_and_what_residuals_mean(folder):
    text = (folder / "report.md").read_text()
    for words in (
        "Trust the widened block bootstrap", "misfit of the law's shape", "a small win among many forms",
        "Leaving out one r moves it most", "not identified", "observed - predicted",
    ):  # fmt: skip
        assert words in text


def test_the_page_needs_no_network_and_holds_data_and_figures(folder):
    page = (folder / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "@@" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert page.count("data:image/png;base64,") == 7
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S)[1])
    assert len(data["data"]["points"]) == 109 and len(data["phi_path"]) == 81


def test_the_sliders_stops_are_refits(told):
    stop = next(row for row in told["phi_path"] if row["phi"] == 1.0)
    held = next(row for row in told["restricted"] if row["phi"] == 1.0)
    assert stop["rmse"] == pytest.approx(held["rmse"], rel=1e-4)
    assert stop["alpha"] == pytest.approx(held["parameters"]["alpha"], rel=1e-4)


NAMES = ("ratios", "frontier", "isoflops", "allocation", "predicted", "residuals", "profile")


def test_every_figure_is_a_png_with_a_caption(folder):
    assert sorted(path.stem for path in folder.glob("*.png")) == sorted(NAMES)
    markdown = (folder / "report.md").read_text()
    for name in NAMES:
        assert (folder / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert re.search(rf"!\[.{{20,}}\]\({name}.png\)", markdown)


@pytest.mark.slow
def test_drawing_is_deterministic(analysis, folder):
    for name, (_, png) in figures(analysis).items():
        assert (folder / name).read_bytes() == png


def test_reports_are_not_overwritten_unasked(folder, tmp_path):
    with pytest.raises(FitError, match="already holds a report.*--overwrite"):
        check_folder(folder, overwrite=False)
    check_folder(folder, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(FitError, match="is a file"):
        check_folder(tmp_path / "file", overwrite=True)


def test_a_law_without_r_gets_the_sections_it_can_have():
    analysis = analyse(GRID.where("r=4"), ChinchillaLaw(), Settings(starts=60, resamples=0))
    titles = [section.title for section in sections(analysis)]
    assert "Restricted fits, phi fixed" not in titles and "Chinchilla law per r" in titles
    page = _page(analysis, analysis.to_dict(), {})
    assert '"phi_path"' not in page and "Chinchilla law per r" in page


def test_refusals_reach_the_report():
    few = GRID.where("budget>=1e19", "d_model>=1152")
    few = few.with_loss(np.where(few.r == 4, 2.0 + few.n_total / 1e9, few.val_loss))
    analysis = analyse(few, settings=Settings(starts=60, resamples=0))
    text = "\n".join(section.text() for section in sections(analysis))
    assert "Refused: " in text and "outside the sampled" in text


def test_extras_that_cannot_be_made_leave_the_fit_and_say_why():
    few = GRID.where("budget<=1e18", "r<=2")
    found = analyse(few, settings=Settings(starts=60, resamples=40), without_exclusions=GRID.where("r=1"))
    text = "\n".join(section.text() for section in sections(found))
    assert "Not estimated: 4 blocks cannot carry a bootstrap" in text
    assert "not defined, because: All 29 runs have r=1" in text
    assert "profile.png" in figures(found), "a curve without intervals"
    assert found.fit.parameters["phi"]


def test_no_number_stands_without_its_status(told):
    doubtful = copy.deepcopy(told)
    doubtful["splits"][1]["status"] = "at bound"
    doubtful["leave_out"]["r"][0]["status"] = "ill-conditioned"
    doubtful["with_excluded_runs"] |= {"status": "starts disagree", "message": "made up"}
    doubtful["allocation"]["per_r"][0]["from_own_chinchilla"]["status"] = "not converged"
    by = {section.title: section.text() for section in sections(read(Analysis, doubtful))}
    assert "at bound" in by["phi by split"] and "ill-conditioned" in by["Stability"]
    assert "not to be trusted: made up" in by["Fit"]
    assert "own law: not converged" in by["Compute-optimal allocation"]


def test_a_law_without_a_size_has_no_effective_size():
    class Tokens(Law):
        param_names = ("E",)
        bounds = np.array([[0.5, 4.0]])

        def predict(self, theta, x):
            return np.broadcast_to(theta, (len(theta), len(x)))

        def gradient(self, theta, x):
            return np.ones((len(theta), 1, len(x)))

    assert effective_ratios(GRID, Tokens(), np.array([2.0])) == ()
