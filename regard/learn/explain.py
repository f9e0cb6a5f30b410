"""What `regard explain` and the pages of docs/mechanisms tell of a mechanism: question, formula,
code, numbers; as text or as JSON.

A topic is a function with a docstring (the question, then the formula) whose parameters are the
numbers a reader may change; its example is their defaults, or in examples.toml. It computes by the
library's own functions, in float64. The topics are in mechanisms.py and states.py; topics.toml has
their chapters and the words that people use for them."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.errors import UsageError
from regard.see.format import aligned, number, strict

Numbers = tuple[float, ...]
Matrix = tuple[Numbers, ...]
Module = TypeVar("Module", bound=nn.Module)
# The most of a whole number that is given.
MOST = 1_000_000


def table(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


# Chapter -> topic -> other words for it; and words that tell no topic from another.
CHAPTERS = table("topics.toml")
FILLING = {*CHAPTERS.pop("")["filling"].split()}
# Letters of several words that name a topic in whatever text they stand.
TELLING = 14
# Topic -> word -> what its page says instead.
MEANINGS = table("words.toml")
# Topic -> input -> numbers of the example.
EXAMPLES = table("examples.toml")


@dataclass(frozen=True)
class Table:
    """Rows under named columns. A cell is a number, a text, or None where there is no number.
    `draw`: how a picture shows it, as picture.py says, and perhaps from which column on. `axis`: what
    its numbers are, or in a map its columns. `over`: of which input the columns are formulas."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    draw: str = ""
    axis: str = ""
    over: str = ""

    def text(self) -> str:
        """In one form per column: whole numbers as they are, others with four places, tiny ones
        with a power."""
        columns = []
        for name, cells in zip(self.columns, zip(*self.rows)):
            finite = (c for c in cells if isinstance(c, float) and math.isfinite(c))
            whole = all(c == int(c) for c in finite)
            columns.append([name, *(_cell(c, whole) for c in cells)])
        return f"{self.title}\n{aligned(list(zip(*columns)), range(len(columns)))}"

    @classmethod
    def of(cls, title: str, columns: Mapping[str, Iterable[Any]], *how: str) -> Table:
        """From columns instead of rows, tensors among them."""
        cells = (x.tolist() if isinstance(x, Tensor) else x for x in columns.values())
        return cls(title, list(columns), list(zip(*cells)), *how)


def _cell(cell: Any, whole: bool) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "none"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or whole:
        return f"{int(cell):,}" if math.isfinite(cell) else str(cell)
    if cell and abs(cell) < 1e-3:
        return f"{cell:.3e}"
    # Halves are rounded up, however a processor has rounded the sum behind them.
    text = f"{round(cell, 6) + math.copysign(1e-9, cell):.4f}"
    return "0.0000" if text == "-0.0000" else text


Tables = Iterable[Table]


