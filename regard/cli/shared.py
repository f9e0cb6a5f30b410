"""What commands share: flags and how they are read, models, text in, talk on a terminal.

Importing this needs tyro but not torch, so that help is quick. The comment beside a flag, or above
it, is its help.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, TypeVar

import tyro
from tyro.conf import Positional, UseAppendAction, arg

from regard.errors import DATA, Fault, UsageError, blaming, nearest
from regard.files import hub_name, in_hub_cache, nearby
from regard.see.format import aligned

if TYPE_CHECKING:
    from regard.evaluation.model import Opened

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Count = Annotated[int | None, arg(metavar="N")]
Folder = Annotated[Positional[str], arg(metavar="MODEL", help="model folder")]
File = Annotated[Positional[str], arg(metavar="[FILE]")]
DataFiles = Annotated[Positional[tuple[str, ...]], arg(metavar="FILE ...")]
FileName = Annotated[str | None, arg(metavar="FILE")]
FolderName = Annotated[str | None, arg(metavar="FOLDER")]
Name = Annotated[Positional[str | None], arg(metavar="[NAME]")]
Text = Annotated[str | None, arg(metavar="TEXT")]
Files = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="FILE")]
Texts = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")]
Pairs = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")]
Changes = Annotated[dict[str, str], arg(metavar="NAME VALUE")]
Overlong = Literal["error", "truncate"]
Pooling = Literal["auto", "mean", "cls"]
ALIASES = {"dtype": ["--precision"]}


@dataclass(frozen=True)
class Machine:
    """Where and how precisely the model runs."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...; auto takes cuda where there is one
    # auto: as the weights are stored; on a CPU half precision is bf16, or fp32 if it has no bf16
    dtype: Annotated[Literal["auto", "fp32", "bf16"], arg(aliases=ALIASES["dtype"])] = "auto"
    # hold weights in 8 or 4 bits; the change of perplexity is printed
    quantize: Literal["none", "int8", "int4"] = "none"


@dataclass(frozen=True)
class Reading:
    """How the files are read."""

    # text, tsv, csv, jsonl, squad, parquet, hub, npz, npy, idx, images; auto: by the name
    format: str = "auto"
    unit: Literal["file", "line", "paragraph"] = "file"  # what is one document of plain text
    marker: str = ""  # a text that stands between documents, such as <|endoftext|>
    # which column has a role (text, second, source, target, label, words, tags, start, end), by
    # number from 0 or by name: text=1
    columns: Pairs = ()
    # whether the first line names the columns; left out: if columns are given by name, or it looks
    # like it
    header: Annotated[bool | None, arg(metavar="True|False")] = None
    # between the columns of csv files; left out: the one of , ; tab | that fits
    delimiter: str = ""
    encoding: str = "utf-8"  # what text is written in, such as cp1252 or utf-16
    size: Count = None  # scale pictures to N x N

    def settings(self) -> dict[str, Any]:
        """The settings of a regard.data.read.Source."""
        return {**dataclasses.asdict(self), "columns": pairs(self.columns, "--columns")}


def pairs(texts: tuple[str, ...], flag: str) -> dict[str, str]:
    """NAME=VALUE ... as a table."""
    table = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise UsageError(f"{flag} is {text!r:.60}; give NAME=VALUE, for example {flag} text=1")
        table[name] = value
    return table


def check_counts(options: Any, *flags: str) -> None:
    for name in flags:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; give a number from 1")


# --- reading a command line -----------------------------------------------------------------------


def parse(cls: type[T], name: str, arguments: list[str]) -> T | None:
    """The command line as a `cls`, or None after --help. A mistake is a UsageError of one line."""
    flags = flags_of(cls)
    # Settings of a config are flags, too: --train.steps 100.
    if settable := "changes" in flags:
        if "--help-all" in arguments:
            from regard.cli.settings import help_all  # slow to import

            print(help_all())
            return None
        arguments = folded(arguments)
    # Every flag is another program's.
    if flags == ["arguments"] and arguments not in (["--help"], ["-h"]):
        arguments = ["--", *arguments]
    check_flags(arguments, flags, name, settable)
    out, err, prog = io.StringIO(), io.StringIO(), f"regard {name}"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            flat = (tyro.conf.OmitArgPrefixes,)
            return tyro.cli(cls, args=arguments, prog=prog, description="", config=flat)
    except SystemExit as end:
        if end.code:
            raise UsageError(one_line(err.getvalue())) from None
    head, *examples = inspect.cleandoc(cls.__doc__ or "").splitlines()
    print("\n".join([head, *(f"  {line}" if line else "" for line in examples)]).rstrip())
    # None cannot be typed; the text of the flag says what happens without it.
    text = re.sub(r"\s*\(default:\s+None\)", "", out.getvalue().strip())
    text = re.sub(r"\{None\}\||(?<=\{)None,", "", text)
    print("\n".join(["", *(line.rstrip() for line in text.splitlines())]))
    return None


