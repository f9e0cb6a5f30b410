"""The documentation as a site: nothing leads nowhere, nothing is far, and the reference says what the code says."""

import importlib.util
import json
import posixpath
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import regard
from regard.cli.main import COMMANDS
from regard.cli.shared import parse
from regard.errors import UsageError
from regard.learn.explain import find

ROOT = Path(__file__).resolve().parents[1]


@cache
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_website", ROOT / "docs" / "website.py")
    assert spec is not None and spec.loader is not None
    module, before = importlib.util.module_from_spec(spec), sys.path[:]
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    builder().build(folder)
    return folder


def links(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [x for x in re.findall(r'<a [^>]*href="([^"]*)"', text) if not re.match(r"\w+:", x)]


def test_a_broken_link_or_anchor_is_told(site: Path, tmp_path: Path) -> None:
    assert builder().broken(site) == []
    (tmp_path / "a.html").write_text('<a href="b.html">b</a><a href="#c">c</a><h1 id="d">', "utf-8")
    (tmp_path / "e.html").write_text('<a href="a.html#d">d</a><img src="f.png">', "utf-8")
    assert sorted(builder().broken(tmp_path)) == [
        "a.html: #c has no such anchor",
        "a.html: b.html is not there",
        "e.html: f.png is not there",
    ]


def test_link_of_a_source_that_leads_nowhere_stops_the_build() -> None:
    page = builder().render("# A\n\n[b](nowhere.md)", "docs/a.md")
    with pytest.raises(builder().Broken, match="links to nowhere.md, which is not there"):
        builder().moved(page, "nowhere.md", {})


def test_no_page_is_over_three_clicks_away(site: Path) -> None:
    near, pages = {"index.html": 0}, {p.relative_to(site).as_posix() for p in site.rglob("*.html")}
    queue = ["index.html"]
    for path in queue:
        for link in links(site / path):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link.split("#")[0]))
            if link.split("#")[0] and target not in near:
                near[target] = near[path] + 1
                queue.append(target)
    assert set(near) == pages and max(near.values()) <= 3 and len(pages) > 100


def test_the_list_of_pages_has_every_page_of_docs(site: Path) -> None:
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")}
    sources -= {s for s in sources if s.startswith("docs/source/")}
    listed = {name for names in builder().listed().values() for name in names}
    assert sources - listed == {builder().START}


def test_site_needs_no_network(site: Path) -> None:
    for path in site.rglob("*"):
        if path.suffix in (".html", ".css", ".js"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r'(?:src|<link[^>]*href)="(?:https?:)?//', text), path
            if path.name in ("site.css", "site.js"):
                assert not re.search(r"fetch\(|XMLHttp|import |url\(|@import", text), path


def test_search_has_every_heading(site: Path) -> None:
    text = (site / "index.js").read_text(encoding="utf-8")
    rows = json.loads(text.removeprefix("const INDEX = ").rstrip(";\n"))
    assert len({row[0] for row in rows}) == len(rows) > 400
    for address, page, heading, text, _ in rows:
        file, _, name = address.partition("#")
        assert f'id="{name}"' in (site / file).read_text(encoding="utf-8")
        assert page and heading and text == " ".join(text.split())


