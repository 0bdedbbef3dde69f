"""The order of rows, and the endless batches drawn from it.

The order is a pure function of seed, epoch and the data's layout. A position in it is one integer, the global
row counter, so the numbers of workers and processes may change at a resume.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW_ROWS = 2**20
"""Rows that are shuffled together. If there are more, the chunks are permuted, and then the rows of neighbouring
chunks, up to this number: this takes little memory and reads remote data chunk by chunk."""


def _permutation(size: int, *place: int) -> NDArray[np.int64]:
    """A permutation from raw generator output, which numpy promises never to change."""
    keys = np.random.Philox(np.random.SeedSequence(place)).random_raw(size)
    return np.argsort(keys, kind="stable")


class RowOrder:
    """Which stored row is read at each value of the global row counter, epoch after epoch.

    Args:
        chunk_rows: rows of each chunk, in the order of the rows' numbers; at least one row in all.
        window_rows: see WINDOW_ROWS.
    """

    def __init__(self, chunk_rows: Sequence[int], seed: int, window_rows: int = WINDOW_ROWS) -> None:
        self.num_rows = sum(chunk_rows)
        self.seed = seed
        self._sizes = list(chunk_rows)
        self._starts = list(itertools.accumulate(self._sizes, initial=0))
        self._window_rows = window_rows
        self._epoch = -1
        self._windows: list[list[int]] = []
        self._window_starts: list[int] = []
        self._cached: tuple[int, int] = (-1, -1)
        self._cached_rows: NDArray[np.int64] = np.empty(0, np.int64)

    def __getitem__(self, counter: int) -> int:
        """The stored row that is read at this value of the counter."""
        epoch, place = divmod(counter, self.num_rows)
        if epoch != self._epoch:
            self._plan(epoch)
        window = bisect.bisect_right(self._window_starts, place) - 1
        if self._cached != (epoch, window):
            chunks = self._windows[window]
            rows = np.concatenate([np.arange(self._starts[c], self._starts[c + 1]) for c in chunks])
            self._cached_rows = rows[_permutation(len(rows), self.seed, epoch, 1 + window)]
            self._cached = (epoch, window)
        return int(self._cached_rows[place - self._window_starts[window]])

    def _plan(self, epoch: int) -> None:
        """Permute the chunks of this epoch and group them into windows."""
        self._windows, self._window_starts, filled = [], [], self._window_rows
        place = 0
        for chunk in _permutation(len(self._sizes), self.seed, epoch, 0).tolist():
            if filled + self._sizes[chunk] > self._window_rows:
                self._windows.append([])
                self._window_starts.append(place)
                filled = 0
            self._windows[-1].append(chunk)
            filled += self._sizes[chunk]
            place += self._sizes[chunk]
        self._epoch = epoch


@dataclass(eq=False)
class EndlessBatches:
    """Endless batch sampler: this process's slice of every global micro-batch, from a position on.

    Global micro-batch n covers the counters [start + n·B·W, start + (n+1)·B·W), and process k of W takes the k-th
    B of them. The rows of a step therefore do not depend on how it is split over processes and micro-batches.
    """

    order: RowOrder
    start: Callable[[], int]
    """Gives the position (a global row counter); called whenever iteration begins."""
    batch_size: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[list[int]]:
        position = self.start() + self.rank * self.batch_size
        while True:
            yield [self.order[counter] for counter in range(position, position + self.batch_size)]
            position += self.world_size * self.batch_size


class ShardedBatches:
    """Batch sampler over rows rank, rank + world_size, ... below `num_rows`, without padding."""

    def __init__(self, num_rows: int, batch_size: int, rank: int, world_size: int) -> None:
        self._rows = range(rank, num_rows, world_size)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(0, len(self._rows), self._batch_size):
            yield list(self._rows[begin : begin + self._batch_size])
