"""The packing rule word for word, quadratic."""

from __future__ import annotations

from collections.abc import Iterable


def plain_pack(lengths: Iterable[int], row_length: int, buffer_size: int) -> list[list[tuple[int, int]]]:
    """The rule word for word: scan the whole buffer for every placement."""
    waiting = list(enumerate(lengths))
    waiting.reverse()
    buffer: list[tuple[int, int]] = []
    rows = []

    def refill() -> None:
        while waiting and len(buffer) < buffer_size:
            buffer.append(waiting.pop())

    while True:
        refill()
        row: list[tuple[int, int]] = []
        room = row_length
        while room > 0:
            if not buffer:
                refill()
            if not buffer:
                return rows
            best = shortest = None
            for place, (_, length) in enumerate(buffer):
                if length <= room and (best is None or length > buffer[best][1]):
                    best = place
                if shortest is None or length < buffer[shortest][1]:
                    shortest = place
            assert shortest is not None
            index, length = buffer.pop(shortest if best is None else best)
            row.append((index, min(length, room)))
            room -= row[-1][1]
        rows.append(row)
