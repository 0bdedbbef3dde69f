"""Every public name says what it is."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest


def silent(owner: str, found: Any) -> Iterator[str]:
    """Names without a docstring of their own: a class or function, and what a class adds to its bases."""
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return
    own = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    # A dataclass without one gets its signature.
    if not own or own.startswith(f"{found.__name__}("):
        yield owner
    for name, member in vars(found).items() if inspect.isclass(found) else ():
        function = (
            getattr(member, "fget", None)
            or getattr(member, "func", None)
            or getattr(member, "__func__", member)
        )
        new = not any(hasattr(base, name) for base in found.__mro__[1:])
        if inspect.isfunction(function) and not name.startswith("_") and new and not function.__doc__:
            yield f"{owner}.{name}"


@pytest.mark.parametrize("package", ["looped_lm", "callbacks", "datamodules", "fitting"])
def test_public_names_have_docstrings(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__doc__
    found = [name for public in module.__all__ for name in silent(public, getattr(module, public))]
    assert not found


def test_what_has_none_is_found() -> None:
    class Told:
        """Told."""

        def told(self) -> None:
            """Told."""

    class Silent(Told):
        def told(self) -> None: ...

        @property
        def untold(self) -> None: ...

    assert list(silent("x", Silent)) == ["x", "x.untold"] and not list(silent("x", Told))
