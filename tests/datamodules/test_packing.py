"""Best-fit packing against a plain quadratic reference and against hand-made cases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.errors import DataError
from datamodules.packing import pack
from tests.support.reference.packing import plain_pack


@given(
    lengths=st.lists(st.integers(1, 60), max_size=150),
    row_length=st.integers(1, 40),
    buffer_size=st.integers(1, 30),
)
@settings(max_examples=300, deadline=None)
def test_rows_are_those_of_the_plain_quadratic_version(lengths, row_length, buffer_size):
    assert list(pack(lengths, row_length, buffer_size)) == plain_pack(lengths, row_length, buffer_size)


@given(lengths=st.lists(st.integers(1, 50), max_size=80), row_length=st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_rows_are_full_and_no_document_is_used_twice(lengths, row_length):
    rows = list(pack(lengths, row_length, 7))
    assert all(sum(taken for _, taken in row) == row_length for row in rows)
    used = [index for row in rows for index, _ in row]
    assert len(used) == len(set(used))
    assert all(1 <= taken <= lengths[index] for row in rows for index, taken in row)
    # Only the last document of a row can be cropped.
    assert all(taken == lengths[index] for row in rows for index, taken in row[:-1])


def test_longest_that_fits_then_the_shortest_is_cropped():
    # Row of 10: 7 is the longest that fits; of 5, 4, 6 none fits into 3, so the shortest (4) is cropped to 3.
    assert next(pack([5, 7, 4, 6], 10, 4)) == [(1, 7), (2, 3)]


def test_ties_go_to_the_earliest_arrival():
    assert next(pack([4, 4, 4], 8, 3)) == [(0, 4), (1, 4)]
    assert next(pack([6, 6, 6], 8, 3)) == [(0, 6), (1, 2)]
    assert next(pack([20, 20], 8, 3)) == [(0, 8)]


def test_the_buffer_is_refilled_before_a_row_and_not_within():
    # The 3 arrives when the first row has begun: it would fit there, but the row is filled from 7 and 5
    # alone.
    rows = list(pack([7, 5, 3, 6], 10, 2))
    assert rows[0] == [(0, 7), (1, 3)]
    # An empty buffer is refilled even within a row, or rows could never be filled.
    assert list(pack([1] * 6, 3, 1)) == [[(0, 1), (1, 1), (2, 1)], [(3, 1), (4, 1), (5, 1)]]


def test_a_last_row_that_cannot_be_filled_is_dropped():
    assert list(pack([4, 4, 3], 8, 10)) == [[(0, 4), (1, 4)]]
    assert list(pack([], 8, 10)) == []


@pytest.mark.parametrize(
    ("lengths", "row_length", "buffer"), [([0], 4, 2), ([-1], 4, 2), ([1], 0, 2), ([1], 4, 0)]
)
def test_nonsense_is_refused(lengths, row_length, buffer):
    with pytest.raises(DataError, match="at least 1"):
        list(pack(lengths, row_length, buffer))
