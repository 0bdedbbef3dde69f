"""Records and CSV files in: what is accepted, and that every refusal names file and field."""

import dataclasses

import numpy as np
import pytest

from fitting.data.loading import load_runs
from fitting.published import GRID
from fitting.records import RecordError, RunRecord
from tests.support.run_records import record_fields

HEADER = "r,size,flops_budget,flops_per_token,tokens,val_loss"
ROW = "4,10,1e18,1e9,1e9,2.8"


def save(folder, name, **changes):
    return RunRecord(**record_fields(**changes)).save(folder / f"{name}.run.json")


def at_step(step):
    return dict(steps=step, val_step=step, tokens=64 * step, training_flops=64e6 * step)


def test_records_become_a_table(tmp_path):
    parts = {"injection": 40, "lanes": 2, "block": 58}
    save(tmp_path / "a", "step10", parameters=parts)
    runs = load_runs(tmp_path)
    assert len(runs) == 1 and runs.n_injection.tolist() == [42]
    assert runs.n_once.tolist() == [200] and runs.flops_convention == "paper"


def test_successive_checkpoints_of_one_run_count_once_and_the_others_are_listed(tmp_path):
    for step in (5, 10):
        save(tmp_path, f"step{step}", **at_step(step))
    save(tmp_path, "broken", run_name="other", status="diverged", val_loss=None, stop_reason="NaN at step 3")
    runs = load_runs(tmp_path)
    assert [str(s).rpartition("/")[2] for s in runs.source] == ["step10.run.json"]
    rules = sorted(gone.rule for gone in runs.excluded)
    assert rules == ["status=diverged (NaN at step 3)", "step 5 of a run that has a record at step 10"]


def test_the_same_file_named_twice_counts_once(tmp_path):
    path = save(tmp_path, "one")
    assert len(load_runs(path, tmp_path)) == 1


def test_copies_of_a_record_count_once_and_are_listed(tmp_path):
    """A sweep's folder holds each finished run's record twice."""
    save(tmp_path / "run" / "checkpoints", "x", **at_step(10))
    save(tmp_path / "run" / "checkpoints", "early", **at_step(5))
    copy = save(tmp_path / "records", "x", **at_step(10))
    runs = load_runs(tmp_path)
    assert len(runs) == 1
    rules = sorted(gone.rule for gone in runs.excluded)
    assert len(rules) == 2 and rules[0].startswith("step 5 of a run")
    assert rules[1] == f"the same record as {copy}"


def test_duplicates_and_mixed_conventions_are_refused(tmp_path):
    save(tmp_path / "a", "x")
    save(tmp_path / "b", "x", wall_seconds=1.0)
    with pytest.raises(RecordError, match=r"b/x.run.json.*same run as .*a/x.run.json"):
        load_runs(tmp_path)
    save(tmp_path / "b", "x", seed=2, flops_convention="causal")
    with pytest.raises(RecordError, match="flops_convention.*causal.*paper"):
        load_runs(tmp_path)


