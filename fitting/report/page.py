"""Pages whose numbers come from reports: a Markdown template whose fields name values in JSON files.

A field is `{FILE#PATH:FORMAT}`: a JSON file as seen from the template, the way to a value in it, and how the value is
written (Python's format of numbers and texts; may be left out). A way is made of keys with dots between them, `[2]`
for an item of a list, and `[key=value,key=value]` for the one item that has these values:

    {nano/fit.json#fit.parameters.phi:.3f}
    {nano/fit.json#minima[r=1,budget=5e11].d_model:g}

Braces that are meant as such are doubled. A field lies in one line.
"""

from __future__ import annotations

import difflib
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fitting.errors import FitError

SUFFIX = ".in"
"""What the name of a template adds to that of its page."""
_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\]]*)\]")


def page_of(template: Path) -> Path:
    """Where the page of a template lies. Raises `FitError` if its name does not say."""
    if template.suffix != SUFFIX or not template.stem:
        raise FitError(f"{template} is not named PAGE{SUFFIX}, so the page has no name. Give --out")
    return template.with_suffix("")


def fill(template: Path) -> str:
    """The page that a template makes. Raises `FitError` for whatever is wrong with a field, naming its line."""
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FitError(f"{template} cannot be read as a template ({error})") from None
    files: dict[Path, Any] = {}
    lines = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            lines.append("".join(_parts(line, template.parent, files)))
        except ValueError as error:
            raise FitError(f"{template}:{number}: {error}") from None
    return "".join(lines)


def changed_lines(page: str, expected: str) -> Iterator[str]:
    """What differs between a page and what its template gives, line by line."""
    old, new = page.splitlines(), expected.splitlines()
    for kind, i, k, j, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        yield from (f"line {n + 1} of the page: {old[n]}" for n in range(i, k))
        yield from (f"line {n + 1} from the template: {new[n]}" for n in range(j, m))
    if old == new and page != expected:
        yield "the ends of lines"


def _parts(line: str, folder: Path, files: dict[Path, Any]) -> Iterator[str]:
    try:
        parsed = list(string.Formatter().parse(line))
    except ValueError as error:
        raise ValueError(f"{error}. Write {{{{ and }}}} for braces that are no field") from None
    for literal, field, form, conversion in parsed:
        yield literal
        if field is None:
            continue
        name, sign, way = field.partition("#")
        if not sign or conversion:
            raise ValueError(
                f"{{{field}}} is no field. Write {{FILE#PATH:FORMAT}}, and {{{{ and }}}} for plain braces"
            )
        try:
            yield _written(_value(_content(folder / name, files), way), form or "")
        except ValueError as error:
            raise ValueError(f"{{{field}}}: {error}") from None


def _content(path: Path, files: dict[Path, Any]) -> Any:
    if path not in files:
        try:
            files[path] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"there is no file {path}. Files are named as seen from the template") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as JSON ({error})") from None
    return files[path]


def _value(content: Any, way: str) -> Any:
    """The value at the end of a way through plain JSON types. Raises `ValueError`."""
    at, gone = content, 0
    for step in _STEP.finditer(way):
        if step.start() != gone:
            break
        key, selector = step.groups()
        before = way[:gone] or "the file"
        at = _item(at, key, before) if key is not None else _selected(at, selector, before)
        gone = step.end()
    if gone != len(way) or not way:
        raise ValueError(f"the path cannot be read from {way[gone:]!r} on. Write key.key[2].key[key=value]")
    if at is None:
        raise ValueError("the value is null: the report has no such number. Leave the field out")
    if isinstance(at, dict | list):
        holds = ", ".join(map(str, at)) if isinstance(at, dict) else f"[0] to [{len(at) - 1}]"
        raise ValueError(f"this is no single value; it holds {holds}")
    return at


def _item(at: Any, key: str, before: str) -> Any:
    if not isinstance(at, dict):
        raise ValueError(f"{before} has no keys, so no {key!r}")
    if key not in at:
        close = difflib.get_close_matches(key, map(str, at), n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{before} has no key {key!r}.{guess} It has: {', '.join(map(str, at))}")
    return at[key]


def _selected(at: Any, selector: str, before: str) -> Any:
    if not isinstance(at, list):
        raise ValueError(f"{before} is no list, so there is no [{selector}]")
    if selector.isdigit():
        if int(selector) >= len(at):
            raise ValueError(f"{before} has {len(at)} items, so no [{selector}]")
        return at[int(selector)]
    pairs = [pair.partition("=") for pair in selector.split(",")]
    if not all(sign and key for key, sign, _ in pairs):
        raise ValueError(f"[{selector}] is neither a number nor key=value")
    found = [
        item
        for item in at
        if isinstance(item, dict) and all(key in item and _same(item[key], text) for key, _, text in pairs)
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} of {len(at)} items of {before} have {selector}; one must")
    return found[0]


def _same(value: Any, text: str) -> bool:
    if isinstance(value, bool):
        return text == str(value).lower()
    if isinstance(value, int | float):
        try:
            return value == float(text)
        except ValueError:
            return False
    return str(value) == text


def _written(value: Any, form: str) -> str:
    if isinstance(value, bool):
        if form:
            raise ValueError(f"this is {str(value).lower()}, which is written yes or no, without a format")
        return "yes" if value else "no"
    try:
        return format(value, form)
    except ValueError as error:
        raise ValueError(f"{value!r} cannot be written as {form!r} ({error})") from None