@dataclass(frozen=True)
class Topic:
    """`code`: path::name of what implements it, the most telling first. `inputs`: what may be
    given, with the example's values: a tuple of numbers, a tuple of rows, one number, or a text."""

    name: str
    question: str
    formula: str
    code: tuple[str, ...]
    inputs: dict[str, Any]
    compute: Callable[..., Tables]

    def tables(self, given: Mapping[str, Sequence[float | str] | str]) -> list[Table]:
        """The numbers for what is given."""
        return list(self.compute(**self.read(given)))

    def read(self, given: Mapping[str, Sequence[float | str] | str]) -> dict[str, Any]:
        """What is given, and the example's values for the rest."""
        for name in given:
            if name not in self.inputs:
                raise UsageError(f"{self.name} has no {_flag(name)}; it takes {self.takes()}")
        return {**self.inputs, **{name: self._read(name, value) for name, value in given.items()}}

    def takes(self) -> str:
        return ", ".join(map(_flag, self.inputs))

    def _read(self, name: str, value: Any) -> Any:
        """A value as the example has it: rows, a tuple, a whole number, a number or a text. Rows
        may be given without semicolons, as one tuple that the topic divides."""
        example, flag = self.inputs[name], _flag(name)
        text = value if isinstance(value, str) else " ".join(map(str, value))
        if isinstance(example, str):
            return text
        divided = _nested(example) and ";" in text
        try:
            rows = [tuple(map(float, row.split())) for row in text.split(";" if divided else None)]
        except ValueError as error:
            word = str(error).partition(": ")[2]
            raise UsageError(f"{word:.40} is no number; give numbers such as 1 -2.5 3e4") from None
        finite = all(math.isfinite(x) for row in rows for x in row)
        if divided:
            rows = [row for row in rows if row]
            if len({len(row) for row in rows}) != 1 or not finite:
                such = f'such as {flag} "1 0; 0 1"'
                raise UsageError(f"{flag} needs rows of as many numbers each, {such}")
            return tuple(rows)
        numbers = tuple(x for row in rows for x in row)
        if not numbers or not finite:
            raise UsageError(f"{flag} needs numbers, such as {flag} {shown(example)}")
        if isinstance(example, tuple):
            return numbers
        if len(numbers) > 1:
            raise UsageError(f"{self.name} takes one number for {flag}, got {len(numbers)}")
        return whole(name, numbers[0]) if isinstance(example, int) else numbers[0]


TOPICS: list[Topic] = []


def topic(*code: str) -> Callable[[Callable[..., Tables]], Topic]:
    """A function as a topic: its name with dashes, its docstring as question and formula, its
    defaults as inputs."""

    def decorate(compute: Callable[..., Tables]) -> Topic:
        question, _, formula = inspect.cleandoc(compute.__doc__ or "").partition("\n")
        name = compute.__name__.strip("_").replace("_", "-")
        example = {n: _tuples(x) for n, x in EXAMPLES.get(name, {}).items()}
        defaults = inspect.signature(compute).parameters.items()
        inputs = {n: example.get(n, p.default) for n, p in defaults}
        TOPICS.append(Topic(name, question, formula.strip("\n"), code, inputs, compute))
        return TOPICS[-1]

    return decorate


def find(name: str) -> Topic:
    """The topic that these words mean: as a row of the table has them, or a part of them, or by
    the words they share with it; the three nearest are told where there is none."""
    said = plainly(name[:400])
    key = "".join(said)
    if found := names().get(key) or _covering(said) or _sharing(said):
        return next(each for each in TOPICS if each.name == found)
    near = dict.fromkeys(names().values(), 0.0)
    for word, topic in names().items():
        near[topic] = max(near[topic], difflib.SequenceMatcher(None, key, word).ratio())
    close = "the nearest are {}, {} and {}".format(*sorted(near, key=lambda topic: -near[topic]))
    raise UsageError(f"there is no topic {name!r:.60}; {close} (regard explain lists all)")


@cache
def names() -> dict[str, str]:
    """Every word for a topic, spelt without case, spaces and hyphens -> the topic."""
    pairs = ((n, w) for ts in CHAPTERS.values() for n in ts for w in (n, *ts[n].split(",")))
    return {"".join(said): name for name, word in pairs if (said := plainly(word))}


def meanings(topic: str, text: str) -> dict[str, str]:
    """Words of a text that the page of a topic does not use -> what it says instead."""
    table = {"".join(plainly(word)): word for word in MEANINGS.get(topic, {})}
    found = (table[word] for word in dict.fromkeys(plainly(text)) if word in table)
    return {word: MEANINGS[topic][word] for word in found}


def plainly(text: str) -> list[str]:
    """A text as words that can be compared: small letters, singular, American, without filling."""
    plain = re.sub(r"\\[a-z]+|[{}$]", "", text.lower())
    found = re.findall(r"[a-z0-9]+", re.sub(r"\bk *-? *v\b", "kv", plain))
    single = (re.sub(r"(?<=[a-z]{3})(?<!s)s$", "", re.sub("ies$", "ys", word)) for word in found)
    return [w for w in (s.replace("isation", "ization") for s in single) if w not in FILLING]


