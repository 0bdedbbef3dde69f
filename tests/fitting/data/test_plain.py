"""Results as plain JSON types, and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from fitting.data.plain import optional, plain, read
from fitting.errors import FitError


@dataclass(frozen=True)
class Inner:
    name: str
    pair: tuple[float, float]


@dataclass(frozen=True)
class NoInner:
    refusal: str


@dataclass(frozen=True)
class Outer:
    count: int
    value: float
    many: tuple[Inner | NoInner, ...]
    by: dict[str, tuple[int, ...]]
    shown: float | None = None
    left_out: str | None = optional()


FULL = Outer(3, 0.5, (Inner("a", (1.0, 2.0)), NoInner("none")), {"x": (1, 2)}, 2.5, "there")


def test_a_result_comes_back_through_json():
    told = plain(FULL)
    assert told["many"] == [{"name": "a", "pair": [1.0, 2.0]}, {"refusal": "none"}]
    assert read(Outer, json.loads(json.dumps(told))) == FULL


def test_what_is_none_is_null_or_has_no_key_and_nan_comes_back():
    told = plain(Outer(3, math.nan, (), {}))
    assert told == {"count": 3, "value": None, "many": [], "by": {}, "shown": None}
    back = read(Outer, told)
    assert math.isnan(back.value) and back.shown is None and back.left_out is None


@pytest.mark.parametrize(("change", "words"), [
    ({"count": 1.5}, "it.count is 1.5, which is not of type int"),
    ({"count": True}, "it.count is True"),
    ({"by": {"x": [1, "2"]}}, r"it.by.x\[1\] is '2'"),
    ({"many": [{"name": "a"}]}, r"it.many\[0\] has no 'pair'"),
    ({"many": [{"name": "a", "pair": [1.0]}]}, r"it.many\[0\].pair is \[1.0\]"),
    ({"left_out": 3}, "it.left_out is 3"),
])  # fmt: skip
def test_the_first_place_that_holds_something_else_is_named(change, words):
    with pytest.raises(FitError, match=words):
        read(Outer, plain(FULL) | change, "it")
