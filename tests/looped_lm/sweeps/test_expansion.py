"""Shipped sweeps are the runs of the paper; grids, rules and ids of sweep files."""

from __future__ import annotations

import csv
import functools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fitting.published import GRID
from looped_lm.sweeps import files
from looped_lm.sweeps.expansion import expand, shared_runs
from looped_lm.sweeps.place import Place
from looped_lm.sweeps.planning import Planner
from looped_lm.sweeps.runs import Run
from tests.support.reference.accounting import flops_per_token

ROOT = Path(__file__).parents[3]

BUDGET, SIZE, LR = "model.horizon.flops", "model.size", "model.transfer.matrix"
RATES = [0.008, 0.010, 0.012, 0.014, 0.016, 0.018, 0.020, 0.024]
#: Sizes per budget as the paper lists them; `..` of the specification written out.
ISO_DEPTH = {
    4.64e17: [6, 8, 10, 12], 1e18: [6, 8, 10, 12, 14], 2.15e18: [8, 10, 12, 14, 16],
    4.64e18: [10, 12, 14, 16, 18, 20], 1e19: [12, 16, 18, 20, 24], 2.15e19: [18, 24, 28, 34],
}  # fmt: skip
TRUNCATED = {
    4.64e17: [6, 8, 10, 12],
    1e18: list(range(6, 17, 2)),
    2.15e18: list(range(8, 19, 2)),
    4.64e18: list(range(10, 23, 2)),
}
HYPERCONNECTIONS = {
    4.64e17: [6, 8, 10, 12],
    1e18: list(range(6, 15, 2)),
    2.15e18: list(range(8, 19, 2)),
    4.64e18: list(range(10, 21, 2)),
}


@functools.cache
def shipped(name: str) -> list[Run]:
    return expand(files.load(files.find(f"{name}.yaml")))


def sweep_file(folder: Path, text: str, name: str = "mine.yaml") -> files.SweepFile:
    path = folder / name
    path.write_text(text)
    return files.load(path)


def runs_of(folder: Path, text: str, name: str = "mine.yaml") -> list[Run]:
    return expand(sweep_file(folder, text, name))


@pytest.mark.parametrize(
    ("name", "count", "table", "recurrences", "shared"),
    [
        ("iso_depth", 116, ISO_DEPTH, (1, 2, 4, 8), 0),
        ("truncated_bptt", 69, TRUNCATED, (2, 4, 8), 20),
        ("hyperconnections", 63, HYPERCONNECTIONS, (2, 4, 8), 20),
    ],
)
def test_the_grids_are_the_papers(
    name: str, count: int, table: dict[float, list[int]], recurrences: tuple[int, ...], shared: int
) -> None:
    runs = shipped(name)
    assert len(runs) == len({run.id for run in runs}) == count
    cells = Counter((run.axes["config"], run.axes[BUDGET], run.axes[SIZE]) for run in runs)
    assert cells == Counter(
        (f"r{r}.yaml", c, s) for r in recurrences for c, sizes in table.items() for s in sizes
    )
    borrowed = shared_runs(files.load(files.find(f"{name}.yaml")))
    assert len(borrowed) == shared
    assert {run.hash for run in borrowed} <= {run.hash for run in shipped("iso_depth")}
    assert all(run.axes["config"] == "r1.yaml" and run.axes[BUDGET] <= 4.64e18 for run in borrowed)


