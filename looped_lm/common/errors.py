"""The error for what a user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """Something that the user can mend: the message gives the value, the reason and the way out.

    The command line shows its message alone. Every other exception is a fault in code, ours or a component's, and keeps
    its traceback. Components of your own may raise it, too, for arguments that cannot be right.
    """
