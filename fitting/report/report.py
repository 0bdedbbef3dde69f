"""A report folder: the numbers as JSON, report.md, report.html and the figures. Every number is the analysis's."""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from fitting.errors import FitError
from fitting.estimation.results import FitResult
from fitting.records import write_bytes_atomically, write_text_atomically
from fitting.report.comparison_sections import comparison_sections
from fitting.report.document import Section
from fitting.report.matching_sections import matching_sections
from fitting.report.sections import fit_sections, sections
from fitting.report.study_sections import forecast_sections, plan_sections
from fitting.studies.analysis import Analysis
from fitting.studies.comparison import Comparison
from fitting.studies.matching import Matching
from fitting.studies.planner import Plan
from fitting.studies.prediction import Forecast

_TEMPLATE = Path(__file__).with_name("report_page.html")
FIGURES = "## Figures"
Reported = Analysis | Comparison
_SECTIONS: dict[type, Callable[[Any], list[Section]]] = {
    Analysis: sections,
    Comparison: comparison_sections,
    FitResult: fit_sections,
    Matching: matching_sections,
    Plan: plan_sections,
    Forecast: forecast_sections,
}


KINDS: dict[str, type[Reported]] = {"fit": Analysis, "comparison": Comparison}
"""What a report can hold, by the `kind` in its JSON; KIND.json holds the numbers."""


def sections_of(result: Reported | FitResult | Matching | Plan | Forecast) -> list[Section]:
    """What a result says."""
    return _SECTIONS[type(result)](result)


def text(result: Reported | FitResult | Matching | Plan | Forecast) -> str:
    """What a result says, as text for a terminal."""
    return "\n\n".join(section.text() for section in sections_of(result))


def check_folder(folder: Path, overwrite: bool, kind: str = "fit") -> None:
    """Refuse, before any work, a folder whose report would be replaced. Raises `FitError`."""
    if folder.is_file():
        raise FitError(f"--report {folder} is a file. Name a folder")
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        reason = f"{there} is not a folder that you can write to"
        raise FitError(f"--report {folder} cannot be written: {reason}. Name another")
    for other in KINDS:
        if other != kind and (folder / f"{other}.json").exists():
            raise FitError(f"{folder} holds a report of another kind ({other}.json). Name another folder")
    taken = [name for name in (f"{kind}.json", "report.md", "report.html") if (folder / name).exists()]
    if taken and not overwrite:
        there_already = f"already holds a report ({', '.join(taken)})"
        raise FitError(f"{folder} {there_already}. Name another folder or add --overwrite")


def write_report(
    result: Reported, folder: Path, progress: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Write everything into `folder` (made if missing), each file atomically. Returns the paths."""
    progress("drawing figures")
    # Only these modules load matplotlib.
    plots = "plots" if isinstance(result, Analysis) else "comparison_plots"
    drawn = import_module(f"fitting.report.{plots}").figures(result)
    numbers = result.to_dict()
    source = f"{numbers['kind']}.json"
    as_json = json.dumps(numbers, indent=2, allow_nan=False) + "\n"
    written = [write_text_atomically(folder / source, as_json)]
    written += [write_bytes_atomically(folder / name, png) for name, (_, png) in drawn.items()]
    shown = [f"![{caption}]({name})\n\n{caption}" for name, (caption, _) in drawn.items()]
    note = f"Every number here comes from `{source}` in this folder."
    markdown = "\n\n".join([before_figures(result), FIGURES, *shown, note]) + "\n"
    written.append(write_text_atomically(folder / "report.md", markdown))
    if isinstance(result, Analysis):
        written.append(write_text_atomically(folder / "report.html", _page(result, numbers, drawn)))
    return written


def before_figures(result: Reported) -> str:
    """What report.md holds before its figures."""
    title = "# Scaling-law report" if isinstance(result, Analysis) else "# Case-study report"
    return "\n\n".join([title, *(section.markdown() for section in sections_of(result))])


def parts_of_page(analysis: Analysis, numbers: dict[str, Any]) -> list[str]:
    """What report.html holds besides figures and template: the sections, and the `numbers` that the slider reads."""
    keys = ("data", "curves", "phi_path", "allocation", "profile", "fit")
    # "<" must not end the script element early.
    slider = json.dumps({key: numbers[key] for key in keys if key in numbers}).replace("<", "\\u003c")
    return [*(section.html() for section in sections(analysis)), slider]


def _page(analysis: Analysis, numbers: dict[str, Any], drawn: dict[str, tuple[str, bytes]]) -> str:
    *said, slider = parts_of_page(analysis, numbers)
    for caption, png in drawn.values():
        data, shown = base64.b64encode(png).decode("ascii"), html.escape(caption)
        image = f'<img alt="{shown}" src="data:image/png;base64,{data}">'
        said.append(f"<figure>{image}<figcaption>{shown}</figcaption></figure>")
    name, fit = analysis.parameter_of_interest, analysis.fit
    title = f"{name} = {fit.parameters[name]:.4f}, split {fit.split}, status {fit.status}"
    page = _TEMPLATE.read_text(encoding="utf-8")
    values = {"TITLE": html.escape(title), "DATA": slider, "SECTIONS": "\n".join(said)}
    for key, value in values.items():
        page = page.replace(f"@@{key}@@", value)
    return page