def test_a_csv_needs_no_more_than_the_design_and_the_losses(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{ROW}\n1,10,,1e9,1e9,2.7\n")
    runs = load_runs(path)
    layer = 12 * 640**2 + 2 * 640
    assert runs.n_once == pytest.approx(4 * layer + 3 * 640)
    assert runs.n_rec == pytest.approx([4 * layer + 2 * 640**2, 16 * layer])
    assert runs.flops_budget[0] == 1e18 and np.isnan(runs.flops_budget[1])


def test_the_shipped_grid_counts_as_the_specification_says():
    runs = load_runs(GRID)
    chosen = runs.where("d_model=1280")
    sizes = dict(zip(chosen.r, chosen.n_total / 1e6, strict=True))
    assert sizes[1] == pytest.approx(393.3, abs=0.05) and sizes[4] == pytest.approx(160.6, abs=0.05)


def test_injections_other_than_linear_are_counted(tmp_path):
    path = tmp_path / "runs.csv"
    rows = [
        f"8,10,,1e9,{d}e9,2.8,{kind},full,0"
        for d, kind in enumerate(("additive", "hyperconnections"), start=1)
    ]
    path.write_text("\n".join([f"{HEADER},injection,bptt,seed", *rows]) + "\n")
    assert load_runs(path).n_injection.tolist() == [0, 64]
    path.write_text(f"{HEADER},injection\n{ROW},mine\n")
    with pytest.raises(RecordError, match="injection.*mine.*n_injection"):
        load_runs(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{HEADER}\n4,10,1e18,1e9,1e9,nan\n", ":2.*val_loss.*nan"),
        (f"{HEADER}\n4,10,1e18,1e9,0,2.8\n", ":2.*tokens.*0"),
        (f"{HEADER}\n4,10,1e18,1e9,many,2.8\n", ":2.*tokens.*many"),
        (f"{HEADER}\n3,10,1e18,1e9,1e9,2.8\n", ":2.*'r'.*divide 16"),
        (f"{HEADER}\n2.5,10,1e18,1e9,1e9,2.8\n", ":2.*'r'.*whole"),
        (f"{HEADER}\n{ROW}\n{ROW}\n", ":3.*same run as .*:2"),
        (f"{HEADER},flops_convention\n{ROW},mine\n", ":2.*flops_convention.*mine"),
        (
            f"{HEADER},flops_convention\n{ROW},paper\n1,10,1e18,1e9,1e9,2.8,causal\n",
            "flops_convention.*differs",
        ),
        ("r,size,flops_budget,flops_per_token,tokens\n4,10,1e18,1e9,1e9\n", "val_loss.*missing"),
        ("r,flops_budget,flops_per_token,tokens,val_loss\n4,1e18,1e9,1e9,2.8\n", "d_model.*missing"),
        (HEADER + "\n", "no finished run"),
        (f"{HEADER}\n{ROW}\n4,10,1e18,1e9,1e9\n", ":3.*'val_loss'.*cut short"),
        (f"{HEADER}\n4,10,1e18,1e9,1e9,\n", ":2.*'val_loss'.*empty"),
        (f"{HEADER}\n4,,1e18,1e9,1e9,2.8\n", ":2.*'size'.*empty"),
        (f"{HEADER}\n\n{ROW}\n4,,1e18,1e9,1e9,2.8\n", ":4.*'size'.*empty"),
        (f"{HEADER}\n{ROW},7\n", ":2.*more than the header"),
        (f"{HEADER},seed,seed\n{ROW},1,2\n", "'seed'.*two columns"),
        (f"{HEADER},seed\n{ROW},\n", ":2.*'seed'.*empty"),
        (f"{HEADER},n_once,n_rec\n{ROW},,5e6\n", ":2.*'n_once'.*empty"),
        (f"{HEADER}\n4,10,1e18,1e9,1.06e9,2.8\n", ":2.*'flops_budget'.*1e.18.*1.06e.18"),
    ],
)
def test_bad_tables_name_line_and_column(tmp_path, text, words):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(RecordError, match=words):
        load_runs(path)


def test_a_design_may_lack_losses_where_it_says_so(tmp_path):
    path = tmp_path / "design.csv"
    path.write_text("r,size,flops_budget,flops_per_token,tokens\n4,10,1e18,1e9,1e9\n")
    assert np.isnan(load_runs(path, with_loss=False).val_loss).all()


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(RecordError, match="nowhere.*does not exist"):
        load_runs(tmp_path / "nowhere")
    with pytest.raises(RecordError, match="holds no run record"):
        load_runs(tmp_path)
    save(tmp_path, "x", status="stopped", stop_reason="signal")
    with pytest.raises(RecordError, match="no finished run.*signal"):
        load_runs(tmp_path)


def test_an_unknown_schema_version_names_the_file(tmp_path):
    path = save(tmp_path, "x")
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(RecordError, match="x.run.json.*schema_version.*9"):
        load_runs(path)