def test_the_other_shipped_sweeps_are_the_papers() -> None:
    sweep = shipped("lr_sweep")
    assert Counter((run.axes["config"], run.axes[LR]) for run in sweep) == Counter(
        (config, rate) for config in ("r1.yaml", "r4.yaml") for rate in RATES
    )
    assert all(run.keys[SIZE] == 10 and run.keys["model.horizon.ratio"] == 10 for run in sweep)
    transfer = Counter(
        (run.axes[SIZE], run.axes["model.horizon.ratio"], run.axes[LR]) for run in shipped("lr_transfer")
    )
    cells = [(8, 10), (14, 10), (10, 20), (10, 40)]
    assert transfer == {
        (s, ratio, rate): 2 for s, ratio in cells for rate in (0.008, 0.011, 0.014, 0.016, 0.018)
    }
    ablation = shipped("injection_ablation")
    assert [run.axes["config"] for run in ablation] == [
        "r4.yaml", "r4_additive.yaml", "r4_passthrough.yaml", "r4_hc.yaml",
    ]  # fmt: skip
    assert {(run.axes[SIZE], run.axes[BUDGET]) for run in ablation} == {(10, 1e18)}
    extrapolation = [Planner().plan(run).model for run in shipped("extrapolation")]
    told = [(m.model.num_recurrences, m.model.d_model, m.plan.steps) for m in extrapolation]
    assert told == [(1, 2176, 89_645), (4, 2176, 89_645)]


def test_the_nano_sweeps_share_their_first_architecture_and_have_three_widths_per_budget_or_more() -> None:
    grid, lanes = shipped("nano_iso_depth"), shipped("nano_hyperconnections")
    assert (len(grid), len(lanes), len(shipped("nano_lr_sweep"))) == (52, 36, 52)
    for runs, recurrences in ((grid, 4), (lanes, 3)):
        per_cell = Counter((run.axes["config"], run.axes[BUDGET]) for run in runs)
        assert len(per_cell) == recurrences * 3 and set(per_cell.values()) <= {3, 4, 5}
        budgets = {budget for _, budget in per_cell}
        assert max(budgets) >= 10 * min(budgets)
    borrowed = shared_runs(files.load(files.find("nano_hyperconnections.yaml")))
    assert [run.hash for run in borrowed] == [run.hash for run in grid if run.axes["config"] == "r1.yaml"]
    for run in grid:
        r, axes = int(run.axes["config"][1]), run.axes
        depth = r * axes["model.recurrent_layers"] + axes["model.prelude_layers"] + axes["model.coda_layers"]
        assert depth == 10


def check_cells(budgets: set[float]) -> int:
    with GRID.open(newline="") as file:
        table = {
            (int(row["r"]), int(row["size"]), float(row["flops_budget"])): row for row in csv.DictReader(file)
        }
    planner, checked = Planner(), 0
    layouts = {1: (0, 20, 0), 2: (2, 8, 2), 4: (2, 4, 2), 8: (2, 2, 2)}
    for run in shipped("iso_depth"):
        if run.axes[BUDGET] not in budgets:
            continue
        model = planner.plan(run).model
        r, plan = model.model.num_recurrences, model.plan
        row = table[r, run.axes[SIZE], run.axes[BUDGET]]
        d, budget = int(row["d_model"]), float(row["flops_budget"])
        assert model.model.d_model == d and plan.flops_budget == budget
        assert model.flops_per_token == float(row["flops_per_token"])
        assert plan.tokens == pytest.approx(budget / model.flops_per_token, rel=1e-12)
        # The file has whole tokens.
        assert plan.tokens == pytest.approx(float(row["tokens"]), rel=1e-6)
        layer, injection = 12 * d * d + 2 * d, 2 * d * d if r > 1 else 0
        assert model.sections.n == sum(layouts[r]) * layer + injection + 3 * d
        checked += 1
    return checked


def test_tokens_parameters_and_flops_of_a_budget_equal_the_published_grid() -> None:
    assert check_cells({4.64e17}) == 16


@pytest.mark.slow
def test_tokens_parameters_and_flops_of_every_cell_equal_the_published_grid() -> None:
    assert check_cells(set(ISO_DEPTH)) == 116


def test_variants_of_the_grid_say_so() -> None:
    planner = Planner()
    for name, flops in (("truncated_bptt", lambda f: f < 0.8), ("hyperconnections", lambda f: 0.9 < f < 1)):
        plain = planner.plan(shipped("iso_depth")[-1]).model
        variant = next(
            planner.plan(run).model
            for run in shipped(name)
            if run.axes[SIZE] == 12 and run.axes["config"] == "r8.yaml"
        )
        same = flops_per_token(768, 8, (2, 2, 2), "linear")
        assert plain.model.num_recurrences == variant.model.num_recurrences == 8
        assert flops(variant.flops_per_token / same)


