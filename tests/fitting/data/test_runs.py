"""The table of runs: rules, budgets, cells, and the size of the unrolled model."""

import numpy as np
import pytest

from fitting.data.runs import concatenate
from fitting.errors import FitError
from fitting.published import load_grid


@pytest.fixture(scope="module")
def grid():
    return load_grid()


def test_the_grid_is_the_papers(grid):
    assert len(grid) == 116 and grid.cell_count == 24
    assert grid.recurrences.tolist() == [1, 2, 4, 8]
    assert "116 runs" in repr(grid)


def test_rules_select_and_every_run_left_out_is_listed_with_its_rule(grid):
    low = grid.where("budget<=2.15e18")
    assert len(low) == 56 and len(low.excluded) == 60
    assert {gone.rule for gone in low.excluded} == {"not where budget<=2.15e18"}
    clean = grid.exclude("quality=inferred_from_curve", "r=8")
    assert len(clean) == 116 - (grid.r == 8).sum() - sum(
        (q == "inferred_from_curve") & (r != 8) for q, r in zip(grid.extra["quality"], grid.r, strict=True)
    )
    assert len(clean) + len(clean.excluded) == 116


@pytest.mark.parametrize("rule", ["nonsense", "colour=red", "r>two", "quality>clean"])
def test_rules_that_mean_nothing_are_refused(grid, rule):
    with pytest.raises(FitError, match=rule.partition(">")[0].partition("=")[0]):
        grid.where(rule)


def test_runs_without_a_budget_share_a_cell_within_two_percent(grid):
    flops = grid.training_flops
    bare = np.full(len(grid), np.nan)
    import dataclasses

    unnamed = dataclasses.replace(
        grid, flops_budget=bare, tokens=grid.tokens * (1 + 0.009 * np.sin(np.arange(116)))
    )
    assert unnamed.cell_count == 24
    same_cell = unnamed.cell[:, None] == unnamed.cell[None, :]
    assert (same_cell == (grid.cell[:, None] == grid.cell[None, :])).all()
    apart = dataclasses.replace(
        unnamed, tokens=np.where(np.arange(116) == 0, grid.tokens * 1.05, unnamed.tokens)
    )
    assert apart.cell_count == 25
    assert flops == pytest.approx(grid.flops_budget, rel=1e-6)


def test_size_of_the_unrolled_model_is_that_of_r1(grid):
    layer = 12 * 640**2 + 2 * 640
    looped = grid.where("r=4", "d_model=640")
    assert looped.n_at_r1 == pytest.approx(20 * layer + 3 * 640)


def test_tables_of_two_conventions_do_not_mix(grid):
    import dataclasses

    with pytest.raises(FitError, match="causal"):
        concatenate(grid, dataclasses.replace(grid, flops_convention="causal"))
    assert len(concatenate(grid, grid)) == 232
