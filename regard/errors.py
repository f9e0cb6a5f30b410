"""What users are told: their mistakes, notices, and the exit codes of the commands."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

# Exit codes beside 2, which is every other UsageError.
RUN, ENVIRONMENT, DATA = 1, 3, 4


class UsageError(ValueError):
    """Something the user asked for cannot be done; the text says what was asked, what is possible, what to type."""


class Notice(UserWarning):
    """What a user should know though nothing is wrong; a command prints it as `note: ...`."""


def notice(text: str) -> None:
    """Warn at the line outside this package that led here."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "regard":
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, Notice, stacklevel=depth)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `did you mean 'heads'?`, or the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


class Fault(UsageError):
    """A UsageError with an exit code of its own."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code
