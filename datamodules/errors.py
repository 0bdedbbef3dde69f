"""The one exception of this package that is meant for users."""

from __future__ import annotations


class DataError(ValueError):
    """Bad input or bad data on disk: the message names the value, the reason and the way out.

    The command line prints the message alone, without a traceback, and exits with a non-zero status.
    """
