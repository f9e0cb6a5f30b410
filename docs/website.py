"""Writes the documentation as a site of plain HTML that needs no network and no server.

    make docs                       build/docs/index.html
    python docs/website.py --to DIR    another folder

Pages are the Markdown files of docs/ as they are, and what reference.py makes of the code. Files of the source that a
page links to become pages too. A link or an anchor that leads nowhere is an error."""

from __future__ import annotations

import argparse
import html
import json
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import jinja2  # noqa: E402
import reference  # noqa: E402
from markdown_it import MarkdownIt  # noqa: E402
from pygments import highlight  # noqa: E402
from pygments.formatters import HtmlFormatter  # noqa: E402
from pygments.lexers import get_lexer_by_name  # noqa: E402
from pygments.util import ClassNotFound  # noqa: E402

from regard.learn.explain import find  # noqa: E402
from regard.see.page import WEB, both  # noqa: E402

# Section -> pages: where each is written from, seen from the root of the checkout. A folder is all its pages.
SECTIONS = {
    "Start": ["docs/tutorial.md", "docs/guide.md"],
    "How to": ["docs/guides", "docs/scale.md"],
    "Reference": [
        "docs/reference/api.md", "docs/reference/settings.md", "docs/reference/model.md", "docs/reference/decoding.md",
        "docs/reference/commands.md", "docs/reference/presets.md", "docs/families.md",
        "docs/reference/words.md",
    ],
    "Mechanisms": ["docs/mechanisms"],
    "Experiments": ["docs/experiments", "bench/RESULTS.md", "bench/LOG.md"],
    "The texts": ["docs/texts.md", "docs/errata.md"],
    "The house": ["docs/architecture.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}  # fmt: skip
START = "docs/index.md"
# Sections that have many words, and are seldom what is looked for: by how much the search puts them behind others.
LAST = {"The house": 8, "Experiments": 4, "The texts": 4}
CODE = (".py", ".toml", ".c", ".h", ".js", ".sh", ".txt", ".json", "Makefile")


INLINE = HtmlFormatter(nowrap=True)


class Broken(Exception):
    """A link or an anchor that leads nowhere, or a page that cannot be made."""


@dataclass
class Page:
    """`path`: of its HTML in the site. `parts`: anchor, heading and words of each section, for the search."""

    source: str
    path: str
    title: str
    body: str
    section: str = ""
    parts: list[tuple[str, str, str]] = field(default_factory=list)
    headings: list[tuple[int, str, str]] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)


# --- Markdown to HTML -----------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """The address that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def markdown() -> MarkdownIt:
    return MarkdownIt("commonmark", {"highlight": coloured}).enable("table")


def coloured(code: str, language: str, _: Any = None) -> str:
    try:
        lexer = get_lexer_by_name(language or "text", stripnl=False)
    except ClassNotFound:
        return html.escape(code)
    return highlight(code, lexer, INLINE)


def spoken(token: Any) -> str:
    """What a reader sees of a piece of Markdown: without marks, addresses and comments."""
    if not token.children:
        return token.content
    seen = (
        c.content or " " * (c.type == "softbreak")
        for c in token.children
        if c.type != "html_inline"
    )
    return "".join(seen)


def render(text: str, source: str) -> Page:
    """A page out of Markdown; links are still as they are written there."""
    tokens = markdown().parse(re.sub(r"^<!--.*?-->\n+", "", text, flags=re.S))
    page, seen = Page(source, where(source), "", ""), {}
    words: list[str] = []
    title = None
    for token, after in zip(tokens, [*tokens[1:], None]):
        if token.type == "heading_open" and after is not None:
            title, said = after, spoken(after)
            name = anchor(said)
            seen[name] = seen.get(name, -1) + 1
            name = f"{name}-{seen[name]}" if seen[name] else name
            token.attrSet("id", name)
            page.headings.append((int(token.tag[1]), said, name))
            page.title = page.title or said
            words = []
            page.parts.append((name, said, ""))
        elif token.type in ("inline", "fence", "code_block") and page.parts and token is not title:
            words.append(spoken(token))
            name, said, _ = page.parts[-1]
            page.parts[-1] = name, said, " ".join(words)
    if not page.title:
        raise Broken(f"{source} has no heading")
    page.body = markdown().renderer.render(tokens, markdown().options, {})
    # A wide table or a long line scrolls by itself, and not the page with it.
    page.body = page.body.replace("<table>", '<div class="wide"><table>').replace(
        "</table>", "</table></div>"
    )
    page.body = re.sub(
        r"<table>(?=\s*<thead>\s*<tr>\s*<th>(?:key|flag)<)", '<table class="keys">', page.body
    )
    return page


def where(source: str) -> str:
    """The path in the site of what a file of the checkout becomes."""
    if source.endswith(".md"):
        path = source.removeprefix("docs/").removesuffix("README.md").removesuffix(".md").lower()
        return f"{path}index.html" if source.endswith("README.md") else f"{path}.html"
    return f"source/{source}.html" if source.endswith(CODE) else source.removeprefix("docs/")


# --- the pages ------------------------------------------------------------------------------------------------------


def made() -> dict[str, str]:
    """What the reference writes: source -> Markdown."""
    topics = {
        name: f"../mechanisms/{path.name}"
        for path in sorted((DOCS / "source").glob("*.md"), reverse=True)
        for name in (
            find(x).name
            for x in re.findall(r"^@(?:formula|explain) (\S+)", path.read_text("utf-8"), re.M)
        )
    }
    return {
        "docs/reference/api.md": reference.api_page(),
        "docs/reference/settings.md": reference.settings_page(),
        "docs/reference/model.md": reference.model_page(),
        "docs/reference/decoding.md": reference.decoding_page(),
        "docs/reference/commands.md": reference.commands_page(),
        "docs/reference/presets.md": reference.presets_page(),
        "docs/reference/words.md": reference.glossary_page(topics),
    }  # fmt: skip


def listed() -> dict[str, list[str]]:
    """Section -> sources. In a folder its README comes first, then the order of order.txt, then names."""
    order = (DOCS / "source" / "order.txt").read_text(encoding="utf-8").split()
    found: dict[str, list[str]] = {}
    for section, places in SECTIONS.items():
        for place in places:
            files = sorted((ROOT / place).glob("*.md")) if (ROOT / place).is_dir() else []
            rank = {name: i for i, name in enumerate(["README", *order])}
            files.sort(key=lambda path: (rank.get(path.stem, len(rank)), path.stem))
            names = [path.relative_to(ROOT).as_posix() for path in files]
            names = names or ([place] if place.endswith(".md") else [])
            found.setdefault(section, []).extend(names)
    return {section: names for section, names in found.items() if names}


def code_page(source: str) -> Page:
    """A file of the source: each line with a number, each definition with an anchor."""
    lines, named = (ROOT / source).read_text(encoding="utf-8").rstrip().split("\n"), set()
    for n, line in enumerate(lines):
        mark = re.match(r"(?: {4})?(?:def|class) (\w+)", line)
        name = f' id="{mark[1]}"' if mark and mark[1] not in named else ""
        named |= {mark[1]} if mark else set()
        lines[n] = f'<span class="n"{name}>{n + 1}</span>{html.escape(line)}'
    body = f"<h1>{source}</h1><pre class=code><code>{chr(10).join(lines)}</code></pre>"
    return Page(source, where(source), source, body, "Source")


LINK = re.compile(r'(<(?:a|img)\b[^>]*?\b(?:href|src)=")([^"]*)(")')


def pages() -> dict[str, Page]:
    """Every page by its source: those of the sections, and the files that they link to."""
    written = made()
    sources = {
        START: "",
        **{name: section for section, names in listed().items() for name in names},
    }
    found: dict[str, Page] = {}
    for source, section in sources.items():
        text = written.get(source) or (ROOT / source).read_text(encoding="utf-8")
        found[source] = render(text, source)
        found[source].section = section
    for source, page in list(found.items()):
        for target in (t for t in targets(page) if t not in found and (ROOT / t).is_file()):
            if target.endswith(CODE):
                found[target] = code_page(target)
            elif target.endswith(".md"):
                raise Broken(f"{source} links to {target}, which is in no section")
            else:
                page.pictures.append(target)
    for page in found.values():
        page.body = LINK.sub(lambda m, page=page: m[1] + moved(page, m[2], found) + m[3], page.body)
    return found


def targets(page: Page) -> Iterator[str]:
    for _, link, _ in LINK.findall(page.body):
        if not re.match(r"\w+:|#", link):
            yield place(page, link.partition("#")[0])


def place(page: Page, link: str) -> str:
    """A link of a page as a path in the checkout; a folder is its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page.source), link))
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def moved(page: Page, link: str, found: dict[str, Page]) -> str:
    """A link between files of the checkout as one between pages of the site."""
    if re.match(r"\w+:|#", link):
        return link
    file, hash_, name = link.partition("#")
    target = place(page, file)
    if target not in found and not (ROOT / target).is_file():
        raise Broken(f"{page.source} links to {link}, which is not there")
    return posixpath.relpath(where(target), posixpath.dirname(page.path) or ".") + hash_ + name


def build(to: Path) -> dict[str, Page]:
    found = pages()
    theme = jinja2.Environment(loader=jinja2.FileSystemLoader(DOCS / "theme"), autoescape=True)
    template = theme.get_template("page.html")
    groups = {s: [found[name] for name in names] for s, names in listed().items()}
    in_order = [page for group in groups.values() for page in group]
    for page in found.values():

        def link(path: str, page: Page = page) -> str:
            return posixpath.relpath(path, posixpath.dirname(page.path) or ".")

        at = in_order.index(page) if page in in_order else -1
        near = {
            "before": in_order[at - 1] if at > 0 else None,
            "after": in_order[at + 1] if 0 <= at < len(in_order) - 1 else None,
        }
        text = template.render(
            page=page, groups=groups, link=link, start=page.source == START, **near
        )
        path = to / page.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    for picture in {t for page in found.values() for t in page.pictures}:
        copy = to / where(picture)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / picture, copy)
    styles = HtmlFormatter(style="default").get_style_defs("pre")
    dark = HtmlFormatter(style="github-dark").get_style_defs("pre")
    sheets = (WEB / "colours.css", DOCS / "theme" / "site.css")
    css = "\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    code = f"{styles}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
    (to / "site.css").write_text(f"{both()}\n{code}\n{css}", encoding="utf-8")
    shutil.copyfile(DOCS / "theme" / "site.js", to / "site.js")
    index = "const INDEX = " + json.dumps(
        search_index(in_order), ensure_ascii=False, separators=(",", ":")
    )
    (to / "index.js").write_text(index + ";\n", encoding="utf-8", newline="\n")
    if wrong := broken(to):
        raise Broken("; ".join(wrong[:20]))
    return found


# --- search ---------------------------------------------------------------------------------------------------------


def plain(text: str) -> list[str]:
    """The words of a text as the search compares them: small letters and digits, singular."""
    found = re.findall(r"[^\W_]+", text.lower().replace("isation", "ization"))
    return [re.sub(r"(?<=\w{3})(?<!s)s$", "", word) for word in found]


def search_index(found: list[Page]) -> list[list[Any]]:
    """Address, page, heading and text of every section, and how much it gives way to others."""
    rows = []
    for page in found:
        last = LAST.get(page.section, 0)
        for name, heading, text in page.parts:
            text = " ".join(text.split())
            rows.append([f"{page.path}#{name}", page.title, heading, text, last])
    return rows


# --- what leads nowhere ---------------------------------------------------------------------------------------------


def broken(site: Path) -> list[str]:
    """Links of a site to a file or an anchor that is not there."""
    read = {
        p.relative_to(site).as_posix(): p.read_text(encoding="utf-8") for p in site.rglob("*.html")
    }
    anchors = {path: set(re.findall(r'<[^>]* id="([^"]*)"', text)) for path, text in read.items()}
    wrong = []
    for path, text in read.items():
        for link in dict.fromkeys(re.findall(r'<[^>]* (?:href|src)="([^"]*)"', text)):
            if re.match(r"https?:|data:", link):
                continue
            file, _, name = link.partition("#")
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(path), file)) if file else path
            )
            if not (site / target).is_file() or target.startswith(".."):
                wrong.append(f"{path}: {link} is not there")
            elif name and name not in anchors[target]:
                wrong.append(f"{path}: {link} has no such anchor")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the documentation as a site.")
    parser.add_argument(
        "--to", type=Path, default=ROOT / "build" / "docs", help="folder of the site"
    )
    options = parser.parse_args(arguments)
    shutil.rmtree(options.to, ignore_errors=True)
    try:
        found = build(options.to)
    except Broken as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(found)} pages: {options.to / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