def test_labels_tell_architectures_apart(tmp_path):
    lanes = {"class_path": "m.HyperConnectionLanes", "init_args": {"num_lanes": 2}}
    base = record_fields()["components"]
    save(tmp_path, "a")
    save(tmp_path, "b", run_name="hc", components=base | {"lanes": lanes})
    labels = sorted(load_runs(tmp_path).injection)
    assert labels == ["Linear", "Linear+HyperConnectionLanes(num_lanes=2)"]
    assert dataclasses.is_dataclass(RunRecord)


def test_a_byte_order_mark_and_a_budget_within_five_percent_are_accepted(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n4,10,1e18,1e9,1.04e9,2.8\n", encoding="utf-8-sig")
    assert load_runs(path).r.tolist() == [4]


def test_layer_numbers_are_not_made_up_where_a_file_gives_its_own_counts(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER},n_once,n_rec\n{ROW},7e6,9e6\n1,10,1e18,1e9,1e9,2.7,7e6,3e7\n")
    own = load_runs(path)
    assert np.isnan(own.recurrent_layers).all() and own.n_at_r1.tolist() == [3.7e7, 3.7e7]
    layer, square = 12 * 640**2 + 2 * 640, 640**2
    path.write_text(f"{HEADER},n_once,n_rec\n{ROW},{4 * layer + 1920},{4 * layer + 2 * square}\n")
    assert load_runs(path).recurrent_layers.tolist() == [4]


def test_a_record_of_the_shipped_components_joins_the_csv(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER},bptt\n{ROW},full\n1,10,1e18,1e9,1e9,2.7,full\n")

    def parts(**names):
        return {seam: {"class_path": f"looped_lm.{name}", "init_args": {}} for seam, name in names.items()}

    full = parts(injection="LinearInjection", lanes="SingleLane", bptt="FullBPTT")
    single = parts(injection="PassthroughInjection", lanes="SingleLane", bptt="FullBPTT")
    lanes = parts(injection="PassthroughInjection", lanes="HyperConnectionLanes", bptt="FullBPTT")
    save(tmp_path, "a", components=full)
    save(tmp_path, "b", components=single, num_recurrences=1, prelude_layers=0, coda_layers=0)
    save(tmp_path, "c", components=full | parts(bptt="TruncatedBPTT"), run_name="c")
    save(tmp_path, "d", components=lanes, run_name="d")
    save(tmp_path, "e", components=full | parts(residual="PlainResidual"), run_name="e", seed=7)
    save(tmp_path, "f", components=full | parts(residual="ScaledResidual"), run_name="f")
    runs = load_runs(path, tmp_path)
    pairs = list(zip(runs.r, runs.injection, runs.bptt, strict=True))
    assert set(pairs) == {
        (4, "linear", "full"), (1, "none", "full"), (8, "linear", "full"), (8, "linear", "truncated"),
        (8, "hyperconnections", "full"), (8, "linear+ScaledResidual", "full"),
    }  # fmt: skip


def test_active_counts_are_read_and_default_to_all(tmp_path):
    save(tmp_path / "a", "dense")
    save(tmp_path / "b", "mixture", seed=2, n_once_active=150, n_rec_active=40)
    runs = load_runs(tmp_path)
    assert runs.n_once_active.tolist() == [200, 150] and runs.n_rec_active.tolist() == [100, 40]
    assert runs.counting("active").n_total.tolist() == [300, 190] and runs.counting("total") is runs
    with pytest.raises(RecordError, match="n_rec_active.*is 101, but n_rec is 100"):
        RunRecord(**record_fields(n_rec_active=101))
    table = tmp_path / "table.csv"
    table.write_text(f"{HEADER},n_rec_active\n{ROW},1e12\n")
    with pytest.raises(RecordError, match="n_rec_active.*more than the"):
        load_runs(table)