def _covering(said: list[str]) -> str | None:
    """The topic whose words are the largest part of a longer text, such as a heading: most of it,
    or several words that tell enough."""
    best, whole = "", len("".join(said))
    for first, last in combinations(range(len(said) + 1), 2):
        part, several = "".join(said[first:last]), last - first > 1
        telling = several and (len(part) > whole / 2 or len(part) >= TELLING)
        if part in names() and len(part) > len(best) and (telling or len(part) > 3 * whole / 4):
            best = part
    return names().get(best)


@cache
def users() -> dict[str, set[str]]:
    """Every single word of the table -> the topics in whose rows it stands."""
    users: dict[str, set[str]] = {}
    for topics in CHAPTERS.values():
        for name, others in topics.items():
            for word in plainly(f"{name} {others}"):
                users.setdefault(word, set()).add(name)
    return users


def _sharing(said: list[str]) -> str | None:
    """The topic that shares the most words with a text of which no part is a row of the table.

    Each word is a vote, divided among the topics that use it. Who wins has a whole vote (a word that
    no other topic uses, or several rarer ones), half as many again as the next, and a third of the
    words: less than this is chance. A word that is nearly one of the table is mistyped, and then
    nothing is concluded from the others: one letter may be what tells two topics apart."""
    words = {word for word in said if not word.isdigit()}
    unknown = words - users().keys()
    if any(difflib.get_close_matches(word, users(), 1, 0.8) for word in unknown):
        return None
    votes: dict[str, list[float]] = {}
    for word in words - unknown:
        for name in users()[word]:
            votes.setdefault(name, []).append(1 / len(users()[word]))
    ranked = sorted(votes, key=lambda name: -sum(votes[name]))
    first, second = ([sum(votes[name]) for name in ranked[:2]] + [0.0, 0.0])[:2]
    told = first >= 1 and first >= 1.5 * second and 3 * len(votes[ranked[0]]) >= len(words)
    return ranked[0] if told else None


