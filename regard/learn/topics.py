"""What `regard explain` and the pages of docs/mechanisms tell of a mechanism: question, formula,
code, numbers.

A topic is a function with a docstring (the question, then the formula) whose parameters are the
numbers a reader may change and whose defaults are the example. It computes by the library's own
functions, in float64. Topics of models are in mechanisms.py, those of training and decoding in
training.py."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.errors import UsageError, nearest
from regard.see.format import number

Numbers = tuple[float, ...]
Matrix = tuple[Numbers, ...]
# A number, a text, or None where there is no number.
Cell = Any
Module = TypeVar("Module", bound=nn.Module)
# The most of a whole number that is given.
MOST = 1_000_000


@dataclass(frozen=True)
class Table:
    """Numbers in rows under named columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def text(self) -> str:
        columns = [_column(list(cells)) for cells in zip(*self.rows)] if self.rows else []
        whole = [[name, *cells] for name, cells in zip(self.columns, columns)]
        padded = [[cell.rjust(max(map(len, cells))) for cell in cells] for cells in whole]
        lines = [self.title, *("  ".join(row).rstrip() for row in zip(*padded))]
        return "\n".join(lines)


@dataclass(frozen=True)
class Topic:
    """`code`: path::name of what implements it, the most telling first. `inputs`: what may be
    given, with the example's values: a tuple of numbers, a tuple of rows, one number, or a text."""

    name: str
    question: str
    formula: str
    code: tuple[str, ...]
    inputs: dict[str, Any]
    compute: Callable[..., list[Table]]

    def read(self, given: Mapping[str, Sequence[float | str] | str]) -> dict[str, Any]:
        """What is given, and the example's values for the rest."""
        for name in given:
            if name not in self.inputs:
                raise UsageError(f"{self.name} has no --{_flag(name)}; it takes {self.takes()}")
        return {**self.inputs, **{name: self._read(name, value) for name, value in given.items()}}

    def tables(self, given: Mapping[str, Sequence[float | str] | str]) -> list[Table]:
        """The numbers for what is given."""
        return self.compute(**self.read(given))

    def takes(self) -> str:
        return ", ".join(f"--{_flag(name)}" for name in self.inputs)

    def _read(self, name: str, value: Any) -> Any:
        """A value as the example has it: rows, a tuple, a whole number, a number or a text. Rows
        may be given without semicolons, as one tuple that the topic divides."""
        example, flag = self.inputs[name], f"--{_flag(name)}"
        if isinstance(example, str):
            return value
        text = " ".join(map(str, value))
        if _nested(example) and ";" in text:
            return _matrix(flag, text)
        numbers = tuple(map(_number, text.split()))
        if not numbers or not all(map(math.isfinite, numbers)):
            raise UsageError(f"{flag} needs numbers, such as {flag} {shown(example)}")
        if isinstance(example, tuple):
            return numbers
        if len(numbers) > 1:
            raise UsageError(f"{self.name} takes one number for {flag}, got {len(numbers)}")
        return whole(name, numbers[0]) if isinstance(example, int) else numbers[0]


def topic(*code: str) -> Callable[[Callable[..., list[Table]]], Topic]:
    """A function as a topic: its name with dashes, its docstring as question and formula, its
    defaults as inputs."""

    def decorate(compute: Callable[..., list[Table]]) -> Topic:
        question, _, formula = inspect.cleandoc(compute.__doc__ or "").partition("\n")
        inputs = {n: p.default for n, p in inspect.signature(compute).parameters.items()}
        name = compute.__name__.strip("_").replace("_", "-")
        return Topic(name, question, formula.strip("\n"), code, inputs, compute)

    return decorate


def find(name: str, topics: Iterable[Topic], aliases: dict[str, str]) -> Topic:
    """The topic of this name; the nearest one is named where there is none."""
    known = {each.name: each for each in topics}
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    plain = aliases.get(plain, plain)
    if plain not in known:
        hint = nearest(plain, [*known, *aliases])
        raise UsageError(f"there is no topic {name!r:.60}; {hint} (regard explain lists them all)")
    return known[plain]


# --- what topics share --------------------------------------------------------------------------


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
        raise UsageError(
            f"--{_flag(name)} is {number(value)}; give a whole number from {least} to {most:,}"
        )
    return int(value)


def positive(name: str, value: float) -> float:
    if not value > 0:
        raise UsageError(f"--{_flag(name)} is {number(value)}; give a number above 0")
    return value


@torch.no_grad()
def fill(module: Module) -> Module:
    """Every weight by one rule, ((3i + 5j + n) mod 13 - 6) / 10 in row i and column j of the n-th:
    no randomness, and no symmetry that would hide a mistake."""
    module.double()
    for n, weight in enumerate(module.parameters()):
        i, j = (torch.arange(size) for size in weight.reshape(len(weight), -1).shape)
        weight.copy_((((3 * i[:, None] + 5 * j + n) % 13 - 6) / 10).view_as(weight))
    return module


def spread(x: Tensor) -> list[float]:
    """A vector as the cells of a row."""
    return [float(value) for value in x]


def shown(value: Any) -> str:
    """A value of an input as one would type it."""
    if isinstance(value, str):
        return f'"{value}"'
    if _nested(value):
        return f'"{"; ".join(map(shown, value))}"'
    return " ".join(f"{x:.10g}" for x in (value if isinstance(value, tuple) else (value,)))


def _nested(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], tuple)


def _matrix(flag: str, text: str) -> Matrix:
    """ "1 0; 0 1" -> its rows."""
    rows = tuple(tuple(map(_number, row.split())) for row in text.split(";") if row.strip())
    if len({len(row) for row in rows}) != 1 or not all(
        math.isfinite(x) for row in rows for x in row
    ):
        raise UsageError(f'{flag} needs rows of as many numbers each, such as {flag} "1 0; 0 1"')
    return rows


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r:.40} is no number; give numbers such as 1 -2.5 3e4") from None


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _column(cells: list[Cell]) -> list[str]:
    """Cells of one column in one form: whole numbers as they are, others with four places, tiny
    ones with a power."""
    whole = all(c == int(c) for c in cells if isinstance(c, float) and math.isfinite(c))
    return [_cell(c, whole) for c in cells]


def _cell(cell: Cell, whole: bool) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return "none"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int) or whole:
        return f"{int(cell):,}" if math.isfinite(cell) else str(cell)
    if cell and abs(cell) < 1e-3:
        return f"{cell:.3e}"
    text = f"{cell:.4f}"
    return "0.0000" if text == "-0.0000" else text
