"""How far a fitted phi lies from the paper's: from the published one, and from its runs under the same split."""

from __future__ import annotations

from typing import Any

from fitting.errors import FitError
from fitting.estimation.fits import fit
from fitting.estimation.results import FitResult
from fitting.laws.laws import JointLaw
from fitting.published import load_grid, reference

_SPLIT = "regressed"
"""The split behind the published phi."""
_STARTS = 100


def distance(result: FitResult, seed: int = 0, workers: int | None = None) -> dict[str, Any]:
    """The published phi with its interval, a fit of the paper's runs under the split of `result`, and the differences
    of phi to both, as plain JSON types. `inside_interval` says whether the recommended interval of `result` holds the
    other value, None where there is no interval.
    """
    published = reference()
    phi = float(published["joint"]["all runs"]["phi"])
    split = result.law.split
    refit: dict[str, Any] = {"split": split.name}
    try:
        grid = load_grid()
        other = fit(grid, JointLaw(split=split), starts=_STARTS, seed=seed, workers=workers)
        refit |= {
            "phi": other["phi"],
            "runs": len(grid),
            "status": other.status.value,
            "message": other.message,
            "difference": result["phi"] - other["phi"],
            "inside_interval": _inside(result, other["phi"]),
        }
    except FitError as error:
        refit |= {"status": "undefined", "message": str(error)}
    return {
        "phi": phi,
        "split": _SPLIT,
        "interval": list(published["bootstrap"][_SPLIT]),
        "source": published["source"],
        "difference": result["phi"] - phi,
        "inside_interval": _inside(result, phi),
        "refit": refit,
    }


def _inside(result: FitResult, phi: float) -> bool | None:
    best = result.recommended("phi")
    return None if best is None else best.low <= phi <= best.high