def check_flags(arguments: list[str], flags: list[str], name: str, settable: bool) -> None:
    """Refuse a flag that there is not, with a hint: the nearest one, or what we call it."""
    known = {f"--{flag.replace('_', '-')}" for flag in flags} | {"--help"}
    known |= {flag for others in ALIASES.values() for flag in others}
    for text in arguments[: arguments.index("--")] if "--" in arguments else arguments:
        flag = text.partition("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in known:
            continue
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}?" if close else f"see regard {name} --help"
        if settable:
            from regard.training.config import FOREIGN_NAMES  # slow to import

            ours = FOREIGN_NAMES.get(flag.removeprefix("--").replace("-", "_"))
            # A setting has a dot in its name, a flag is one already.
            dashes = "" if not ours or ours.startswith(("--", "metrics")) else "--"
            hint = f"here it is {dashes}{ours}" if ours else hint
        raise UsageError(f"there is no option {flag!r:.60}; {hint} (text that begins so: after --)")


def folded(arguments: list[str]) -> list[str]:
    """Flags with a dot in their name (--train.seed 7) as pairs of --changes."""
    rest, changes, given = list[str](), list[str](), iter(arguments)
    into = rest
    for text in given:
        name, equals, value = text.partition("=")
        if name.startswith("--") and "." in name:
            value = value if equals else next(given, "")
            if not value or value.startswith("--"):
                raise UsageError(f"{name} needs a value: {name} VALUE")
            changes += [name.removeprefix("--"), value]
            into = rest
        elif text == "--changes":
            into = changes
        else:
            into = rest if text.startswith("--") else into
            into.append(text)
    return [*rest, "--changes", *changes] if changes else rest


def one_line(box: str) -> str:
    """The text between the first two rules of the box that tyro draws around an error."""
    lines = [line.strip("│|╭╮╰╯ ") for line in box.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("-─")]
    inside = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    text = re.sub(r" +", " ", " ".join(inside)).strip().removesuffix(".")
    choice = re.match(r"invalid choice '(.*)' for argument '(\S+)'. Expected one of \((.*)\)", text)
    if choice is not None:
        known = re.findall(r"'([^']*)'", choice[3])
        if "--dtype" in choice[2] and choice[1] in ("int8", "int4"):
            return (
                f"--dtype is {choice[1]!r}, which is how weights are held: --quantize {choice[1]}"
            )
        return f"{choice[2].rpartition('/')[2]} is {choice[1]!r}; {nearest(choice[1], known)}"
    wrong = re.match(r"Error parsing (\S+): .*?\b(int|float|INT|FLOAT)\b.*'(.*)'", text)
    if wrong is None:
        return text
    kind = "a whole number" if wrong[2].lower() == "int" else "a number"
    return f"{wrong[1]} needs {kind}, got {wrong[3]!r}"


def flags_of(cls: Any) -> list[str]:
    """The fields of a dataclass, and of those in it, which are groups of flags."""
    flags = []
    for f in dataclasses.fields(cls):
        flags += flags_of(f.default) if dataclasses.is_dataclass(f.default) else [f.name]
    return flags


def values(options: Any) -> dict[str, Any]:
    """All options by name, groups flattened."""
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        flat |= values(value) if dataclasses.is_dataclass(value) else {f.name: value}
    return flat


# --- models in, folders and files out -------------------------------------------------------------


def open_model(folder: str, machine: Machine) -> Opened:
    """The model of a folder, ready to run as the flags say."""
    offer_to_pull(folder)
    from regard.evaluation.model import Opened

    opened = Opened(folder, **dataclasses.asdict(machine))
    talk(opened.about)
    return opened


