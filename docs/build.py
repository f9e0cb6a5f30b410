"""Writes docs/mechanisms from docs/source: pictures, formulas, code and numbers come from the
package itself.

    python docs/build.py            write the pages
    python docs/build.py --check    fail where a page on disk differs from what would be written

A source is Markdown with lines that begin with @:
    @question TOPIC         the question of a topic of `regard explain`
    @picture NAME WORDS     a picture of pictures.py, with its description
    @formula TOPIC          the topic's formula
    @code PATH::NAME        a function, class or method as it stands in the source
    @explain TOPIC ...      the tables that `regard explain TOPIC ...` prints
    @test PATH::NAME        a test that must exist
    @errata HEADING         a link to that part of docs/errata.md
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import pictures  # noqa: E402, F401  (these fill drawing.PICTURES)
import pictures_newest  # noqa: E402, F401
import pictures_parts  # noqa: E402, F401
from drawing import PICTURES, draw  # noqa: E402

from regard.learn.explain import explained, find  # noqa: E402

SECTIONS = ["Formula", "Code", "Example", "Cost", "Proof", "Common mistakes"]
UP = "../.."  # from a page to the root


class Drift(Exception):
    """A source that asks for what is not there, or a page that is not what it should be."""


# --- what the lines with @ become ---------------------------------------------------------------


def question(name: str) -> str:
    return f"> **{find(name).question}**"


def picture(text: str) -> str:
    name, _, words = text.partition(" ")
    if name not in PICTURES or not words:
        raise Drift(f"@picture {text}: no such picture, or no description")
    return f"![{words}](pictures/{name}.svg)"


def formula(name: str) -> str:
    return f"```text\n{find(name).formula}\n```"


def code(place: str) -> str:
    path, name = place.split("::")
    return f"`{name}` in [{path}]({UP}/{path})\n\n```python\n{source_of(path, name)}\n```"


def explain(line: str) -> str:
    name, *words = shlex.split(line)
    given: dict[str, list[str]] = {"numbers": []}
    at = "numbers"
    for word in words:
        if word.startswith("--"):
            at = word.removeprefix("--").replace("-", "_")
            given[at] = []
        else:
            given[at].append(word)
    numbers = tuple(given.pop("numbers"))
    texts = {n: value[0] if n in ("text", "reference") else value for n, value in given.items()}
    text = explained(name, numbers, texts)
    tables = text.partition("\ngiven: ")[2].partition("\n\n")[2].partition("\n\ncode: ")[0]
    return f"```console\n$ regard explain {line}\n...\n{tables}\n...\n```"


def test(place: str) -> str:
    path, name = place.split("::")
    source_of(path, name)
    return f"- [`{place}`]({UP}/{path})"


def errata(heading: str) -> str:
    found = (DOCS / "errata.md").read_text(encoding="utf-8")
    if f"\n## {heading}\n" not in found:
        raise Drift(f"docs/errata.md has no part {heading!r}")
    return (
        f"More mistakes, each with its test: [errata, {heading}](../errata.md#{anchor(heading)})."
    )


LINES = {
    "question": question,
    "picture": picture,
    "formula": formula,
    "code": code,
    "explain": explain,
    "test": test,
    "errata": errata,
}


def source_of(path: str, name: str) -> str:
    """A function, class or method of a file, `Class.method` being a method, as it is written there."""
    file = ROOT / path
    if not file.is_file():
        raise Drift(f"there is no file {path}")
    text = file.read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next((n for n in ast.iter_child_nodes(node) if _called(n) == part), None)
        if node is None:
            raise Drift(f"{path} has no {name}")
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _called(node: ast.AST) -> str:
    """The name that a definition or an assignment makes."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return target.id if isinstance(target, ast.Name) else ""
    return getattr(node, "name", "")


