"""Which added run would tell two readings of a study apart: where their predictions differ most, against the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.errors import FitError
from fitting.estimation.calibration import Fitted
from fitting.estimation.noise import Noise
from fitting.studies.arms import Arms
from fitting.studies.widths import Widths


@dataclass(frozen=True)
class ExtraRun:
    """One added run: of which arm and where, how far apart the two readings put its loss (nats), and how many standard
    deviations (`separation`) of noise and of the first reading's own prediction that is."""

    arm: str
    r: float
    d_model: float
    budget: float
    tokens: float
    difference: float
    separation: float


def check_further(more_budgets: Sequence[float], more_widths: Sequence[float]) -> None:
    """Raise `FitError` unless the further budgets and widths at which to try runs are positive."""
    for name, values in (("budget", more_budgets), ("width", more_widths)):
        if not all(np.isfinite(v) and v > 0 for v in values):
            raise FitError(f"A further {name} must be positive, not {', '.join(f'{v:g}' for v in values)}")


def extra_runs(
    arms: Arms,
    first: Fitted,
    second: Fitted,
    noise: Noise,
    more_budgets: Sequence[float] = (),
    more_widths: Sequence[float] = (),
) -> tuple[ExtraRun, ...]:
    """Runs of either arm that the two fits predict most differently, the best first.

    They are tried at every r > 1, width and budget of the arm's runs and at the further ones given, where tokens per
    parameter stay within the range of the runs.
    """
    runs, found = arms.runs, []
    slope = first.law.log_loss_and_gradient(first.theta[None], arms.x)[1][0]
    scale = np.linalg.norm(slope, axis=1)
    inverse = np.linalg.pinv(
        (slope / scale[:, None]) @ (slope / scale[:, None]).T, rcond=1e-14, hermitian=True
    )
    ratio = runs.tokens / runs.n_total
    budgets = np.union1d(runs.budget, more_budgets)
    for arm, side in enumerate(("baseline", "study")):
        own = runs.take((runs.r > 1) & (arms.x.study == arm))
        for r in own.recurrences:
            try:
                widths = Widths.of(own, first.law, float(r))
            except FitError:
                continue
            tried = np.union1d(widths.sampled, more_widths)
            for budget in budgets:
                x = widths.inputs(tried, float(budget))
                x = replace(x, study=np.full(len(tried), float(arm)))
                losses, slopes = first.law.log_loss_and_gradient(first.theta[None], x)
                apart = second.law.log_loss_and_gradient(second.theta[None], x)[0][0] - losses[0]
                there = slopes[0] / scale[:, None]
                spread = np.hypot(noise.run, noise.cell) * np.sqrt(
                    1 + np.einsum("pk,pq,qk->k", there, inverse, there)
                )
                share = x.tokens / x.n_total
                for k in np.flatnonzero((ratio.min() <= share) & (share <= ratio.max())):
                    where = float(r), float(tried[k]), float(budget), float(x.tokens[k])
                    nats = float(np.exp(losses[0][k]) * np.expm1(apart[k]))
                    found.append(ExtraRun(side, *where, nats, float(abs(apart[k]) / spread[k])))
    return tuple(sorted(found, key=lambda run: -run.separation))
