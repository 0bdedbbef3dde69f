"""Write a report folder: the numbers as JSON, report.md, report.html and the figures, every number out of the
analysis (F36).
"""

from __future__ import annotations

import base64
import html
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fitting.errors import FitError
from fitting.records import write_bytes_atomically, write_text_atomically
from fitting.report.comparison_sections import comparison_sections
from fitting.report.document import Section, Table
from fitting.report.sections import sections

_TEMPLATE = Path(__file__).with_name("report_page.html")
FIGURES = "## Figures"


@dataclass(frozen=True)
class Form:
    """How one kind of analysis is written down."""

    numbers: str
    """Name of the file with all numbers."""
    title: str
    sections: Callable[[dict[str, Any]], list[Section]]
    plots: str
    """Module with its figures; it is loaded when they are drawn."""
    page: bool
    """Whether there is an interactive page as well."""


FORMS = {
    "fit": Form("fit.json", "Scaling-law report", sections, "fitting.report.plots", True),
    "comparison": Form(
        "comparison.json", "Case-study report", comparison_sections, "fitting.report.comparison_plots", False
    ),
}
"""By the `kind` that an analysis says it is."""


def form_of(analysis: dict[str, Any]) -> Form:
    """How an analysis is written down. Raises `FitError` if it is of no known kind."""
    kind = analysis.get("kind")
    if kind not in FORMS:
        raise FitError(f"This report is of the kind {kind!r}, not one of: {', '.join(FORMS)}. Make it again")
    return FORMS[kind]


def check_folder(folder: Path, overwrite: bool, kind: str = "fit") -> None:
    """Refuse, before the work, a folder whose report would be replaced. Raises `FitError`."""
    if folder.exists() and not folder.is_dir():
        raise FitError(f"--report {folder} is a file. Name a folder")
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise FitError(f"--report {folder} cannot be written: {there} is no folder open to you. Name another")
    others = [
        form.numbers for name, form in FORMS.items() if name != kind and (folder / form.numbers).exists()
    ]
    if others:
        raise FitError(f"{folder} holds a report of another kind ({', '.join(others)}). Name another folder")
    taken = [name for name in (FORMS[kind].numbers, "report.md", "report.html") if (folder / name).exists()]
    if taken and not overwrite:
        raise FitError(
            f"{folder} holds a report already ({', '.join(taken)}). Name another folder or add --overwrite"
        )


def write_report(
    analysis: dict[str, Any], folder: Path, progress: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Write everything into `folder` (made if missing), each file atomically. Returns the paths."""
    form = form_of(analysis)
    progress("drawing figures")
    drawn = import_module(form.plots).figures(analysis)
    content = form.sections(analysis)
    text = json.dumps(plain(analysis), indent=2, allow_nan=False) + "\n"
    written = [write_text_atomically(folder / form.numbers, text)]
    written += [write_bytes_atomically(folder / name, png) for name, (_, png) in drawn.items()]
    written.append(write_text_atomically(folder / "report.md", _markdown(form, content, drawn)))
    if form.page:
        written.append(write_text_atomically(folder / "report.html", _page(analysis, content, drawn)))
    return written


def text_of(analysis: dict[str, Any]) -> str:
    """What report.md holds before its figures."""
    form = form_of(analysis)
    return "\n\n".join(_beginning(form, form.sections(analysis)))


def parts_of_page(analysis: dict[str, Any]) -> list[str]:
    """What report.html holds beside its figures and template: the sections, and the numbers behind the slider."""
    return [*map(_html_section, form_of(analysis).sections(analysis)), _slider_data(analysis)]


def plain(value: Any) -> Any:
    """The value with non-finite numbers as null, which is what JSON has for them."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def _title(analysis: dict[str, Any]) -> str:
    name = analysis["parameter_of_interest"]
    fit = analysis["fit"]
    return f"{name} = {fit['parameters'][name]:.4f}, split {fit['split']}, status {fit['status']}"


def _beginning(form: Form, content: list[Section]) -> list[str]:
    return [f"# {form.title}", *(section.markdown() for section in content)]


def _markdown(form: Form, content: list[Section], drawn: dict[str, tuple[str, bytes]]) -> str:
    parts = [*_beginning(form, content), FIGURES]
    parts += [f"![{caption}]({name})\n\n{caption}" for name, (caption, _) in drawn.items()]
    parts.append(f"Every number here comes from `{form.numbers}` in this folder.")
    return "\n\n".join(parts) + "\n"


def _page(analysis: dict[str, Any], content: list[Section], drawn: dict[str, tuple[str, bytes]]) -> str:
    body = "\n".join(_html_section(section) for section in content)
    for caption, png in drawn.values():
        data = base64.b64encode(png).decode("ascii")
        body += f'\n<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        body += f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    page = _TEMPLATE.read_text(encoding="utf-8")
    values = {"TITLE": html.escape(_title(analysis)), "DATA": _slider_data(analysis), "SECTIONS": body}
    for name, value in values.items():
        page = page.replace(f"@@{name}@@", value)
    return page


def _slider_data(analysis: dict[str, Any]) -> str:
    keys = ("data", "curves", "phi_path", "allocation", "profile", "fit")
    # "<" must not end the script element early.
    return json.dumps(plain({key: analysis[key] for key in keys if key in analysis})).replace("<", "\\u003c")


def _html_section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    for part in section.parts:
        if isinstance(part, Table):
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in part.header)
            rows = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in part.rows
            )
            parts.append(f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>')
        else:
            parts.append(f"<p>{html.escape(part)}</p>")
    return "\n".join(parts)