def anchor(heading: str) -> str:
    """The address that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# --- pages --------------------------------------------------------------------------------------


def page(name: str, text: str) -> str:
    found = re.findall(r"^## (.+)$", text, re.M)
    if found != SECTIONS:
        raise Drift(f"docs/source/{name}.md has the parts {found}; it needs {SECTIONS}")
    lines = []
    for line in text.strip().splitlines():
        if line.startswith("@"):
            word, _, rest = line[1:].partition(" ")
            if word not in LINES:
                raise Drift(f"docs/source/{name}.md: @{word} is unknown")
            line = LINES[word](rest)
        lines.append(line)
    note = f"<!-- written by docs/build.py from docs/source/{name}.md -->"
    end = (
        "[All mechanisms](README.md) · [Errata](../errata.md) · [Architecture](../architecture.md)"
    )
    return "\n".join([note, "", *lines, "", "---", "", end, ""])


def index(sources: dict[str, str]) -> str:
    """The table of all pages: title, formula, file."""
    rows = ["| mechanism | formula | code |", "|---|---|---|"]
    for name, text in sources.items():
        title = text.splitlines()[0].removeprefix("# ")
        topic = find(re.findall(r"^@formula (.+)$", text, re.M)[0])
        short = topic.formula.splitlines()[0].replace("|", "\\|")
        path = re.findall(r"^@code (.+?)::", text, re.M)[0]
        rows.append(f"| [{title}]({name}.md) | `{short}` | [{path}]({UP}/{path}) |")
    head = [
        "<!-- written by docs/build.py -->",
        "",
        "# The mechanisms, a page each",
        "",
        "Each page asks one question and answers it by a picture, a formula, the code as it runs, numbers computed",
        "when the page was made, the cost, the tests that prove it and the mistakes that are often made. Nothing on",
        "them is typed over: `python docs/build.py` writes them, and a test fails when code and pages differ.",
        "The same numbers in a terminal, with your own inputs: `regard explain`.",
        "",
    ]
    return "\n".join(
        [
            *head,
            *rows,
            "",
            "By the sections of the source texts: [texts](../texts.md). What they got wrong: [errata](../errata.md).",
            "",
        ]
    )


def build() -> dict[str, str]:
    """Every file of docs/mechanisms: name -> text."""
    order = (DOCS / "source" / "order.txt").read_text(encoding="utf-8").split()
    there = {path.stem for path in (DOCS / "source").glob("*.md")}
    if set(order) != there:
        raise Drift(f"docs/source/order.txt and its folder differ: {set(order) ^ there}")
    sources = {n: (DOCS / "source" / f"{n}.md").read_text(encoding="utf-8") for n in order}
    files = {f"{name}.md": page(name, text) for name, text in sources.items()}
    used = sorted(
        {n for text in sources.values() for n in re.findall(r"^@picture (\S+)", text, re.M)}
    )
    files |= {f"pictures/{name}.svg": draw(name) for name in used}
    return {"README.md": index(sources), **files}


def differences(files: dict[str, str], folder: Path) -> list[str]:
    """What on disk is not what would be written, what is missing, what is there beside it."""
    on_disk = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    wrong = [f"{name}: nothing writes it" for name in sorted(on_disk - set(files))]
    for name, text in files.items():
        if name not in on_disk:
            wrong.append(f"{name}: missing")
        elif not _same((folder / name).read_text(encoding="utf-8"), text):
            wrong.append(f"{name}: differs")
    return wrong


def _same(old: str, new: str) -> bool:
    """Equal, up to the last decimal of a picture's coordinates: processors round them differently."""
    if old == new or not new.startswith("<svg "):
        return old == new
    (words, places), (others, new_places) = (
        (re.split(r"\d+\.\d", x), [float(n) for n in re.findall(r"\d+\.\d", x)]) for x in (old, new)
    )
    return words == others and all(abs(a - b) < 0.15 for a, b in zip(places, new_places))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/mechanisms from docs/source.")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--to", type=Path, default=DOCS / "mechanisms", help="another folder")
    options = parser.parse_args(arguments)
    try:
        files = build()
    except Drift as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.check:
        wrong = differences(files, options.to)
        print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
        if wrong:
            print("the pages have drifted: run python docs/build.py", file=sys.stderr)
        return 1 if wrong else 0
    for name, text in files.items():
        path = options.to / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    print(f"{len(files)} files in {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
