"""The paper's main grid and its published fit values, as data. README.md in this folder says where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fitting.data.loading import load_runs
from fitting.data.runs import Runs

GRID = Path(__file__).with_name("iso_depth_grid.csv")


def load_grid() -> Runs:
    """The 116 runs of the paper's iso-depth grid (linear injection, full BPTT)."""
    return load_runs(GRID)


def reference() -> dict[str, Any]:
    """The paper's published values, to print beside a fit of the grid."""
    return json.loads(GRID.with_name("reference.json").read_text(encoding="utf-8"))
