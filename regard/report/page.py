"""A page from a list of blocks: one self-contained HTML file without script or network, or the same in Markdown."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from regard.report.show import spark, visible
from regard.report.svg import DARK, LIGHT, colours

Row = Sequence[object]
KEPT = "\n\t"  # control characters that a page may have


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `strong`: what matters most on the page."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """`folded`: HTML shows it on request, under this name."""

    head: Row
    rows: Sequence[Row]
    folded: str = ""


@dataclass(frozen=True)
class Code:
    text: str
    language: str = ""
    folded: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture, what it is, and the same in numbers: a table for HTML, for Markdown curves by name, as lines of
    blocks."""

    svg: str
    caption: str
    table: Table | None = None
    curves: Sequence[tuple[str, Sequence[float]]] = ()


@dataclass(frozen=True)
class Figures:
    """Pictures beside each other; `small`: thumbnails."""

    items: Sequence[Figure]
    small: bool = False


Block = Heading | Text | Table | Code | Figure | Figures

STYLE = f"""
:root {{ color-scheme: light dark; --back: #fff; --ink: #1b1f24; --line: #d0d7de; --soft: #f3f5f7; {colours(LIGHT)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --back: #14171a; --ink: #e6e9ec; --line: #3d444d; --soft: #1f2429; {colours(DARK)} }}
}}
body {{ background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0; }}
main {{ max-width: 1060px; margin: 0 auto; padding: 1rem; }}
h1 {{ margin: .5rem 0; overflow-wrap: anywhere; }} h2 {{ margin: 2rem 0 .5rem; }}
.strong {{ font-size: 1.25rem; font-weight: 600; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: .5rem 0; }}
th, td {{ border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left; }}
th {{ white-space: nowrap; }}
td {{ white-space: pre-wrap; overflow-wrap: anywhere; min-width: 3ch; vertical-align: top; }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
pre {{ background: var(--soft); padding: .75rem; overflow-x: auto; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 1rem; }}
.small {{ grid-template-columns: repeat(auto-fill, minmax(104px, 1fr)); font-size: .8rem; line-height: 1.3; }}
figure {{ margin: 0; min-width: 0; }} figcaption {{ overflow-wrap: anywhere; }}
svg {{ width: 100%; height: auto; display: block; }}
summary {{ cursor: pointer; }}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def as_html(title: str, blocks: Sequence[Block]) -> str:
    body = "\n".join(_html(block) for block in blocks)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{_safe(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{_safe(title)}</h1>
{body}
</main>
</body>
</html>
"""


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    return "\n\n".join([f"# {_plain(title)}", *filter(None, map(_markdown, blocks))]) + "\n"


# --- HTML ---------------------------------------------------------------------------------------------------------


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h2>{_safe(block.text)}</h2>"
        case Text():
            kind = ' class="strong"' if block.strong else ""
            return f"<p{kind}>{_safe(block.text)}</p>"
        case Table():
            return _fold(block.folded, _html_table(block))
        case Code():
            return _fold(block.folded, f"<pre><code>{_safe(block.text)}</code></pre>")
        case Figure():
            table = _html(block.table) if block.table else ""
            caption = f"<figcaption>{_safe(block.caption)}</figcaption>"
            return f"<figure>{block.svg}{caption}{table}</figure>"
    inside = "\n".join(_html(item) for item in block.items)
    return f'<div class="grid{" small" if block.small else ""}">\n{inside}\n</div>'


def _html_table(table: Table) -> str:
    right = _right(table)

    def row(cells: Row, tag: str) -> str:
        found = []
        for cell, n in zip(cells, right):
            kind = ' class="n"' if n else ' dir="auto"'
            scope = ' scope="col"' if tag == "th" else ""
            found.append(f"<{tag}{kind}{scope}>{_safe(cell)}</{tag}>")
        return f"<tr>{''.join(found)}</tr>"

    body = "\n".join(row(cells, "td") for cells in table.rows)
    head = f"<thead>{row(table.head, 'th')}</thead>\n" if any(table.head) else ""
    return f'<div class="wide"><table>\n{head}<tbody>\n{body}\n</tbody></table></div>'


def _fold(name: str, inside: str) -> str:
    if not name:
        return inside
    return f"<details><summary>{_safe(name)}</summary>\n{inside}\n</details>"


def _safe(text: object) -> str:
    return html.escape(visible(text, KEPT))


def _right(table: Table) -> list[bool]:
    """Which columns hold numbers and nothing else."""
    pattern = re.compile(r"-|-?[\d,.]+(e-?\d+)?[kMBT]?|nan|inf|-inf")
    each = [[str(row[i]) for row in table.rows] for i in range(len(table.head))]
    return [bool(cells) and all(pattern.fullmatch(cell) for cell in cells) for cells in each]


# --- Markdown -----------------------------------------------------------------------------------------------------


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"## {_plain(block.text)}"
        case Text():
            text = _plain(block.text)
            return f"**{text}**" if block.strong else text
        case Table():
            return _markdown_table(block)
        case Code():
            fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", block.text)), 0)
            head = f"{_plain(block.folded)}:\n\n" if block.folded else ""
            return f"{head}{fence}{block.language}\n{visible(block.text, KEPT)}\n{fence}"
        case Figure():
            drawn = [f"  - `{spark(curve, 60)}` {_plain(name)}" for name, curve in block.curves]
            return "\n".join([f"- {_plain(block.caption)}", *drawn])
    return "\n".join(_markdown(item) for item in block.items)


def _markdown_table(table: Table) -> str:
    right = _right(table)

    def row(cells: Row) -> str:
        return "| " + " | ".join(_plain(cell) for cell in cells) + " |"

    rule = "|" + "|".join("---:" if n else "---" for n in right) + "|"
    return "\n".join([row(table.head), rule, *map(row, table.rows)])


def _plain(text: object) -> str:
    """Text that Markdown takes as nothing but text, on one line."""
    marked = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", visible(str(text).replace("\n", " ⏎ "), "\t"))
    return html.escape(marked, quote=False)
