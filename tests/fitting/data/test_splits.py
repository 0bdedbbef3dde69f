"""Splits: what they count, and where they refuse."""

import dataclasses

import numpy as np
import pytest

from fitting.data.splits import INJECTION_ONCE, PAPER, REGRESSED, REGRESSED_AS_LINEAR, split_named
from fitting.errors import FitError
from fitting.published import load_grid


@pytest.fixture(scope="module")
def grid():
    return load_grid()


def test_the_regressed_split_is_the_regression_it_is_named_for(grid):
    once, rec = REGRESSED(grid)
    one_width = (grid.d_model == 640) & (grid.budget == 1e18)
    inverse, total = 16 / grid.r[one_width], grid.n_total[one_width]
    slope, intercept = np.polyfit(inverse, total, 1)
    assert once[one_width] == pytest.approx(intercept, rel=1e-9)
    assert rec[one_width] / inverse == pytest.approx(slope, rel=1e-9)


def test_injection_once_moves_the_injection_and_nothing_else(grid):
    once, rec = INJECTION_ONCE(grid)
    paper_once, paper_rec = PAPER(grid)
    assert once + rec == pytest.approx(paper_once + paper_rec)
    assert once - paper_once == pytest.approx(np.where(grid.r > 1, 2 * grid.d_model**2, 0))


def test_regressed_is_refused_where_it_is_not_defined(grid):
    lanes = dataclasses.replace(
        grid,
        n_injection=np.where(grid.r > 1, 8 * grid.r, 0),
        n_rec=grid.n_rec - grid.n_injection + np.where(grid.r > 1, 8 * grid.r, 0),
        injection=np.where(grid.r > 1, "hyperconnections", "none").astype(object),
    )
    with pytest.raises(FitError, match="hyperconnections.*regressed_as_linear"):
        REGRESSED(lanes)
    assert REGRESSED_AS_LINEAR(lanes)[0] == pytest.approx(REGRESSED(grid)[0])
    other = dataclasses.replace(grid, prelude_layers=grid.prelude_layers + 1)
    for split in (REGRESSED, REGRESSED_AS_LINEAR):
        with pytest.raises(FitError, match="2-\\(16/r\\)-2"):
            split(other)


def test_counts_of_a_file_are_never_replaced_by_the_layouts(grid):
    other = dataclasses.replace(grid, n_rec=np.where(grid.r == 4, 1.01, 1.0) * grid.n_rec)
    for split in (REGRESSED, REGRESSED_AS_LINEAR):
        with pytest.raises(FitError, match="iso_depth_grid.csv:.*r=4.*--split paper"):
            split(other)


def test_an_unknown_name_lists_what_exists():
    assert split_named("paper") is PAPER
    with pytest.raises(FitError, match="injection_once.*regressed"):
        split_named("mine")
