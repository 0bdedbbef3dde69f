"""The command line as a user meets it: exit statuses, messages without tracebacks, laws of one's own,
speed of help.
"""

import argparse
import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fitting.__main__ import COMMANDS, main
from fitting.commands.common import LAW_NAMES, law_of, load, select
from fitting.data.loading import load_runs
from fitting.data.splits import PAPER
from fitting.published import GRID
from fitting.records import RunRecord
from tests.support.run_records import record_fields

ROOT = Path(__file__).parents[2]
QUICK = ["--starts", "100", "--bootstrap", "0", "--quiet"]
HEADER = "r,size,flops_budget,flops_per_token,tokens,val_loss"


def run(capsys, *arguments):
    status = main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_shipped_grid_exits_0_and_the_output_is_json_on_request(capsys):
    status, out, _ = run(capsys, "fit", "published", "--json", *QUICK)
    found = json.loads(out)
    assert status == 0 and found["fit"]["parameters"]["phi"] == pytest.approx(0.4332, abs=0.002)
    status, out, _ = run(capsys, "fit", GRID, "--split", "regressed", "--no-rivals", *QUICK)
    assert status == 0 and "0.4589" in out.replace("0.45886", "0.4589") and "Split: regressed" in out


def test_a_fit_that_is_not_to_be_trusted_exits_1_with_the_reason(capsys):
    status, out, err = run(capsys, "fit", "published", "--law", "saturating", *QUICK)
    assert status == 1 and "not to be trusted" in err and "not identified" in err and "at bound" in out


def test_phi_can_be_fixed_and_law_forms_chosen(capsys):
    status, out, _ = run(capsys, "fit", "published", "--phi", "1", "--json", *QUICK)
    assert status == 0 and json.loads(out)["fit"]["r_squared"] == pytest.approx(0.9480, abs=5e-4)
    forms = {
        "per-r": "each r",
        "log": "log r",
        "drift-flops": "log(C",
        "drift-tokens": "log(D",
        "saturating": "r^-k",
    }
    assert set(forms) | {"joint", "chinchilla", "equal-exponents", "one-token"} == set(LAW_NAMES)
    for name, words in forms.items():
        chosen = law_of(argparse.Namespace(law=name, phi=None, split="injection_once", count="total"))
        assert words in chosen.name and chosen.split.name == "injection_once"
    status, out, _ = run(
        capsys, "fit", "published", "--law", "chinchilla", "--where", "r=2", "--json", *QUICK
    )
    assert json.loads(out)["fit"]["parameters"]["alpha"] == pytest.approx(0.216, abs=0.003)
    assert run(capsys, "fit", "published", "--law", "log", "--phi", "1", *QUICK)[0] == 2


def test_a_law_of_ones_own_plugs_in_by_class_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "mylaws.py").write_text(
        """import numpy as np
from fitting import Law

class Tokens(Law):
    param_names = ("E", "B", "beta")
    bounds = np.array([[0.5, 4.0], [0.0, 3.0], [0.0, 1.0]])

    def predict(self, theta, x):
        return theta[:, :1] + theta[:, 1:2] * (x.tokens / 1e9) ** -theta[:, 2:]

    def gradient(self, theta, x):
        power = (x.tokens / 1e9) ** -theta[:, 2:]
        slope = -theta[:, 1:2] * power * np.log(x.tokens / 1e9)
        return np.stack([np.ones_like(power), power, slope], axis=1)

class NotALaw:
    pass
"""
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, out, err = run(capsys, "fit", GRID, "--law", "mylaws.Tokens", "--json", *QUICK)
    found = json.loads(out)["fit"]
    assert status == 1 and "poor fit: R² is" in err, "tokens alone do not explain the losses"
    assert found["law"] == "Tokens" and set(found["parameters"]) == {"E", "B", "beta"}
    for path, words in (
        ("mylaws.NotALaw", "is not a subclass"),
        ("mylaws.Gone", "no Gone"),
        ("nowhere.Law", "nowhere"),
    ):
        status, _, err = run(capsys, "fit", GRID, "--law", path, *QUICK)
        assert status == 2 and words in err
    assert "joint, chinchilla" in run(capsys, "fit", GRID, "--law", "mine", *QUICK)[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "nowhere.csv"], "nowhere.csv: does not exist"),
        (["fit", "published", "--where", "r=4"], "r=4: phi is not identified"),
        (["fit", "published", "--where", "budget=1e18"], "one budget"),
        (
            ["fit", "published", "--where", "d_model=384", "--where", "r<=2"],
            "cannot identify the 6 parameters",
        ),
        (["fit", "published", "--where", "r=16"], "No run is left"),
        (["fit", "published", "--split", "mine"], "no split named 'mine'"),
        (["fit", "published", "--exclude", "nonsense"], "cannot be read"),
        (["compare", "published", "nowhere.csv"], "nowhere.csv"),
        (["plan", "published", "--run-noise", "0"], "positive"),
        (["predict", "published"], "Nothing to predict"),
        (["fit", "published", "--seed", "-1"], "--seed -1 is too small"),
        (["fit", "published", "--bootstrap", "-1"], "--bootstrap -1"),
        (["fit", "published", "--workers", "0"], "--workers 0"),
        (["fit", "published", "--report", f"{GRID}/below"], "cannot be written"),
        (["plan", "published", "--simulate", "-3"], "--simulate -3"),
        (["predict", "published", "--budget", "1e19", "--bootstrap", "3"], "3 resamples"),
    ],
)
def test_bad_input_is_one_message_and_status_2(capsys, arguments, words):
    status, out, err = run(capsys, *arguments, "--quiet", "--starts", "40")
    assert status == 2 and words in err and err.startswith("error: ") and len(err.strip().splitlines()) == 1
    assert out == ""


