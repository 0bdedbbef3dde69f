"""Errors that a user can mend, ours and those of the packages beside this one."""

from __future__ import annotations


class UserError(ValueError):
    """Something that the user can mend: the message gives the value, the reason and the way out.

    The command line shows only the message; other exceptions keep their traceback. Your components may raise it, too.
    """


#: Their subclasses count, too. They are given by name, since the sibling packages are not imported here.
_FOR_USERS = {
    f"{UserError.__module__}.{UserError.__qualname__}",
    "datamodules.errors.DataError",
    "fitting.errors.FitError",
    "fitting.records.RecordError",
}


def for_users(error: BaseException) -> bool:
    """Whether a user can mend this error, so that its message is enough."""
    return any(f"{c.__module__}.{c.__qualname__}" in _FOR_USERS for c in type(error).__mro__)