def searched(site: Path, *texts: str) -> list[list[Any]]:
    """What the page's own script finds for each text: score, number, address, page, heading, pieces of the text."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    script = (site / "site.js").read_text(encoding="utf-8").partition("function show()")[0]
    script = re.sub(r"(?m)^const (root|query|hits) = .*$", "", script)
    index = (site / "index.js").read_text(encoding="utf-8")
    ask = f"console.log(JSON.stringify({json.dumps(texts)}.map(search)))"
    done = subprocess.run(
        [node, "-"], input=f"{index}\n{script}\n{ask}", capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_search_finds_the_guide_before_the_changelog(site: Path) -> None:
    """For every word that a page for readers has in a heading, such a page is first."""
    asked = [
        "fine-tune",
        "serve",
        "quantization",
        "lora",
        "resume",
        "chat template",
        "adapter",
        "beam search",
        "bf16",
    ]
    for text, found in zip(asked, searched(site, *asked), strict=True):
        first = found[0][2]
        assert not re.match(
            "changelog|contributing|architecture|bench/|experiments", first, re.I
        ), (text, first)
    (changes,) = searched(site, "changelog")
    assert changes[0][2].lower().startswith("changelog")


def test_search_shows_where_the_words_stand(site: Path) -> None:
    for text, found in zip(
        ("lora", "beam search"), searched(site, "lora", "beam search"), strict=True
    ):
        shown = [pieces for *_, heading, pieces in found if len(pieces) > 1]
        assert len(shown) > len(found) / 2
        for pieces in shown:
            assert all(any(m.lower().startswith(w) for w in text.split()) for m in pieces[1::2])
            assert len("".join(pieces)) < 200


def test_words_are_compared_as_people_write_them() -> None:
    assert builder().plain("Look-ahead Masks, (Quantisation) class") == [
        "look", "ahead", "mask", "quantization", "class",
    ]  # fmt: skip


# --- the reference ----------------------------------------------------------------------------------


@cache
def tables() -> dict[str, list[tuple[str, ...]]]:
    """Every table of settings by the name of its class."""
    reference = builder().reference
    models = ("Transformer", "EncoderDecoder", "Recurrent", "Seq2Seq", "Painter")
    roots = [reference.Config, *(getattr(regard, f"{name}Config") for name in models)]
    classes = [*reference.within(*roots), reference.Recipe, reference.Settings]
    return {cls.__name__: reference.rows(cls, reference.linked) for cls in classes}


def test_every_setting_has_a_type_a_default_and_a_meaning() -> None:
    assert sum(map(len, tables().values())) > 250
    empty = [f"{c}.{r[0]}" for c, rows in tables().items() for r in rows if not all(r)]
    assert not empty, f"say what it is in a comment beside the field: {empty}"


def test_settings_are_said_as_a_person_would() -> None:
    train = {name: rest for name, *rest in tables()["Train"]}
    assert train["steps"] == ["whole number, 1 or more", "`1000`", "optimiser steps"]
    assert train["clip"][:2] == ["number, more than 0 or none", "`1.0`"]
    assert train["optim"][:2] == ["[Optim](#optim)", "its defaults"]
    data = {name: rest for name, *rest in tables()["Data"]}
    assert data["train"][:2] == ["text or list: text", "needed"]
    assert data["header"][:2] == ["true or false or none", "none"]


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_are_those_of_the_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    reference = builder().reference
    cls: Any = reference.options_of(name)
    assert parse(cls, name, ["--help"]) is None
    said = re.sub(r"[│╭╮╰╯─\s]+", " ", capsys.readouterr().out)
    rows = reference.flags(cls)
    wanted = set(re.findall(r"(?<=[ ,])--[a-z][a-z-]+(?= )", said.partition("usage:")[2]))
    shown = {flag for row in rows for flag in re.findall("`(--.+?)`", row[0])}
    assert shown >= wanted - {"--help"}
    for flag, _, _, meaning in rows:
        words = " ".join(meaning.split())
        assert flag.split("`")[1] in said and words and words in said, (flag, words)


def test_every_public_name_is_explained(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in regard.__all__:
        assert f">regard.{name}</h3>" in page, name


def test_signature_is_that_of_the_code() -> None:
    text = builder().reference.signature("stream", regard.stream)
    assert text.startswith("```python\nstream(") and "prompt: Prompt" in text
    # Types stand as they are, not as strings.
    assert not re.search(r"(: |-> )'", text)


# --- words that others chose ------------------------------------------------------------------------


def words() -> list[str]:
    lines = (ROOT / "tests" / "words.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and line[0] not in "#-"]


def test_words_of_others_are_found(site: Path) -> None:
    """By `regard explain`, or by a section of the docs that has every word, as the search wants it."""
    text = (site / "index.js").read_text(encoding="utf-8")
    rows = json.loads(text.removeprefix("const INDEX = ").rstrip(";\n"))
    sections = [f" {' '.join(builder().plain(' '.join(row[1:4])))}" for row in rows]
    lost, explained = [], 0
    for term in words():
        try:
            find(term)
            explained += 1
        except UsageError:
            wanted = [f" {word}" for word in builder().plain(term)]
            if not any(all(word in section for word in wanted) for section in sections):
                lost.append(term)
    assert not lost and len(words()) > 100 and explained > 0.8 * len(words()), lost
