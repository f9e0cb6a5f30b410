"""A page from a list of blocks: one self-contained HTML file without script or network, or the same in Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markupsafe import Markup

from regard.report.svg import style
from regard.see.format import spark, visible
from regard.see.page import environment

Row = Sequence[object]
NUMBER = re.compile(r"-|-?[\d,.]+(e-?\d+)?[kMBT]?|nan|inf|-inf")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Block:
    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Heading(Block):
    text: str


@dataclass(frozen=True)
class Text(Block):
    """A paragraph; `strong`: what matters most on the page."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Table(Block):
    """`folded`: HTML shows it on request, under this name."""

    head: Row
    rows: Sequence[Row]
    folded: str = ""

    @cached_property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers and nothing else."""
        columns = [[str(row[i]) for row in self.rows] for i in range(len(self.head))]
        return [bool(cells) and all(map(NUMBER.fullmatch, cells)) for cells in columns]


@dataclass(frozen=True)
class Code(Block):
    text: str
    language: str = ""
    folded: str = ""

    @property
    def fence(self) -> str:
        """More backticks than any run of them inside."""
        return "`" * max(3, *(len(run) + 1 for run in re.findall("`+", self.text)), 0)


@dataclass(frozen=True)
class Figure:
    """A picture, what it is, and the same in numbers: a table for HTML, for Markdown curves by
    name, drawn in letters."""

    svg: str
    caption: str
    table: Table | None = None
    curves: Sequence[tuple[str, Sequence[float]]] = ()


@dataclass(frozen=True)
class Figures(Block):
    """Pictures beside each other; `small`: thumbnails."""

    items: Sequence[Figure]
    small: bool = False


def as_html(title: str, blocks: Sequence[Block]) -> str:
    constant = {"policy": POLICY, "light": style("light"), "dark": style("dark")}
    return _render("report.html", title, blocks, **{k: Markup(v) for k, v in constant.items()})


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    return _render("report.md", title, blocks)


def _render(name: str, title: str, blocks: Sequence[Block], **more: Markup) -> str:
    templates = environment(Path(__file__).parent)
    templates.filters |= {"plain": _plain, "spark": spark}
    return templates.get_template(name).render(title=title, blocks=blocks, **more)


def _plain(text: object) -> str:
    """Text that Markdown takes as nothing but text, on one line."""
    marked = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", visible(str(text).replace("\n", " ⏎ "), "\t"))
    return html.escape(marked, quote=False)
