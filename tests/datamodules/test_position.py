"""Row order and batches: pure functions of seed and position, whoever asks and from where."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.position import EndlessBatches, RowOrder, ShardedBatches


@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    seed=st.integers(0, 5),
    window=st.integers(1, 40),
    epoch=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_every_epoch_reads_every_row_once(chunks, seed, window, epoch):
    order = RowOrder(chunks, seed, window)
    rows = [order[epoch * sum(chunks) + i] for i in range(sum(chunks))]
    assert sorted(rows) == list(range(sum(chunks)))


def test_order_is_a_pure_function_of_seed_and_counter():
    order, other = RowOrder([7, 5, 9], 3), RowOrder([7, 5, 9], 3)
    forwards = [order[i] for i in range(63)]
    assert [other[i] for i in reversed(range(63))] == forwards[::-1]
    assert forwards[:21] != forwards[21:42]
    assert [RowOrder([7, 5, 9], 4)[i] for i in range(21)] != forwards[:21]


def test_the_order_does_not_change_between_versions():
    # numpy guarantees the raw stream; a change here would silently change the data of every resumed run.
    order = RowOrder([5, 5], seed=1)
    assert [order[i] for i in range(20)] == GOLDEN


GOLDEN = [3, 8, 6, 5, 7, 9, 4, 1, 2, 0, 0, 3, 5, 7, 8, 1, 4, 6, 2, 9]


def test_windows_bound_how_many_chunks_are_read_at_once():
    order = RowOrder([10] * 20, seed=0, window_rows=30)
    chunks = [order[i] // 10 for i in range(200)]
    windows = [set(chunks[i : i + 30]) for i in range(0, 180, 30)]
    assert all(len(window) == 3 for window in windows)
    # Chunks themselves are shuffled too.
    assert chunks[:30] != sorted(chunks[:30]) and {0, 1, 2} not in windows


@given(start=st.integers(0, 50), batch=st.integers(1, 4), steps=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_a_steps_rows_do_not_depend_on_processes_or_accumulation(start, batch, steps):
    order = RowOrder([6, 7], 0)

    def rows_by_step(world_size: int, per_process: int, accumulate: int) -> list[list[int]]:
        streams = [
            iter(EndlessBatches(order, lambda: start, per_process, rank, world_size))
            for rank in range(world_size)
        ]
        per_step = []
        for _ in range(steps):
            micro = [next(stream) for _ in range(accumulate) for stream in streams]
            per_step.append([row for rows in micro for row in rows])
        return per_step

    plain = rows_by_step(1, 4 * batch, 1)
    assert rows_by_step(2, 2 * batch, 1) == plain
    assert rows_by_step(4, batch, 1) == plain
    assert rows_by_step(2, batch, 2) == plain
    assert rows_by_step(1, batch, 4) == plain


def test_iteration_begins_where_it_is_told_at_that_moment():
    order, position = RowOrder([50], 0), 0
    batches = EndlessBatches(order, lambda: position, 5, 0, 1)
    first = list(itertools.islice(batches, 4))
    position = 10
    assert next(iter(batches)) == first[2]


@given(rows=st.integers(1, 40), world_size=st.integers(1, 5), batch=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_validation_rows_are_shared_without_padding_or_repetition(rows, world_size, batch):
    shards = [ShardedBatches(rows, batch, rank, world_size) for rank in range(world_size)]
    seen = [row for shard in shards for part in shard for row in part]
    assert sorted(seen) == list(range(rows))
    assert all(len(list(shard)) == len(shard) for shard in shards)


def test_global_random_state_is_left_alone():
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    order = RowOrder([20], 0)
    [order[i] for i in range(60)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
