"""The one exception of this package that is meant for users, and checks that raise it."""

from __future__ import annotations

import importlib
from typing import Any


class DataError(ValueError):
    """Bad input or bad data on disk: the message names the value, the reason and the way out."""


def check_at_least(least: int, **values: int | None) -> None:
    """Raise DataError for a value below `least`; None stands for a default and passes."""
    for name, value in values.items():
        if value is not None and value < least:
            raise DataError(f"{name} is {value}; it must be at least {least}")


def import_extra(name: str, who_needs: str) -> Any:
    """Import a package of the extra `data`. If it is missing, a DataError begins with `who_needs`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{who_needs} the package {name}: pip install 'looped-lm[data]'") from error
