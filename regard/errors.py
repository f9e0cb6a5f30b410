"""What users are told: their mistakes, notices, the exit codes of the commands, the version."""

from __future__ import annotations

import contextlib
import difflib
import errno
import sys
import warnings
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

VERSION = "0.1.0"

# Exit codes beside 2, which is every other UsageError.
RUN, ENVIRONMENT, DATA, CHECK = 1, 3, 4, 5


# Up to so many choices are all named where one is mistyped.
LISTED = 8


class UsageError(ValueError):
    """Something the user asked for cannot be done; the text says what was asked, what is possible,
    what to type."""


class Notice(UserWarning):
    """What a user should know though nothing is wrong; a command prints it as `note: ...`."""


class Former:
    """A method by its former name: it gives the new one, with a DeprecationWarning."""

    def __init__(self, new: str):
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, thing: Any, kind: type) -> Any:
        if thing is not None:
            warnings.warn(f"{self.name} is called {self.new} now", DeprecationWarning, stacklevel=2)
        return getattr(kind if thing is None else thing, self.new)


class Renamed:
    """A class with methods that have a `Former` name. A subclass that overrides one by that name, which nothing calls,
    is told the new one."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for base in cls.__mro__[1:]:
            for name, former in vars(base).items():
                if isinstance(former, Former) and name in vars(cls):
                    raise UsageError(f"{cls.__name__}.{name} is called {former.new} now: rename it")


def _package(frame: FrameType) -> str:
    # What is run by exec need not have a name.
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def notice(text: str) -> None:
    """Warn at the line outside this package that led here."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and _package(frame) == "regard":
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, Notice, stacklevel=depth)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `did you mean 'heads'?`, or the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Refuse a setting that is none of those known; where they are few, all are named."""
    known = sorted(known)
    if value not in known:
        hint, every = nearest(str(value), known), f"known: {', '.join(known)}"
        if hint != every and len(known) <= LISTED:
            hint = f"{hint} {every}"
        raise UsageError(f"{name} = {value!r} is unknown; {hint}")


class Fault(UsageError):
    """A UsageError with an exit code of its own."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


@contextlib.contextmanager
def blaming(code: int, files: int | None = None) -> Iterator[None]:
    """Give mistakes in here this exit code, but for those that have their own; and this, or
    `files`, to files that cannot be read."""
    try:
        yield
    except UsageError as error:
        raise Fault(str(error), getattr(error, "code", code)) from None
    except OSError as error:
        # It is what was written that had no room.
        if error.errno == errno.ENOSPC:
            raise
        name = "the model folder" if error.filename is None else str(error.filename)
        why = f"{name!r:.80} cannot be read: {error.strerror or error}"
        raise Fault(why, code if files is None else files) from None
