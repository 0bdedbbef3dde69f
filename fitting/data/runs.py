"""The table of runs that fits read: columns of shape (n,), and the cells that resampling draws."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fitting.data.comparable import SAME, differences
from fitting.errors import FitError

COUNT_TOLERANCE = 1e-4
"""Parameter counts this close (relative) to those of a layout belong to it; the norms may differ."""
COUNTS = ("total", "active", "with-embedding")
"""What N counts: all parameters but embedding and head, those of them that one token uses, or all."""
CELLS_BY_BUDGET = "budget"
FEWEST_CELLS = 8
"""Cells that a grouping other than by budget needs: fewer carry no bootstrap of a law."""
CELL_TOLERANCE = 0.02
"""Runs without a nominal budget share a cell when their FLOPs differ by less than this fraction."""


@dataclass(frozen=True)
class Exclusion:
    """A run that was read but is not fitted, with the rule that took it out."""

    source: str
    rule: str


@dataclass(frozen=True, eq=False)
class Runs:
    """n finished training runs. FLOPs are training FLOPs in one convention, losses nats per token.

    `n_rec` counts the block and its injection (or lanes), `n_injection` the injection (or lanes) alone.
    """

    source: np.ndarray
    r: np.ndarray
    d_model: np.ndarray
    prelude_layers: np.ndarray
    recurrent_layers: np.ndarray
    coda_layers: np.ndarray
    n_once: np.ndarray
    n_rec: np.ndarray
    n_injection: np.ndarray
    n_once_active: np.ndarray
    n_rec_active: np.ndarray
    """Of `n_once` and `n_rec`, what one token uses: fewer in mixtures of experts."""
    n_embedding: np.ndarray
    """Parameters of embedding and head; NaN where a table does not say."""
    flops_per_token: np.ndarray
    tokens: np.ndarray
    val_loss: np.ndarray
    flops_budget: np.ndarray
    """Nominal training FLOPs; NaN where the run had none."""
    injection: np.ndarray
    bptt: np.ndarray
    seed: np.ndarray
    flops_convention: str
    excluded: tuple[Exclusion, ...] = ()
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    """Further columns of a CSV file, usable in rules only."""
    may_differ: bool = False
    """Whether it was allowed that their losses do not compare."""
    mixed: tuple[str, ...] = ()
    """How the runs differ in what should be the same for all, where that was allowed."""

    def __len__(self) -> int:
        return len(self.r)

    def __repr__(self) -> str:
        if not len(self):
            return "Runs(none)"
        return (
            f"Runs({len(self)} runs, r = {', '.join(f'{r:g}' for r in self.recurrences)}, "
            f"{len(set(self.budget))} budgets from {self.budget.min():.3g} to {self.budget.max():.3g} FLOPs, "
            f"{self.cell_count} cells, convention {self.flops_convention}, {len(self.excluded)} excluded)"
        )

    @cached_property
    def training_flops(self) -> np.ndarray:
        """C = F·D from logged F and D, never the approximation 6·N·D."""
        return np.asarray(self.flops_per_token * self.tokens)

    @cached_property
    def n_total(self) -> np.ndarray:
        """N = N_once + N_rec: unique parameters without embedding and head."""
        return np.asarray(self.n_once + self.n_rec)

    @cached_property
    def recurrences(self) -> np.ndarray:
        """The distinct r, ascending."""
        return np.unique(self.r)

    @cached_property
    def n_at_r1(self) -> np.ndarray:
        """N of the r=1 model of the same width and effective depth, taken from an r=1 run of the table if there is one.

        Otherwise the block is unrolled and the injection left out: (prelude + r·recurrent + coda) layers of 12d² + 2d
        and three norms of d; NaN for unknown layers.
        """
        depth = self.prelude_layers + self.r * self.recurrent_layers + self.coda_layers
        unrolled = depth * (12 * self.d_model**2 + 2 * self.d_model) + 3 * self.d_model
        for d in np.unique(self.d_model):
            alone = (self.r == 1) & (self.d_model == d)
            if alone.any():
                same = (depth == depth[alone][0]) | np.isnan(depth) | np.isnan(depth[alone][0])
                unrolled = np.where((self.d_model == d) & same, self.n_total[alone][0], unrolled)
        return np.asarray(unrolled, dtype=float)

    @cached_property
    def budget(self) -> np.ndarray:
        """The nominal budget; where it is missing, the geometric mean of the C that are within 2% of each other."""
        budget = self.flops_budget.copy()
        bare = np.flatnonzero(np.isnan(budget))
        order = bare[np.argsort(self.training_flops[bare], kind="stable")]
        start = 0
        for stop in range(1, len(order) + 1):
            first = self.training_flops[order[start]]
            if stop == len(order) or self.training_flops[order[stop]] > first * (1 + CELL_TOLERANCE):
                members = order[start:stop]
                budget[members] = np.exp(np.log(self.training_flops[members]).mean())
                start = stop
        return budget

    @cached_property
    def architecture(self) -> np.ndarray:
        """A label per run: recurrences, injection (with lanes) and gradients."""
        parts = zip(self.r, self.injection, self.bptt, strict=True)
        return np.array([f"r={r:g}, {injection}, {bptt}" for r, injection, bptt in parts], dtype=object)

    @cached_property
    def _cells(self) -> tuple[str, np.ndarray]:
        """What makes a cell, and the index of the cell of each run, in order of first appearance.

        Runs of one budget and architecture share one. Where budgets are not given and most runs would be alone in
        theirs, groups are those of equal tokens, of budgets within a factor of two, or single runs, whichever comes
        first and leaves at least `FEWEST_CELLS` and at most half as many cells as runs.
        """
        decades = np.floor(np.log2(self.training_flops / self.training_flops.min()) + 1e-9)
        tokens = np.round(np.log(self.tokens) / CELL_TOLERANCE)
        several = len(np.unique(tokens)) > 1
        groups = {CELLS_BY_BUDGET: self.budget, "tokens": tokens, "budget within a factor of two": decades}
        for by, group in groups.items():
            keys = list(zip(group.tolist(), self.architecture.tolist(), strict=True))
            index = {key: number for number, key in enumerate(dict.fromkeys(keys))}
            given = by == CELLS_BY_BUDGET and not np.isnan(self.flops_budget).all()
            if by == CELLS_BY_BUDGET:
                enough = given or len(index) <= len(self) / 2
            else:
                enough = FEWEST_CELLS <= len(index) <= len(self) / 2 and (by != "tokens" or several)
            if enough:
                return by, np.array([index[key] for key in keys], dtype=int)
        return "run", np.arange(len(self))

    @property
    def cell(self) -> np.ndarray:
        """Index of the cell of each run; `cells_by` says what makes one."""
        return self._cells[1]

    @property
    def cells_by(self) -> str:
        """What the runs of a cell share besides their architecture."""
        return self._cells[0]

    @property
    def cell_count(self) -> int:
        """G, the number of non-empty cells."""
        return int(self.cell.max()) + 1 if len(self) else 0

    def take(self, chosen: np.ndarray, excluded: Sequence[Exclusion] = ()) -> Runs:
        """The runs at `chosen` (mask or indices); `excluded` is added to the list of exclusions."""
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in COLUMNS}
        extra = {name: column[chosen] for name, column in self.extra.items()}
        return dataclasses.replace(self, **columns, extra=extra, excluded=(*self.excluded, *excluded))

    def with_loss(self, val_loss: np.ndarray) -> Runs:
        """The same runs with other losses (n,), for simulations."""
        return dataclasses.replace(self, val_loss=np.asarray(val_loss, dtype=float))

    def renamed(self, name: Callable[[str], str]) -> Runs:
        """The same runs with their sources renamed, and those of the exclusions as well."""
        gone = tuple(dataclasses.replace(g, source=name(g.source)) for g in self.excluded)
        source = np.array([name(str(source)) for source in self.source], dtype=object)
        return dataclasses.replace(self, source=source, excluded=gone)

    @property
    def unused_columns(self) -> tuple[str, ...]:
        """Columns of tables that no computation reads; rules may."""
        return tuple(name for name in self.extra if name not in (*SAME, "run_name", "run"))

    @property
    def mixtures(self) -> bool:
        """Whether N depends on what is counted: some run has parameters that a token does not use."""
        return bool((self.n_once_active < self.n_once).any() or (self.n_rec_active < self.n_rec).any())

    def counting(self, count: str) -> Runs:
        """The same runs with N the `total` parameters (as they are read), the `active` ones, or all `with-embedding`.

        Embedding and head are used once. Raises `FitError`.
        """
        if count not in COUNTS:
            raise FitError(f"--count is {count!r}. Use one of: {', '.join(COUNTS)}")
        if count == "total":
            return self
        if count == "active":
            return dataclasses.replace(self, n_once=self.n_once_active, n_rec=self.n_rec_active)
        unknown = self.source[np.isnan(self.n_embedding)]
        if len(unknown):
            raise FitError(
                f"{unknown[0]} does not say how many parameters embedding and head have. Give the column n_embedding, "
                "or leave --count with-embedding out"
            )
        return dataclasses.replace(self, n_once=self.n_once + self.n_embedding)

    def where(self, *rules: str) -> Runs:
        """Keep the runs that satisfy every rule, e.g. `where("r>1", "budget<=2.15e18")`. Raises `FitError`."""
        return self._filtered(rules, keep=True)

    def exclude(self, *rules: str) -> Runs:
        """Leave out the runs that satisfy any rule, e.g. `exclude("quality=inferred")`. Raises `FitError`."""
        return self._filtered(rules, keep=False)

    def _filtered(self, rules: Sequence[str], keep: bool) -> Runs:
        kept = self
        for rule in rules:
            chosen = kept._matches(rule) == keep
            word = f"not where {rule}" if keep else f"excluded by {rule}"
            kept = kept.take(chosen, [Exclusion(str(source), word) for source in kept.source[~chosen]])
        return kept

    def _matches(self, rule: str) -> np.ndarray:
        parsed = re.fullmatch(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>)\s*(.+?)\s*", rule)
        columns = {name: getattr(self, name) for name in _RULE_COLUMNS} | self.extra
        if parsed is None or parsed[1] not in columns:
            raise FitError(
                f"The rule {rule!r} cannot be read: write COLUMN, one of = != < <= > >=, VALUE. "
                f"Columns: {', '.join(columns)}"
            )
        column, sign, text = columns[parsed[1]], _SIGNS[parsed[2]], parsed[3]
        if column.dtype != object:
            try:
                return np.asarray(sign(column, float(text)))
            except ValueError:
                raise FitError(f"The rule {rule!r} compares a number with {text!r}. Give a number") from None
        if sign not in (operator.eq, operator.ne):
            raise FitError(f"The rule {rule!r} orders text. Use = or != for the column {parsed[1]}")
        if parsed[1] == "source":
            # Files may be elsewhere next time, so the end of a path is enough.
            same = [str(value) == text or str(value).endswith(f"/{text}") for value in column]
            return np.array(same, dtype=bool) == (sign is operator.eq)
        return np.array([sign(str(value), text) for value in column], dtype=bool)


COLUMNS = tuple(f.name for f in dataclasses.fields(Runs) if f.type == "np.ndarray")
"""Names of the columns that every table has."""
_RULE_COLUMNS = (
    "source", "r", "d_model", "flops_per_token", "tokens", "val_loss", "budget", "injection", "bptt", "seed",
    "n_once", "n_rec", "training_flops", "architecture",
)  # fmt: skip
_SIGNS: dict[str, Callable] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def concatenate(first: Runs, second: Runs) -> Runs:
    """Both tables, one under the other.

    Raises `FitError` if their FLOPs conventions differ, or what makes their losses compare and was not allowed to.
    """
    if first.flops_convention != second.flops_convention:
        raise FitError(
            f"One table counts FLOPs in the convention {first.flops_convention}, the other in "
            f"{second.flops_convention}. Fit runs of one convention only"
        )
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in COLUMNS
    }
    shared = first.extra.keys() & second.extra.keys()
    extra = {name: np.concatenate([first.extra[name], second.extra[name]]) for name in sorted(shared)}
    differing = differences(extra, columns["source"])
    allowed = first.may_differ or second.may_differ
    if differing and not allowed:
        name, what, _ = differing[0]
        raise FitError(
            f"{name} {what}. Give runs of one {name} only, or --allow-mixed, which marks the result"
        )
    told = tuple(f"{name} {what}" for name, what, _ in differing)
    excluded = (*first.excluded, *second.excluded)
    return dataclasses.replace(
        first, **columns, extra=extra, excluded=excluded, may_differ=allowed, mixed=told
    )