# ---- Files ----------------------------------------------------------------------------------------------------------

GRID_TEXT = """
configs: [paper.yaml]
grid:
  config: [r1.yaml, r4.yaml]
  model.size: {by: config, r1.yaml: [1, 2], r4.yaml: 3}
  seed_everything: [1, 2]
"""


def test_axes_that_depend_on_others_and_rules(tmp_path: Path) -> None:
    def points(extra: str = "") -> list[tuple[Any, ...]]:
        return [tuple(run.axes.values()) for run in runs_of(tmp_path, GRID_TEXT + extra)]

    everything = [("r1.yaml", s, i) for s in (1, 2) for i in (1, 2)] + [("r4.yaml", 3, i) for i in (1, 2)]
    assert points() == everything
    assert points("skip: [{model.size: '>=2', seed_everything: 2}]") == [
        p for p in everything if not (p[1] >= 2 and p[2] == 2)
    ]
    assert points("only: [{config: r4.yaml}, {model.size: [1]}]") == [
        p for p in everything if p[0] == "r4.yaml" or p[1] == 1
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gird: {model.size: 1}", ["'gird'", "Did you mean 'grid'?"]),
        ("grid: [1]", ["grid is [1]", "dict"]),
        ("keys: {model.size: 1}", ["no grid"]),
        ("grid: {model.size: [1], model.size: [2]}", ["'model.size' is twice"]),
        ("grid: {model.size: [1, 1]}", ["model.size has the value 1 twice"]),
        ("grid: {model.size: []}", ["empty list"]),
        ("grid: {config: r9.yaml}", ["r9.yaml", "Did you mean 'r"]),
        (
            "grid: {config: [r1.yaml, r4.yaml], model.size: {by: config, r1.yaml: 1}}",
            ["no values for config = r4.yaml"],
        ),
        (
            "grid: {config: r1.yaml, model.size: {by: config, r1.yaml: 1, r4.yaml: 2}}",
            ["r4.yaml", "does not take"],
        ),
        (
            "grid: {config: r1.yaml, model.size: {by: confg, r1.yaml: 1}}",
            ["'confg'", "Did you mean 'config'?"],
        ),
        ("grid: {a: {by: b, 1: 1}, b: {by: a, 1: 1}}", ["depend on each other"]),
        (
            "grid: {model.size: [1, 2]}\nskip: [{model.sise: 1}]",
            ["'model.sise'", "Did you mean 'model.size'?"],
        ),
        ("grid: {model.size: [1, 2]}\nskip: [{model.size: 3}]", ["no run meets the rule skip model.size: 3"]),
        ("grid: {model.size: [1, 2]}\nskip: [{model.size: '>0'}]", ["leave no run"]),
        ("grid: {model.size: [1, 2]}\nkeys: {model.size: 3}", ["under keys and in the grid"]),
        ("grid: {model.size: [1, 2]}\nkeys: {config: r8.yaml}", ["go under configs"]),
        ("grid: {run_name: [a, b]}", ["run_name cannot be set by a sweep", "named after its id"]),
        ("grid: {model.size: [1, 2]}\nkeys: {resume: auto}", ["resume cannot be set"]),
        ("grid: {1: [2, 3]}", ["1 does not name a key"]),
        ("grid: {on: [2, 3]}", ["on: 2 is refused", "--on=2"]),
        ("grid: {seed_everything: [1, '1']}", ["twice"]),
        ("grid: {model.injection: [LinearInjection, looped_lm.LinearInjection]}", ["twice"]),
        ("grid: {model.size: [1, 2]}\nkeys: {a: 1, a: 2}", ["'a' is twice"]),
        ("grid: {model.size: [1, 2]}\nname: a/b", ["'a/b'"]),
        ("grid: {model.size: [1, 2]}\nshared: [{sweep: iso_deph.yaml}]", ["Did you mean 'iso_depth.yaml'?"]),
        ("grid: {model.horizon: [looped_lm.Steps, looped_lm.Steps]}", ["twice"]),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, told: list[str]) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        sweep = sweep_file(tmp_path, text)
        expand(sweep)
        shared_runs(sweep)
    for word in told:
        assert word in str(caught.value)


