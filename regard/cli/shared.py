"""What commands share: the model made ready, text in from files and stdin, talk and the rate line
on a terminal."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from regard.errors import DATA, Fault, UsageError, blaming
from regard.see.format import aligned as aligned
from regard.see.format import visible

if TYPE_CHECKING:
    from regard.cli.parse import Machine
    from regard.evaluate.model import Opened


def open_model(folder: str, machine: Machine, rows: int) -> Opened:
    """The model of a folder, ready to run where and how the flags say."""
    from regard.evaluate.model import Opened

    opened = Opened(folder, rows, **asdict(machine))
    talk(opened.about)
    return opened


def compare(opened: Opened, prompt: Any) -> None:
    """Say what quantization costs, on this prompt."""
    if change := opened.compare(prompt):
        print(change, file=sys.stderr)


def check_new_folder(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} is there already and not an empty folder; name another")


# --- text in --------------------------------------------------------------------------------------


def read_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """Lines of UTF-8, ended by \\n or \\r\\n and by nothing else: one line in must stay one line
    out."""
    for number, raw in enumerate(stream, 1):
        raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        yield decoded(raw.removesuffix(b"\n").removesuffix(b"\r"), f"line {number} of {name}")


def decoded(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Fault(
            f"{what} is no UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}; convert it, for example with "
            "iconv -t utf-8",
            DATA,
        ) from None


def read_text(path: str) -> str:
    """All of a file or of stdin, without the last line break."""
    with open_file(path) as (stream, name):
        return decoded(stream.read(), name).removesuffix("\n").removesuffix("\r")


@contextlib.contextmanager
def open_file(path: str) -> Iterator[tuple[BinaryIO, str]]:
    """A file, or stdin for -, and what to call it."""
    if path == "-":
        if sys.stdin.isatty():
            talk("reading the keyboard; Ctrl-D ends")
        yield sys.stdin.buffer, "stdin"
        return
    with blaming(DATA):
        # What goes wrong while it is used is no fault of the file.
        file = open(path, "rb")  # noqa: SIM115
    with file:
        yield file, path


def check_file(path: str) -> None:
    """A name that is wrong is told before the model is read."""
    if path != "-" and not Path(path).exists():
        raise Fault(f"{path} does not exist; give a file, or - for stdin", DATA)


def rows_at_once(options: Any) -> int:
    """Who types lines wants an answer to each."""
    return 1 if options.file == "-" and sys.stdin.isatty() else options.rows


def line_blocks(path: str, rows: int) -> Iterator[tuple[list[str], int, str]]:
    """Lines of a file, `rows` at a time, with how many came before and what the file is called."""
    with open_file(path) as (stream, name):
        lines, done = read_lines(stream, name), 0
        while block := list(islice(lines, rows)):
            yield block, done, name
            done += len(block)


# --- talk -----------------------------------------------------------------------------------------


def talk(text: str) -> None:
    """A line for people; files and pipes get none."""
    if sys.stderr.isatty():
        print(dim(text), file=sys.stderr)


def dim(text: str) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"


class Rate:
    """Tokens a second, on stderr if that is a terminal: while they come, unless text is written to
    the same screen, and when all is done."""

    def __init__(self, streaming: bool):
        self.shown = sys.stderr.isatty()
        self.live = self.shown and not (streaming and sys.stdout.isatty())
        self.begin = self.last = time.monotonic()
        self.tokens = 0

    def add(self, tokens: int, more: str = "") -> None:
        self.tokens += tokens
        now = time.monotonic()
        if self.live and now - self.last > 0.2:
            self.last = now
            print(f"\r{dim(self.text() + more)}\x1b[K", end="", file=sys.stderr, flush=True)

    def text(self) -> str:
        seconds = max(time.monotonic() - self.begin, 1e-9)
        return f"{self.tokens} tokens, {self.tokens / seconds:.1f} tokens/s"

    def done(self, more: str) -> None:
        if self.shown:
            clear = "\r\x1b[K" if self.live else ""
            print(f"{clear}{dim(self.text() + more)}", file=sys.stderr)


def fail(text: str, code: int) -> int:
    """Print an error, the first of several processes that meet it alone; the exit code."""
    if os.environ.get("RANK", "0") == "0":
        text = " ".join(text.splitlines()).encode("utf-8", "backslashreplace").decode("utf-8")
        print("error:", visible(text), file=sys.stderr)
    return code
