"""Reading a command line into a dataclass by tyro, and the flags that commands share.

Importing this needs tyro but not torch, so that help is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import Positional, UseAppendAction, arg

from regard.errors import UsageError

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Folder = Annotated[Positional[str], arg(metavar="MODEL", help="model folder")]
Count = Annotated[int | None, arg(metavar="N")]
File = Annotated[Positional[str], arg(metavar="[FILE]")]
Files = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="FILE")]
DataFiles = Annotated[Positional[tuple[str, ...]], arg(metavar="FILE ...")]
Pairs = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")]
Changes = Annotated[dict[str, str], arg(metavar="NAME VALUE")]
Overlong = Literal["error", "truncate"]
ALIASES = {"dtype": ["--precision"]}


@dataclass(frozen=True)
class Machine:
    """Where and how precisely the model runs."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ...; auto takes cuda where there is one"""
    dtype: Annotated[Literal["auto", "fp32", "bf16"], arg(aliases=ALIASES["dtype"])] = "auto"
    """auto: as the weights are stored; on a CPU half precision is bf16, or fp32 if it has no bf16"""
    quantize: Literal["none", "int8", "int4"] = "none"
    """hold weights in 8 or 4 bits; the change of perplexity is printed"""


@dataclass(frozen=True)
class Reading:
    """How the files are read."""

    format: str = "auto"
    """text, tsv, csv, jsonl, squad, parquet, hub, npz, npy, idx, images; auto: by the name"""
    unit: Literal["file", "line", "paragraph"] = "file"
    """what is one document of plain text"""
    marker: str = ""
    """a text that stands between documents, such as <|endoftext|>"""
    columns: Pairs = ()
    """which column has a role (text, second, source, target, label, words, tags, start, end), by number from 0 or by
    name: text=1"""
    header: Annotated[bool | None, arg(metavar="True|False")] = None
    """whether the first line names the columns; left out: it does if columns are given by name"""
    size: Count = None
    """scale pictures to N x N"""

    def settings(self) -> dict[str, Any]:
        """The settings of a regard.data.read.Source."""
        return {**dataclasses.asdict(self), "columns": pairs(self.columns, "--columns")}


def pairs(texts: tuple[str, ...], flag: str) -> dict[str, str]:
    """NAME=VALUE ... as a table."""
    table = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise UsageError(f"{flag} is {text!r:.60}; give NAME=VALUE, for example {flag} text=1")
        table[name] = value
    return table


def check_counts(options: Any, *flags: str) -> None:
    """Refuse counts below 1."""
    for name in flags:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; give a number from 1")


# --- reading a command line -----------------------------------------------------------------------


def parse(cls: type[T], name: str, arguments: list[str]) -> T | None:
    """The command line as a `cls`; nothing where it asks for --help, which is printed. What is
    wrong is a UsageError of one line."""
    known = {f"--{flag.replace('_', '-')}" for flag in names(cls)} | {"--help"}
    known |= {flag for flags in ALIASES.values() for flag in flags}
    for text in arguments[: arguments.index("--")] if "--" in arguments else arguments:
        flag = text.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known:
            close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
            hint = f"did you mean {close[0]}?" if close else f"see regard {name} --help"
            if name in ("train", "plan"):
                from regard.train.config import ELSEWHERE  # slow to import

                ours = ELSEWHERE.get(flag.removeprefix("--").replace("-", "_"))
                hint = f"here it is --{ours}" if ours else hint
            raise UsageError(
                f"there is no option {flag!r:.60}; {hint} (text that begins so: after --)"
            )
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return tyro.cli(
                cls,
                args=arguments,
                prog=f"regard {name}",
                description="",
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as end:
        if end.code:
            raise UsageError(plain(one_line(err.getvalue()))) from None
    head, *examples = inspect.cleandoc(cls.__doc__ or "").splitlines()
    print("\n".join([head, *(f"  {line}" if line else "" for line in examples)]).rstrip())
    print("\n".join(["", *(line.rstrip() for line in out.getvalue().strip().splitlines())]))
    return None


def folded(arguments: list[str]) -> list[str]:
    """Flags with a dot in their name (--train.seed 7) as pairs of --changes."""
    rest, changes, given = [], [], iter(arguments)
    for text in given:
        name, equals, value = text.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(text)
            continue
        value = value if equals else next(given, "")
        if not value or value.startswith("--"):
            raise UsageError(f"{name} needs a value: {name} VALUE")
        changes += [name.removeprefix("--"), value]
    return [*rest, "--changes", *changes] if changes else rest


def one_line(box: str) -> str:
    """What the box says that tyro draws around an error: the paragraph between its first two
    rules."""
    lines = [line.strip("│|╭╮╰╯ ") for line in box.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("-─")]
    text = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    return re.sub(r" +", " ", " ".join(text)).strip().removesuffix(".")


def plain(text: str) -> str:
    """A value of the wrong type, as a person would say it."""
    wrong = re.match(r"Error parsing (\S+): .*?\b(int|float|INT|FLOAT)\b.*'(.*)'", text)
    if wrong is None:
        return text
    flag, kind, value = wrong.groups()
    kind = "a whole number" if kind.lower() == "int" else "a number"
    return f"{flag} needs {kind}, got {value!r}"


def names(cls: Any) -> list[str]:
    """The fields of a dataclass and of the dataclasses in it, which are groups of flags."""
    flags = []
    for f in dataclasses.fields(cls):
        group = f.default_factory
        flags += names(group) if dataclasses.is_dataclass(group) else [f.name]
    return flags


def values(options: Any) -> dict[str, Any]:
    """All options by name, groups flattened."""
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(options):
        value = getattr(options, f.name)
        flat |= values(value) if dataclasses.is_dataclass(value) else {f.name: value}
    return flat
