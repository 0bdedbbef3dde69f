"""What a fitted joint law says about a budget: size, tokens, loss and the best r, with prediction intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fitting.data.runs import Runs
from fitting.errors import FitError
from fitting.estimation.diagnostics import Scatter, no_cell_with_two_runs, scatter
from fitting.estimation.resampling import Resampled, resample
from fitting.estimation.results import FitResult
from fitting.laws import AdditiveLaw, JointLaw, OneTokenLaw
from fitting.studies.allocation import law_optimum
from fitting.studies.widths import Widths

FORWARD_SHARE = 1 / 3
"""Forward FLOPs over training FLOPs when every recurrence keeps gradients (2N forward, 4N backward)."""


@dataclass(frozen=True)
class Prediction:
    """The compute-optimal model of one r at a budget, under an inference cap if there is one."""

    r: float
    d_model: float
    n: float
    tokens: float
    loss: float
    low: float
    high: float
    forward_flops: float | None
    note: str


@dataclass(frozen=True)
class Equivalent:
    """A model of the given width: its unique parameters, and the size of the r=1 model that the law puts equal."""

    r: float
    d_model: float
    unique: float
    effective: float
    note: str = ""


@dataclass(frozen=True, eq=False)
class Forecast:
    """Predictions per r for one budget. `best` is the r with the lowest predicted loss, None if none is allowed."""

    budget: float
    inference_cap: float | None
    split: str
    predictions: tuple[Prediction, ...]
    refused: tuple[tuple[float, str], ...]
    best: float | None


def forecast(
    runs: Runs, result: FitResult, budget: float, drawn: Resampled, inference_cap: float | None = None
) -> Forecast:
    """Predict loss and best r for `budget` training FLOPs, with forward FLOPs per token at most `inference_cap`.

    Intervals add the spread of the bootstrap, widened by sqrt(G/(G-p)), to the scatter of runs and cells.
    Raises `FitError` for a budget that is not a positive number, or a law without tokens.
    """
    if not (np.isfinite(budget) and budget > 0):
        raise FitError(f"The budget is {budget} FLOPs. Give a positive number")
    if isinstance(result.law, OneTokenLaw):
        raise FitError(
            "Runs of one token count do not say what tokens are worth. Fit runs of several, by the joint law"
        )
    together = no_cell_with_two_runs(runs.cell)
    if together:
        # The whole scatter, which is what a new run has, is still known.
        freedom = len(runs) - len(result.theta)
        spread = Scatter(float(np.sqrt((result.log_residuals**2).sum() / freedom)), 0.0, float("nan"))
    else:
        spread = scatter(result.log_residuals, runs.cell, len(result.theta))
    blocks = runs.cell_count
    stretch = blocks / (blocks - len(result.theta))
    found, refused = [], []
    low_budget, high_budget = runs.budget.min(), runs.budget.max()
    for r in runs.recurrences:
        try:
            widths = Widths.of(runs, result.law, float(r))
            cap = None if inference_cap is None else _size_under_cap(runs, widths, inference_cap)
        except FitError as error:
            refused.append((float(r), str(error)))
            continue
        best = law_optimum(result.law, result.theta, widths, budget, cap)
        assert best.n is not None and best.tokens is not None and best.loss is not None
        width = widths.width_of(best.n)
        x = widths.inputs(np.array([width]), budget)
        logs = result.law.log_loss_and_gradient(drawn.theta, x)[0][:, 0]
        deviation = float(np.sqrt(stretch * logs.var() + spread.run**2 + spread.cell**2))
        notes = [note for note in (best.refusal, together) if note]
        if not low_budget <= budget <= high_budget:
            notes.append(f"extrapolates from budgets of {low_budget:.3g} to {high_budget:.3g}")
        full = (runs.bptt[runs.r == r] == "full").all() or (runs.bptt[runs.r == r] == "FullBPTT").all()
        forward = float(widths.flops(np.array([width]))[0]) * FORWARD_SHARE if full else None
        low, high = (best.loss * float(np.exp(sign * 1.96 * deviation)) for sign in (-1, 1))
        numbers = width, best.n, best.tokens, best.loss, low, high, forward
        found.append(Prediction(float(r), *numbers, "; ".join(notes)))
    lowest = min(found, key=lambda prediction: prediction.loss, default=None)
    best_r = None if lowest is None else lowest.r
    split = result.law.split.name
    return Forecast(budget, inference_cap, split, tuple(found), tuple(refused), best_r)


def _size_under_cap(runs: Runs, widths: Widths, cap: float) -> float:
    """The largest N whose forward FLOPs per token stay under `cap`. Raises `FitError` where there is none."""
    labels = set(runs.bptt[runs.r == widths.r].tolist())
    if not labels <= {"full", "FullBPTT"}:
        shown = ", ".join(labels)
        raise FitError(
            f"forward FLOPs are a third of the training FLOPs only with full gradients, not with {shown}"
        )
    grid = np.geomspace(widths.sampled[0] / 8, widths.sampled[-1] * 8, 4000)
    allowed = widths.flops(grid) * FORWARD_SHARE <= cap
    if not allowed.any():
        raise FitError(f"even the smallest model has more than {cap:.3g} forward FLOPs per token")
    return float(widths.n_total(grid[allowed][-1:])[0])


def equivalents(runs: Runs, result: FitResult, n_at_r1: float) -> list[Equivalent]:
    """For every r, the model as wide as the r=1 model with `n_at_r1` parameters: its unique and effective size.

    Raises `FitError` for sizes out of reach; those outside the sampled widths are flagged.
    """
    if not (np.isfinite(n_at_r1) and n_at_r1 > 0):
        raise FitError(f"The r=1 model has {n_at_r1} parameters. Give a positive number")
    if not isinstance(result.law, JointLaw | AdditiveLaw):
        raise FitError(f"The law {result.law.name} has no effective size")
    width = Widths.of(runs, result.law, 1.0).width_of(n_at_r1)
    rows = []
    for r in runs.recurrences:
        widths = Widths.of(runs, result.law, float(r))
        x = widths.inputs(np.array([width]), 1.0)
        effective = float(
            np.exp(result.law.effective_size(result.theta[None, result.law.first_psi :], x)[0][0, 0])
        )
        low, high = widths.sampled[[0, -1]]
        outside = not low * (1 - 1e-3) <= width <= high * (1 + 1e-3)
        note = f"outside the sampled widths {low:g} to {high:g}" if outside else ""
        rows.append(Equivalent(float(r), width, float(x.n_total[0]), effective, note))
    return rows


def draw(runs: Runs, result: FitResult, resamples: int, seed: int, workers: int | None = None) -> Resampled:
    """Bootstrap refits over cells, for `forecast`."""
    x = result.law.inputs(runs)
    return resample(result, x, np.log(runs.val_loss), runs.cell, resamples, seed, workers)