def _divided(said: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words of a topic, and the numbers that follow: behind the last word, but for numbers that a
    topic has in its name. What stands among numbers is one that is wrong."""
    is_number = [re.match(r"[-+.]*\d[-+.e\d; ]*$", word) is not None for word in said]
    last = max((i for i, yes in enumerate(is_number) if not yes), default=0) + 1
    if any(is_number[1:last]) and _covering(plainly(" ".join(said[:last]))) is None:
        last = is_number.index(True, 1)
    exact = (
        n for n in range(len(said), last, -1) if "".join(plainly(" ".join(said[:n]))) in names()
    )
    last = next(exact, last)
    return said[:last], tuple(said[last:])


def called(
    name: str, numbers: tuple[str, ...], given: dict[str, Any]
) -> tuple[Topic, dict[str, Any]]:
    """The topic and its values. A name of several words need not be quoted; numbers after it are
    for the first input."""
    words, numbers = _divided([name, *numbers])
    topic = find(" ".join(words))
    if numbers:
        first = next(iter(topic.inputs))
        if first in given or isinstance(topic.inputs[first], str):
            raise UsageError(f"{topic.name} takes {topic.takes()}; say each number once")
        given = {first: numbers, **given}
    return topic, topic.read(given)


def explained(
    name: str, numbers: tuple[str, ...], given: dict[str, Any], *, as_json: bool = False
) -> str:
    """The topic with the numbers of one call."""
    topic, values = called(name, numbers, given)
    words = " ".join(_divided([name, *numbers])[0])
    known = "".join(plainly(words)) in names()
    heads = [] if as_json or known else [f"taken as: {topic.name}"]
    if not as_json:
        heads += [f"{word}, here: {text}" for word, text in meanings(topic.name, words).items()]
    return "\n".join([*heads, described(topic, values, as_json)])


def described(topic: Topic, values: dict[str, Any], as_json: bool = False) -> str:
    """Question, formula, these values and the tables for them, code."""
    tables, formula = list(topic.compute(**values)), topic.formula.splitlines()
    if not as_json:
        said = "   ".join(f"{_flag(n)} {shown(value)}" for n, value in values.items())
        lines = [f"{topic.name}: {topic.question}", "", *(f"  {line}" for line in formula), ""]
        lines += [f"given: {said}", ""] if values else []
        lines += [f"{table.text()}\n" for table in tables]
        return "\n".join([*lines, *(f"code: {place}" for place in topic.code)])

    data = {
        "topic": topic.name,
        "question": topic.question,
        "formula": formula,
        "code": topic.code,
        "given": values,
        "tables": [asdict(table) for table in tables],
    }
    return json.dumps(strict(data), allow_nan=False)


def listed(as_json: bool = False) -> str:
    """Every topic with its question, by chapter."""
    asked = {each.name: each.question for each in TOPICS}
    if as_json:
        rows = [(c, n, asked[n], ts[n].split(", ")) for c, ts in CHAPTERS.items() for n in ts]
        return json.dumps([dict(zip(("chapter", "topic", "question", "words"), r)) for r in rows])
    wide = max(map(len, asked))
    parts = [
        "\n".join([chapter, *(f"  {name:<{wide}}  {asked[name]}" for name in topics)])
        for chapter, topics in CHAPTERS.items()
    ]
    return "\n\n".join([*parts, "regard explain TOPIC, with numbers of your own or without"])


# --- what topics share ----------------------------------------------------------------------------


def real(x: Sequence[float] | Matrix) -> Tensor:
    return torch.tensor(tuple(x), dtype=torch.float64)


def rows_of(name: str, x: Sequence[float] | Matrix, *, width: int = 0, count: int = 0) -> Tensor:
    """Numbers as a matrix: `width` numbers per row, or `count` rows."""
    what = f"rows of {width}" if width else f"{count} rows"
    if _nested(x):
        if (width or count) != (len(x[0]) if width else len(x)):  # type: ignore[arg-type]
            raise UsageError(f"--{name} {shown(x)} are not {what}; rows are divided by semicolons")
        return real(x)
    if len(x) % (width or count):
        raise UsageError(f"--{name} has {len(x)} numbers, which are not {what}")
    return real(x).view(-1, width) if width else real(x).view(count, -1)


def whole(name: str, value: float, least: int = 1, most: int = MOST) -> int:
    if value != int(value) or not least <= value <= most:
        wanted = f"give a whole number from {least} to {most:,}"
        raise UsageError(f"{_flag(name)} is {number(value)}; {wanted}")
    return int(value)


def positive(name: str, value: float) -> float:
    if not value > 0:
        raise UsageError(f"{_flag(name)} is {number(value)}; give a number above 0")
    return value


def fill(module: Module) -> Module:
    """Every weight by one rule, ((3i + 5j + n) mod 13 - 6) / 10 in row i and column j of the n-th:
    no randomness, and no symmetry that would hide a mistake. None of them is to be learned."""
    module.double().requires_grad_(False)
    for n, weight in enumerate(module.parameters()):
        i, j = (torch.arange(size) for size in weight.reshape(len(weight), -1).shape)
        weight.copy_((((3 * i[:, None] + 5 * j + n) % 13 - 6) / 10).view_as(weight))
    return module


def shown(value: Any) -> str:
    """A value of an input as one would type it."""
    if isinstance(value, str):
        return f'"{value}"'
    if _nested(value):
        return f'"{"; ".join(map(shown, value))}"'
    return " ".join(f"{x:.10g}" for x in (value if isinstance(value, tuple) else (value,)))


def _nested(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], tuple)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