def offer_to_pull(name: str) -> None:
    """Somebody at a terminal who names a model of the hub that is not here is asked whether to bring it."""
    asked = sys.stdin.isatty() and sys.stderr.isatty() and "/" in name and hub_name(name)
    if not asked or Path(name).exists() or in_hub_cache(name):
        return
    print(f"{name} is not on this machine; pull it from the hub? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        pull(name)


def pull(name: str) -> Path:
    """A model of the Hugging Face Hub, brought into its cache; what it is, is said."""
    from regard.checkpoint import hub

    listing = hub.look_up(name)
    say(f"{listing.name} at {listing.commit}, {in_bytes(listing.size)}")
    folder = hub.pull(listing, lambda file: renew(f"{file.name}, {in_bytes(file.size)}"))
    renew("")
    return folder


def in_bytes(size: int) -> str:
    """1.2 GB"""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def compare(opened: Opened, prompt: Any) -> None:
    """Say what quantization costs, on this prompt."""
    if change := opened.compare(prompt):
        say(change)


def check_new_folder(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} is there already and not an empty folder; name another")


def output_file(name: str, endings: tuple[str, ...], what: str) -> Path:
    """The file of --output. Before any work is done, something is written beside it: permissions
    alone do not tell."""
    path = Path(name)
    if path.suffix.lower() not in endings:
        raise UsageError(f"--output {name}: give a name that ends in {what}")
    if not path.parent.is_dir():
        raise UsageError(f"--output {name}: there is no folder {path.parent}; make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            if not path.is_dir() and (not path.exists() or os.access(path, os.W_OK)):
                return path
    except OSError:
        pass
    raise UsageError(f"--output {path} cannot be written; name a file in a folder of yours")


# --- text in --------------------------------------------------------------------------------------


def given_text(text: str | None) -> str:
    """What an argument says; all of stdin, without the last line break, if it is left out or -."""
    from regard.data.read import decoded

    if text not in (None, "-"):
        return str(text)
    with open_file("-") as (stream, name):
        return decoded(stream.read(), Path(name)).removesuffix("\n").removesuffix("\r")


@contextlib.contextmanager
def open_file(path: str) -> Iterator[tuple[BinaryIO, str]]:
    """A file, or stdin for -, and what to call it."""
    if path == "-":
        if is_typed(path):
            talk("reading the keyboard; Ctrl-D ends")
        yield sys.stdin.buffer, "stdin"
        return
    with blaming(DATA):
        # Errors while it is used are not the fault of the file, so `with` is outside.
        file = open(path, "rb")  # noqa: SIM115
    with file:
        yield file, path


def check_file(path: str) -> None:
    """Refuse a wrong name before the model is read."""
    if path != "-" and not Path(path).exists():
        how = nearby(path) or "; give a file, or - for stdin"
        raise Fault(f"{path} does not exist{how}", DATA)


def is_typed(path: str) -> bool:
    """Whether somebody types the lines, and waits for an answer to each."""
    return path == "-" and sys.stdin.isatty()


def line_blocks(path: str, rows: int) -> Iterator[tuple[list[str], int, str]]:
    """Lines of a file, `rows` at a time, with how many came before and what the file is called."""
    from regard.data.read import lines_of

    with open_file(path) as (stream, name):
        lines, done = lines_of(stream, Path(name)), 0
        while block := list(islice(lines, min(rows, sys.maxsize))):
            yield block, done, name
            done += len(block)


# --- talk -----------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line on stderr, on a terminal or not."""
    print(text, file=sys.stderr, flush=True)


def talk(text: str) -> None:
    """A line for people; files and pipes get none."""
    if sys.stderr.isatty():
        say(dim(text))


def renew(text: str) -> None:
    """A line for people that is written over by the next."""
    if sys.stderr.isatty():
        print(f"\r{dim(text) if text else ''}\x1b[K", end="", file=sys.stderr, flush=True)


def dim(text: str) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"


class Rate:
    """Tokens per second, for people: while they come, unless text is written to the same screen,
    and when all is done."""

    def __init__(self, streaming: bool):
        self.live = not (streaming and sys.stdout.isatty())
        self.begin = self.last = time.monotonic()
        self.tokens = 0

    def add(self, tokens: int, more: str = "") -> None:
        self.tokens += tokens
        now = time.monotonic()
        if self.live and now - self.last > 0.2:
            self.last = now
            renew(self.text(more))

    def text(self, more: str) -> str:
        seconds = max(time.monotonic() - self.begin, 1e-9)
        return f"{self.tokens} tokens, {self.tokens / seconds:.1f} tokens/s{more}"

    def done(self, more: str) -> None:
        if self.live:
            renew("")
        talk(self.text(more))


def print_rows(rows: list[dict[str, Any]], as_json: bool, right: tuple[int, ...] = ()) -> int:
    """A list, as a table with a head or as JSON."""
    table = [tuple(rows[0]), *(tuple(row.values()) for row in rows)]
    print(json.dumps(rows) if as_json else aligned(table, right))
    return 0
