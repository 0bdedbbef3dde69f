"""Writes README.md here from README.md.in, with numbers from the reports and records beside it.

A field of the template is Python's own: `{fit[fit][parameters][phi]:.2f}` is a value of nano_report/fit.json. Tables of
losses are made from the records. With --check nothing is written, and the exit status is 1 if README.md says otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTHS = (8, 16, 32, 48, 64)
RATES = (0.005, 0.007, 0.01, 0.014, 0.02, 0.028, 0.04, 0.056)


def read(path: Path) -> dict[str, Any]:
    """The content of a JSON file."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def losses(*folders: str) -> dict[tuple[float, int, int, float], float]:
    """(FLOPs, width, r, base rate of the matrices) -> validation loss, of every record in these folders."""
    found = {}
    for folder in folders:
        for path in sorted((HERE / folder).glob("*.run.json")):
            record = read(path)
            rate = record["components"]["transfer"]["init_args"]["matrix"]
            key = record["flops_budget"], record["d_model"], record["num_recurrences"], rate
            found[key] = record["val_loss"]
    return found


def row(head: Iterable[str], cells: list[float | None], tail: Iterable[str] = ()) -> str:
    """A line of a Markdown table with the lowest loss in bold."""
    best = min(cell for cell in cells if cell is not None)
    shown = ("" if cell is None else f"**{cell:.3f}**" if cell == best else f"{cell:.3f}" for cell in cells)
    return f"| {' | '.join([*head, *shown, *tail])} |"


def flops(value: float) -> str:
    """FLOPs as the page writes them: 4e11."""
    return f"{value:g}".replace("+", "")


def by_width(folder: str, recurrences: Iterable[int], minima: Iterable[dict[str, Any]] = ()) -> str:
    """Lines of budget and r, and columns of width; with `minima`, also where a parabola has its minimum."""
    found = {key[:3]: loss for key, loss in losses(folder).items()}
    at = {(m["budget"], m["r"]): [f"d = {m['parabola']['d_model']:.0f}"] for m in minima}
    lines = []
    for budget in sorted({key[0] for key in found}):
        for r in recurrences:
            cells = [found.get((budget, d, r)) for d in WIDTHS]
            lines.append(row([flops(budget), str(r)], cells, at.get((budget, r), ())))
    return "\n".join(lines)


def by_rate() -> str:
    """Lines of budget, width and r, as the sweep of rates has them, and columns of the base rate."""
    found = losses("nano_iso_depth", "nano_lr_sweep")
    lines = sorted({key[:3] for key in losses("nano_lr_sweep")})
    return "\n".join(
        row([flops(line[0]), str(line[1]), str(line[2])], [found.get((*line, rate)) for rate in RATES])
        for line in lines
    )


def interval(intervals: list[dict[str, Any]]) -> dict[str, Any]:
    """The recommended one of some intervals."""
    return next(one for one in intervals if one["recommended"])


def interval_row(found: dict[str, Any], value: float) -> str:
    """A line with one interval, and whether it holds a value."""
    low, high = found["low"], found["high"]
    where = "inside" if low <= value <= high else "outside"
    return f"| {found['method']} | [{low:.2f}, {high:.2f}] | {where} |"


def page() -> str:
    """The text of README.md."""
    fit = read(HERE / "nano_report" / "fit.json")
    delta = read(HERE / "nano_delta_report" / "comparison.json")
    estimates = {e["method"]: {**e, "interval": interval(e["intervals"])} for e in delta["estimates"]}
    return (HERE / "README.md.in").read_text(encoding="utf-8").format(
        fit=fit,
        phi=interval(fit["fit"]["intervals"]["phi"]),
        intervals="\n".join(map(interval_row, fit["fit"]["intervals"]["phi"], [fit["published"]["phi"]] * 4)),
        delta=delta,
        both=next(reading for reading in delta["readings"] if reading["name"] == "both"),
        drift=next(law for law in fit["laws"] if "slope·log(C" in law["law"]),
        shortest=read(HERE / "nano_iso_depth" / "r8-flops=4e11-size=1-068e17d3.run.json"),
        linear_losses=by_width("nano_iso_depth", (1, 2, 4, 8), fit["minima"]),
        lanes_losses=by_width("nano_hyperconnections", (2, 4, 8)),
        rate_losses=by_rate(),
        **estimates,
    )  # fmt: skip


if __name__ == "__main__":
    readme = HERE / "README.md"
    if "--check" not in sys.argv[1:]:
        readme.write_text(page(), encoding="utf-8")
    elif readme.read_text(encoding="utf-8") != page():
        sys.exit(f"{readme} is not what README.md.in gives. Write it again: python {Path(__file__).name}")
