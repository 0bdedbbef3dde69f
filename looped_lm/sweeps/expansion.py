"""From a sweep file to its runs: the product of the axes, and rules."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

from looped_lm.common.errors import UserError
from looped_lm.sweeps.files import BY, CONFIG, Shared, SweepFile, config_path, load, refuse_unknown, same
from looped_lm.sweeps.runs import Run, told

_COMPARISON = re.compile(r"(<=|>=|!=|<|>)\s*(\S+)")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


def expand(sweep: SweepFile) -> list[Run]:
    """The runs of a sweep, in the order of its axes, the last one running fastest.

    Raises:
        UserError: a mistake in an axis, a rule or a config; a run that `fit` would refuse; or two runs that
            are the same.
    """
    runs = _expanded(sweep)
    seen: dict[str, Run] = {}
    for run in runs:
        if seen.setdefault(run.hash, run) is not run:
            raise UserError(f"{sweep.path}: the same run is in it twice: {run.id} ({told(run.axes)}).")
    return runs


def _expanded(sweep: SweepFile) -> list[Run]:
    """The runs of a sweep, which are not compared, since that takes parsing each."""
    points: list[dict[str, Any]] = [{}]
    for key in _order(sweep):
        values = sweep.grid[key]
        if _depends(values):
            there = [point[values[BY]] for point in points]
            idle = [str(v) for v in values if v != BY and not any(same(v, value) for value in there)]
            if idle:
                where = f"{sweep.path}: {key} has values for {values[BY]} = {', '.join(idle)}"
                raise UserError(f"{where}, which that axis does not take.")
        points = [{**point, key: value} for point in points for value in _values(sweep, key, point)]
    points = [{key: point[key] for key in sweep.grid} for point in points]
    named_by = []
    for key, values in sweep.grid.items():
        given = values.values() if _depends(values) else [values]
        if key != CONFIG and any(isinstance(value, list) for value in given):
            named_by.append(key)
    runs = []
    for point in _kept(points, sweep.keys, sweep, str(sweep.path)):
        own = [str(point[CONFIG])] if CONFIG in point else []
        paths = tuple(config_path(name, sweep.path) for name in [*own, *sweep.configs])
        keys = {**sweep.keys, **{key: value for key, value in point.items() if key != CONFIG}}
        runs.append(Run(sweep.name, paths, keys, point, tuple(named_by)))
    return runs


def shared_runs(sweep: SweepFile) -> list[Run]:
    """Runs of other sweeps that the results of this one need.

    Raises:
        UserError: a rule that no run meets, or a mistake that `expand` refuses.
    """
    shared = []
    for entry in sweep.shared:
        other = load(entry.sweep)
        runs = _expanded(other)
        where = f"{sweep.path}, shared of {other.name}"
        kept = _kept([run.axes for run in runs], other.keys, entry, where)
        shared += [run for run in runs if any(run.axes is axes for axes in kept)]
    return shared


def _order(sweep: SweepFile) -> list[str]:
    """The axes, those first that others depend on."""
    order: list[str] = []
    for key in sweep.grid:
        chain = [key]
        while _depends(values := sweep.grid[chain[-1]]):
            refuse_unknown([values[BY]], sweep.grid, f"{sweep.path}, {chain[-1]}: by")
            if values[BY] in chain:
                raise UserError(f"{sweep.path}: the axes {', '.join(chain)} depend on each other.")
            chain.append(values[BY])
        order += [axis for axis in reversed(chain) if axis not in order]
    return order


def _depends(values: Any) -> bool:
    return isinstance(values, dict) and BY in values


def _values(sweep: SweepFile, key: str, point: dict[str, Any]) -> list[Any]:
    values = sweep.grid[key]
    if _depends(values):
        now = point[values[BY]]
        found = [given for value, given in values.items() if value != BY and same(value, now)]
        if not found:
            where = f"{sweep.path}: {key} has no values for {values[BY]} = {now}"
            raise UserError(f"{where}; give some, or leave that out with skip.")
        values = found[0]
    values = values if isinstance(values, list) else [values]
    if not values:
        raise UserError(f"{sweep.path}: {key} has an empty list of values.")
    for i, value in enumerate(values):
        if any(same(value, other) for other in values[:i]):
            raise UserError(f"{sweep.path}: {key} has the value {value} twice.")
    return values


def _kept(
    points: list[dict[str, Any]], keys: dict[str, Any], rules: SweepFile | Shared, where: str
) -> list[dict[str, Any]]:
    """The points that meet a rule of `only`, if there are any, and none of `skip`."""

    def meets(point: dict[str, Any], rule: dict[str, Any]) -> bool:
        values = {**keys, **point}
        return all(_matches(values[key], wanted) for key, wanted in rule.items())

    for kind, given in (("only", rules.only), ("skip", rules.skip)):
        for rule in given:
            refuse_unknown(rule, {**keys, **points[0]}, f"{where}, {kind}")
            if not any(meets(point, rule) for point in points):
                raise UserError(f"{where}: no run meets the rule {kind} {told(rule)}.")
    kept = points
    if rules.only:
        kept = [p for p in points if any(meets(p, rule) for rule in rules.only)]
    kept = [p for p in kept if not any(meets(p, rule) for rule in rules.skip)]
    if not kept:
        raise UserError(f"{where}: the rules leave no run.")
    return kept


def _matches(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_matches(value, one) for one in wanted)
    comparison = _COMPARISON.fullmatch(wanted) if isinstance(wanted, str) else None
    if comparison is None:
        return same(value, wanted)
    try:
        return _OPERATORS[comparison.group(1)](float(value), float(comparison.group(2)))
    except (TypeError, ValueError):
        raise UserError(f"The rule {wanted!r} compares numbers, and {value!r} is not one.") from None
