"""The error for everything that a user can mend."""

from __future__ import annotations


class FitError(ValueError):
    """A fit that cannot be made from these runs or with these options. The message says why, and what to do."""
