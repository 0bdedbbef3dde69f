"""Frozen results as plain JSON types, and back: the one place that knows how a result becomes JSON."""

from __future__ import annotations

import math
from dataclasses import MISSING, field, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fitting.errors import FitError

T = TypeVar("T")
_LEFT_OUT = "left out of JSON where it is None"


def optional() -> Any:
    """A field of a dataclass that may be None and then has no key in JSON."""
    return field(default=None, metadata={_LEFT_OUT: True})


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, and numbers that are not finite as null."""
    if is_dataclass(value):
        items = [(f, getattr(value, f.name)) for f in fields(value)]
        return {f.name: plain(item) for f, item in items if item is not None or _LEFT_OUT not in f.metadata}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(kind: type[T], value: Any, where: str = "the file") -> T:
    """A `kind` from what `plain` made of it; unknown keys are ignored.

    Raises `FitError` naming the first place, as seen from `where`, that holds something else.
    """
    return _read(kind, value, where)


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and kind is NoneType):
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        problems = []
        for part in parts:
            try:
                return _read(part, value, where)
            except FitError as error:
                problems.append(error)
        raise problems[0]
    if origin is tuple and isinstance(value, list):
        each = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        if len(each) == len(value):
            pairs = zip(each, value, strict=True)
            return tuple(_read(part, item, f"{where}[{i}]") for i, (part, item) in enumerate(pairs))
    elif origin is dict and isinstance(value, dict):
        return {key: _read(parts[1], item, f"{where}.{key}") for key, item in value.items()}
    elif isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        types, required = _fields_of(kind)
        missing = [name for name in required if name not in value]
        if missing:
            raise FitError(f"{where} has no {missing[0]!r}")
        known = {name: part for name, part in types.items() if name in value}
        return kind(**{name: _read(part, value[name], f"{where}.{name}") for name, part in known.items()})
    elif kind is float and value is None:
        return math.nan
    elif kind in (int, float, str, bool) and isinstance(value, int | float if kind is float else kind):
        if kind is bool or not isinstance(value, bool):
            return value
    raise FitError(f"{where} is {value!r:.60}, which is not of type {getattr(kind, '__name__', kind)}")


@lru_cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Types of a dataclass's fields by name, and the names of those that have no default."""
    hints, own = get_type_hints(kind), fields(kind)
    required = [f.name for f in own if f.default is MISSING and f.default_factory is MISSING]
    return {f.name: hints[f.name] for f in own}, required
