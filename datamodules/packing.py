"""Best-fit packing of documents into rows of a fixed number of tokens (arXiv 2604.21106).

Packing works on lengths alone and never sees a token.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from datamodules.errors import DataError, check_at_least

Segment = tuple[int, int]
"""(position of the document in the input, number of tokens taken from its beginning)."""


class _Buffer:
    """Documents that wait for a row, found by length in constant time.

    Each length up to `row_length` has a first-in-first-out queue; bit n of `_present` says whether queue n holds
    anything. Longer documents never fit and are cropped last: they are in a heap by (length, arrival).
    """

    def __init__(self, row_length: int) -> None:
        self._queues: list[deque[int]] = [deque() for _ in range(row_length + 1)]
        self._present = 0
        self._long: list[tuple[int, int]] = []
        self._row_length = row_length
        self.size = 0

    def add(self, index: int, length: int) -> None:
        if length > self._row_length:
            heapq.heappush(self._long, (length, index))
        else:
            self._queues[length].append(index)
            self._present |= 1 << length
        self.size += 1

    def pop_longest_fitting(self, room: int) -> Segment | None:
        """The longest of at most `room` tokens, the earliest among equals, or None."""
        length = (self._present & ((2 << room) - 1)).bit_length() - 1
        return None if length < 0 else self._pop(length)

    def pop_shortest(self) -> Segment:
        """The shortest of all, the earliest among equals."""
        if self._present:
            return self._pop((self._present & -self._present).bit_length() - 1)
        self.size -= 1
        length, index = heapq.heappop(self._long)
        return index, length

    def _pop(self, length: int) -> Segment:
        queue = self._queues[length]
        index = queue.popleft()
        if not queue:
            self._present ^= 1 << length
        self.size -= 1
        return index, length


def pack(lengths: Iterable[int], row_length: int, buffer_size: int = 1000) -> Iterator[list[Segment]]:
    """Yield rows, each a list of segments whose tokens sum to exactly `row_length`.

    The buffer is filled to `buffer_size` documents before each row. The row then takes the longest document
    that still fits, again and again. When none fits, the shortest one in the buffer is cropped to fill the
    row, and the rest of it is dropped. Of equal lengths the earliest arrival goes first. A last row that
    cannot be filled is dropped.

    A buffer that runs empty within a row is refilled; the paper does not say what to do then.

    Args:
        lengths: tokens per document, in order of arrival; each at least 1.
        row_length: tokens per row (sequence length + 1).
        buffer_size: documents that wait at once.
    """
    check_at_least(1, row_length=row_length, packing_buffer=buffer_size)
    stream = enumerate(lengths)
    buffer = _Buffer(row_length)
    while True:
        _fill(buffer, stream, buffer_size)
        row: list[Segment] = []
        room = row_length
        while room:
            if not buffer.size:
                _fill(buffer, stream, buffer_size)
                if not buffer.size:
                    return
            segment = buffer.pop_longest_fitting(room)
            if segment is None:
                segment = (buffer.pop_shortest()[0], room)
            row.append(segment)
            room -= segment[1]
        yield row


def _fill(buffer: _Buffer, stream: Iterator[tuple[int, int]], size: int) -> None:
    for index, length in itertools.islice(stream, size - buffer.size):
        if length < 1:
            raise DataError(f"document {index} has {length} tokens; a document to be packed has at least 1")
        buffer.add(index, length)