def test_a_value_that_fit_refuses_is_refused_with_the_run(tmp_path: Path) -> None:
    refused = r"config: r4.yaml, model.sise: 2 is refused: .*model\.sise(.|\n)*Did you mean 'model\.size'"
    with pytest.raises(ValueError, match=refused):
        runs_of(tmp_path, "grid: {config: r4.yaml, model.sise: 2}")
    (run,) = runs_of(tmp_path, "grid: {config: r4.yaml, model.horizon.flops: 1e3}")
    with pytest.raises(ValueError, match="less than one optimizer step"):
        Planner().plan(run)
    (run,) = runs_of(tmp_path, "grid: {config: r4.yaml, data.batch_size: 3}")
    with pytest.raises(ValueError, match=rf"Run {run.id} is refused: batch_tokens .* not a multiple"):
        Planner().plan(run)


# ---- Ids ------------------------------------------------------------------------------------------------------------


def test_an_id_is_what_is_trained_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    overlay = tmp_path / "mine.cfg.yaml"
    overlay.write_text(
        "model:\n  horizon:\n    class_path: looped_lm.FlopsBudget\n    init_args:\n      flops: 1.0e+13\n"
    )
    (tmp_path / "more" / "other.yaml").write_text("# a comment\n" + overlay.read_text())

    def ids(text: str) -> list[str]:
        return [run.hash for run in runs_of(tmp_path, text)]

    (one,) = ids("grid: {config: r4.yaml, model.horizon.flops: 1e13}")
    assert ids("grid: {config: r4.yaml}\nkeys: {model.horizon.flops: 10000000000000}") == [one]
    assert ids("grid: {config: r4.yaml}\nconfigs: [mine.cfg.yaml]") == [one]
    assert ids("grid: {config: r4.yaml}\nconfigs: [more/other.yaml]") == [one], "places of files do not count"
    assert ids("grid: {config: r4.yaml, model.horizon.flops: [2e13, 1e13]}")[1] == one, (
        "more values change nothing"
    )
    assert ids("grid: {config: r4.yaml, model.horizon.flops: 1e13, seed_everything: [1, 2]}")[0] == one
    machine = "trainer.devices: 4, data.num_workers: 3, data.batch_size: 2, model.recompute: true"
    assert ids(f"grid: {{config: r4.yaml, model.horizon.flops: 1e13}}\nkeys: {{{machine}}}") == [one]
    others = [
        "model.horizon.flops: 2e13",
        "seed_everything: 2",
        "data.data_dir: x",
        "trainer.precision: bf16-mixed",
    ]
    found = {
        ids(f"grid: {{config: r4.yaml, model.horizon.flops: 1e13}}\nkeys: {{{key}}}")[0] for key in others[1:]
    }
    assert len(found | {one}) == 4 and ids("grid: {config: r4.yaml, model.horizon.flops: 2e13}") != [one]
    assert ids(
        "grid: {config: r4.yaml, model.horizon.flops: 1e13}\nkeys: {trainer.gradient_clip_val: 1.0}"
    ) != [one]
    classes = set()
    for name in ("Linear", "Additive"):
        (tmp_path / "class.yaml").write_text(
            f"model:\n  injection:\n    class_path: looped_lm.{name}Injection\n    init_args: {{}}\n"
        )
        classes |= set(ids("grid: {config: r4.yaml}\nconfigs: [class.yaml]"))
        os.utime(tmp_path / "class.yaml", (1, 1))
    assert len(classes) == 2, "a class counts, with and without arguments"
    (tmp_path / "budget.yaml").write_text(
        "model: {horizon: {class_path: looped_lm.FlopsBudget, init_args: {flops: 1e9}}}"
    )
    names = (
        "FlopsBudget", "looped_lm.FlopsBudget", "looped_lm.training.schedules.FlopsBudget",
        "looped_lm.schedules.FlopsBudget",
    )  # fmt: skip
    told = {
        ids(f"grid: {{config: r4.yaml}}\nconfigs: [budget.yaml]\nkeys: {{model.horizon: {n}}}")[0]
        for n in names
    }
    assert told == set(ids("grid: {config: r4.yaml, model.horizon.flops: 1e9}")), "a class has one name"
    plain = "grid: {config: r4.yaml, model.horizon.flops: 1e13}"
    defaults = (
        "trainer.max_steps: -1, model.transfer.norm: 0.005, model.optimizer: looped_lm.MuonH, data.seed: 0"
    )
    assert ids(f"{plain}\nkeys: {{{defaults}}}") == [one], "a default may be written out"
    own = "tests.support.own_components.GatedInjection"
    gates = ("", ", init_args: {gate: 1}", ", init_args: {gate: 2}")
    spelled = [
        f"model.injection: {own}",
        *(f"model.injection: {{class_path: {own}{gate}}}" for gate in gates),
    ]
    one_gate, *same_gate, other_gate = (ids(f"grid: {{config: r4.yaml, {key}}}") for key in spelled)
    assert same_gate == [one_gate] * 2 and other_gate != one_gate, "also one of a class that an option names"
    assert ids(f"{plain}\nkeys: {{trainer.limit_val_batches: 1}}") != [one], "its loss is another"
    assert ids(f"{plain}\nkeys: {{data.data_dir: 2024-01-01}}") != [one], "a date is text"
    two = ids("grid: {config: r4.yaml, model.horizon.flops: 1e13, model.compile_layers: [false, true]}")
    assert len(set(two)) == 2, "an axis always tells runs apart"
    added = "{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {save_top_k: %d}}"
    two = ids(f"grid: {{config: r4.yaml, trainer.callbacks+: [{added % 1}, {added % 2}]}}")
    assert len(set(two)) == 2, "also one that adds to a list"
    with pytest.raises(ValueError, match="the same run is in it twice"):
        ids("grid: {config: r4.yaml, model.bptt: [looped_lm.FullBPTT, {class_path: looped_lm.FullBPTT}]}")