def test_bad_records_name_file_and_field_without_a_traceback(tmp_path):
    path = RunRecord(**record_fields()).save(tmp_path / "x.run.json")
    path.write_text(path.read_text().replace('"val_loss": 3.5', '"val_loss": NaN'))
    done = subprocess.run(
        [sys.executable, "-m", "fitting", "fit", str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2 and "x.run.json" in done.stderr and "val_loss" in done.stderr
    assert "Traceback" not in done.stderr


def test_records_are_fitted_like_the_csv(tmp_path, capsys):
    from fitting.published import load_grid

    grid = load_grid()
    for i in range(len(grid)):
        r, single = int(grid.r[i]), grid.r[i] == 1
        RunRecord(
            **record_fields(
                run_name=f"run{i}", d_model=int(grid.d_model[i]), num_recurrences=r,
                prelude_layers=0 if single else 2, recurrent_layers=20 if single else 16 // r,
                coda_layers=0 if single else 2, n_once=int(grid.n_once[i]), n_rec=int(grid.n_rec[i]),
                parameters={"injection": int(grid.n_injection[i])}, tokens=int(grid.tokens[i]),
                flops_per_token=float(grid.flops_per_token[i]), flops_budget=float(grid.flops_budget[i]),
                val_loss=float(grid.val_loss[i]), training_flops=float(grid.training_flops[i]),
            )
        ).save(tmp_path / "runs" / f"run{i}" / "last.run.json")  # fmt: skip
    status, out, err = run(capsys, "fit", tmp_path / "runs", "--split", "regressed", "--json", *QUICK)
    assert status == 0, err
    assert json.loads(out)["fit"]["parameters"]["phi"] == pytest.approx(0.4589, abs=0.002)


def test_published_prints_ours_beside_the_papers(capsys):
    status, out, _ = run(capsys, "published", "--starts", "150", "--quiet")
    assert status == 0 and "published" in out
    for number in ("0.4332", "0.4589", "0.4578", "0.251", "0.9857", "0.9552"):
        assert number in out


def test_compare_plan_and_predict_run_from_the_shell_words(tmp_path, capsys):
    status, out, _ = run(
        capsys, "compare", "published", "published", "--where", "budget<=4.64e18", "--json", *QUICK
    )
    assert status == 0 and json.loads(out)["preferred"] == "neither"
    design = tmp_path / "design.csv"
    rows = [line.rsplit(",", 2)[0] for line in GRID.read_text().splitlines()]
    design.write_text("\n".join(rows) + "\n")
    assert "val_loss" not in rows[0]
    status, out, _ = run(capsys, "plan", design, "--json", "--quiet", "--starts", "100")
    assert status == 0 and json.loads(out)["half_width"] == pytest.approx(0.056, abs=0.005)
    status, out, _ = run(
        capsys,
        "predict",
        "published",
        "--budget",
        "1e19",
        "--equivalent",
        "1e9",
        "--bootstrap",
        "40",
        "--quiet",
    )
    assert status == 0 and "Best r: 1" in out and "4.083e+08" in out


def test_compare_gives_delta_phi_with_and_without_excluded_runs(capsys):
    arms = ["compare", "published", "published", "--where", "budget<=1e18", *QUICK]
    status, out, _ = run(capsys, *arms, "--exclude", "quality=inferred_from_curve")
    assert status == 0 and re.search(r"without the runs of --exclude; with them: [+-]0\.0000 \(ok\)", out)
    assert "excluded by quality=inferred_from_curve" in out
    assert json.loads(run(capsys, *arms, "--json")[1])["excluded"]


def test_a_report_is_refused_before_the_work_when_one_is_there(tmp_path, capsys):
    (tmp_path / "fit.json").write_text("{}")
    start = time.monotonic()
    status, _, err = run(capsys, "fit", "published", "--report", tmp_path, *QUICK)
    assert status == 2 and "--overwrite" in err and time.monotonic() - start < 2
    assert (tmp_path / "fit.json").read_text() == "{}"


def test_help_is_quick_and_the_package_light(tmp_path):
    start = time.monotonic()
    shown = subprocess.run(
        [sys.executable, "-m", "fitting", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert shown.returncode == 0 and time.monotonic() - start < 2
    for command in ("fit", "compare", "plan", "predict", "published"):
        assert command in shown.stdout
    code = (
        "import sys, fitting; from fitting.records import RunRecord; "
        "print([m for m in ('numpy', 'scipy', 'matplotlib', 'torch', 'lightning') if m in sys.modules]); "
        "from fitting import load_runs, fit, bootstrap, compare; "
        "print([m for m in ('matplotlib', 'torch', 'lightning') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


def test_the_command_works_from_another_folder(tmp_path):
    shutil.copy(GRID, tmp_path / "grid.csv")
    done = subprocess.run(
        [sys.executable, "-m", "fitting", "fit", "grid.csv", "--no-rivals", *QUICK],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "0.43321" in done.stdout and [p.name for p in tmp_path.iterdir()] == ["grid.csv"]


def test_help_says_what_each_command_says_of_itself():
    for name, summary in COMMANDS.items():
        module = importlib.import_module(f"fitting.commands.{name}")
        assert summary == module.__doc__.splitlines()[0]


def test_a_command_loads_itself_alone():
    code = "import sys; from fitting.__main__ import build_parser; build_parser('plan'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {name for name in done.stdout.split() if name.startswith("fitting.commands.")}
    assert (
        loaded == {"fitting.commands.plan", "fitting.commands.common"} and "numpy" not in done.stdout.split()
    )


@pytest.mark.parametrize("error", [OSError("without a path"), KeyError("a bug"), ValueError("a bug")])
def test_a_bug_keeps_its_traceback(monkeypatch, error):
    from fitting.commands import fit

    def stop(_):
        raise error

    monkeypatch.setattr(fit, "run", stop)
    with pytest.raises(type(error)):
        main(["fit", "published"])


def test_a_bug_inside_a_law_of_ones_own_keeps_its_traceback(tmp_path, monkeypatch, capsys):
    head = "from fitting import Law\nclass Mine(Law):\n    param_names = ('E',)\n    bounds = [[0, 1]]\n"
    methods = (
        "    def predict(self, theta, x): return theta\n    def gradient(self, theta, x): return theta\n"
    )
    (tmp_path / "inside.py").write_text(f"{head}    def __init__(self): len(3)\n{methods}")
    (tmp_path / "needs.py").write_text(f"{head}    def __init__(self, size): pass\n{methods}")
    (tmp_path / "absent.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TypeError, match="len"):
        main(["fit", "published", "--law", "inside.Mine", *QUICK])
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        main(["fit", "published", "--law", "absent.Mine", *QUICK])
    status, _, err = run(capsys, "fit", "published", "--law", "needs.Mine", *QUICK)
    assert status == 2 and "cannot be made without size" in err


def test_an_interruption_is_one_line_and_status_130(monkeypatch, capsys):
    from fitting.commands import fit

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "run", stop)
    status, _, err = run(capsys, "fit", "published")
    assert (status, err) == (130, "interrupted\n")


def test_predict_and_plan_list_what_was_left_out_and_show_the_status(capsys):
    rule = ["--exclude", "quality=inferred_from_curve", "--quiet", "--starts", "100"]
    status, out, _ = run(capsys, "predict", "published", "--equivalent", "1e9", *rule)
    assert status == 0 and "phi = 0.4" in out and "Status: ok" in out and out.count("left out: ") == 7
    assert "without the runs of --exclude, 0.4332 with them (116 runs)" in out
    status, out, _ = run(capsys, "plan", "published", "--candidates", "1", *rule)
    assert status == 0 and out.count("left out: ") == 7


def test_an_untrusted_split_counts_for_the_exit_status(monkeypatch, capsys):
    from fitting.studies import analysis

    made = analysis._splits

    def doubtful(*arguments):
        (first,) = made(*arguments)
        return first, dataclasses.replace(first, split="other", status="at bound", message="made")

    monkeypatch.setattr(analysis, "_splits", doubtful)
    status, _, err = run(capsys, "fit", "published", *QUICK)
    assert status == 1 and "split other: made" in err


def mixtures(path, val_loss=None):
    """The published runs (or others with these losses) as if every block had three times what a token uses."""
    runs = load_runs(GRID)
    names = (
        *"r d_model n_once n_rec n_injection flops_budget flops_per_token tokens val_loss".split(),
        "n_rec_active",
    )
    losses = runs.val_loss if val_loss is None else val_loss(runs)
    columns = dataclasses.replace(runs, n_rec=3 * runs.n_rec, n_rec_active=runs.n_rec, val_loss=losses)
    rows = zip(*(getattr(columns, name) for name in names), range(len(runs)), strict=True)
    lines = [",".join((*names, "seed"))] + [",".join(repr(float(value)) for value in row) for row in rows]
    path.write_text("\n".join(lines))
    return str(path)


def test_active_parameters_are_counted_on_request(capsys, tmp_path):
    def law(runs):
        sizes = [once + r**0.3 * rec for once, rec, r in zip(runs.n_once, runs.n_rec, runs.r, strict=True)]
        return [1.5 + 300 * n**-0.3 + 2000 * d**-0.35 for n, d in zip(sizes, runs.tokens, strict=True)]

    def phi(*options):
        out = run(capsys, "fit", *options, "--json", *QUICK)[1]
        return json.loads(out)["fit"]["parameters"]["phi"]

    active, published = "--count=active", mixtures(tmp_path / "published.csv")
    made = mixtures(tmp_path / "made.csv", law)
    assert phi(made, active) == pytest.approx(0.3, abs=1e-3) and abs(phi(made) - 0.3) > 0.02
    assert phi(published, active) == pytest.approx(phi("published"), abs=1e-4)
    assert abs(phi(published) - phi("published")) > 0.02


@pytest.mark.parametrize("count", ["active", "total"])
def test_every_report_on_mixtures_says_what_n_counts(count, capsys, tmp_path):
    path, folder = mixtures(tmp_path / "mixtures.csv"), tmp_path / "report"
    asked, said = ["--count", count, *QUICK], f"paper, {count} parameters"
    for law in ("joint", "chinchilla"):
        options = ["--law", law, "--where", "r=2" if law == "chinchilla" else "r>0"]
        run(capsys, "fit", path, *options, *asked, "--report", str(folder), "--overwrite")
        assert all(said in (folder / name).read_text() for name in ("fit.json", "report.md", "report.html"))
        numbers = json.loads((folder / "fit.json").read_text())
        assert {row["split"] for row in (numbers["fit"], *(numbers["chinchilla"] or ()))} == {said}
        assert run(capsys, "verify", str(folder))[0] == 0
    _, out, _ = run(capsys, "fit", path, *asked, "--all-splits", "--json")
    named = [split["split"] for split in json.loads(out)["splits"]]
    assert named == [f"{name}, {count} parameters" for name in ("paper", "injection_once", "regressed")]
    arms = [path, path, "--where", "budget<=4.64e18"]
    assert said in run(capsys, "compare", *arms, *asked)[1]
    assert said in run(capsys, "predict", path, "--equivalent", "1e8", *asked)[1]
    few = ["--count", count, "--starts", "20", "--quiet"]
    assert (
        said in run(capsys, "plan", path, *few)[1]
        and said in run(capsys, "plan", GRID, "--like", path, *few)[1]
    )


def test_runs_without_mixtures_are_reported_as_before():
    chosen = argparse.Namespace(law="joint", phi=None, split="paper", count="total")
    assert law_of(chosen, load_runs(GRID)).split is PAPER


def test_every_rule_sees_the_chosen_count(tmp_path):
    path = mixtures(tmp_path / "mixtures.csv")
    runs = load(["published"], "total")
    small = int((runs.n_rec <= 3e7).sum())
    assert 0 < small < len(runs) and int((3 * runs.n_rec <= 3e7).sum()) != small
    for where, exclude in ((("n_rec<=3e7",), ()), ((), ("n_rec>3e7",))):
        chosen = argparse.Namespace(where=where, exclude=exclude)
        assert len(select(load([path], "active"), chosen)[0]) == small
        assert len(select(load([path], "total"), chosen)[0]) == int((3 * runs.n_rec <= 3e7).sum())