@pytest.mark.parametrize(
    "name", ["nano_iso_depth", "nano_hyperconnections", "nano_lr_sweep", "nano_variants"]
)
def test_committed_records_are_those_of_the_shipped_sweeps(name: str) -> None:
    """A key more in a config they use would make other runs of them, and train them all again."""
    place = Place(ROOT / "nowhere", name, records=ROOT / "results" / name)
    assert [run.id for run in shipped(name) if not place.finished(run)] == []


def test_the_iso_token_sweep_has_curves_that_enclose_its_loops() -> None:
    """Widths as asked for (heads do not round them), repeats in the seed alone, and an r = 1 model below every loop."""
    planned = [Planner().plan(run) for run in shipped("nano_iso_token")]
    assert len(planned) == 171
    models = [(p.model.model.num_recurrences, p.model.model.d_model, p.model.plan.tokens) for p in planned]
    assert set(Counter(models).values()) == {3} and {p.seed for p in planned} == {1, 2, 3}
    assert {d for r, d, _ in models if r == 1} == {8, 16, 24, 32, 40, 48, 64}
    assert {tokens for *_, tokens in models} == {262_144, 786_432, 2_359_296}
    sizes = {
        loops: [p.model.sections.n for p, (r, *_) in zip(planned, models, strict=True) if (r > 1) == loops]
        for loops in (False, True)
    }
    assert min(sizes[False]) < min(sizes[True])
    assert max(d for r, d, _ in models if r > 1) < 64


def test_what_a_config_merges_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "merged.yaml"
    file.write_text("a: &a {size: 1, depth: 2}\nb: {<<: *a, size: 3}\n")
    assert files.read_yaml(file)["b"] == {"size": 3, "depth": 2}
