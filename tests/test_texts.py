"""docs/texts.md: every section and listing of the five texts has a row, and what the rows name exists."""

import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from regard.cli.main import command_of, first_words
from regard.cli.shared import parse
from regard.errors import UsageError
from regard.learn.explain import called, find

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ROOT.parent / "shared" / "texts"
NAMES = ("S0", "S1", "S2", "S3", "S4")
# Headings that speak of the text itself, and stand without a subject.
NO_SUBJECT = {"contents", "references", "outline", "knowledge section", "interview questions",
              "theoretical questions", "practical coding questions"}  # fmt: skip


@cache
def rows() -> dict[str, list[list[str]]]:
    """The cells of the table of each text."""
    page = (ROOT / "docs" / "texts.md").read_text(encoding="utf-8")
    parts = {part[:2]: part for part in page.split("\n## ")[1:]}
    cells = {name: re.findall(r"^\| (.+) \|$", part, re.M) for name, part in parts.items()}
    return {
        name: [re.split(r" ?\| ?", line) for line in found[1:]] for name, found in cells.items()
    }


def cells(at: int) -> list[str]:
    return [row[at] for name in NAMES for row in rows()[name]]


def plain(heading: str) -> str:
    """Words in small letters: no formulas, no marks, no I, II and III at the end."""
    bare = re.sub(r"\$.*?\$|\\[a-z]+|[{}]", " ", heading)
    bare = re.sub(r"(?: I+V?)$", "", bare.strip())
    return " ".join(re.findall(r"[a-z0-9]+", bare.lower().replace("_", " ")))


def headings(name: str) -> list[tuple[str, str]]:
    """The headings and listings of a text: what the table calls each, and its words."""
    if not TEXTS.is_dir():
        pytest.skip("needs ../shared/texts, the texts beside the repository: not on this machine")
    text = next(TEXTS.glob(f"00{name[1]}_*.txt")).read_text(encoding="utf-8")
    inside, lines = False, []
    for line in text.splitlines():
        inside ^= line.startswith("```")
        lines.append("" if inside or line.startswith("```") else line.strip())
    listings = re.findall(r"^ {0,10}(?:def|class) ([A-Za-z]\w+)", text, re.M)
    found = [(f"`{each}`", each) for each in listings if each != "forward"]
    if name in ("S0", "S1"):
        titles = [line.lstrip("# ") for line in lines if re.match("#+ ", line)]
        numbers = [re.match(r"\d[\d.]*", title) for title in titles]
        return found + [(n[0].rstrip(".") if n else t, t) for n, t in zip(numbers, titles)]
    if name == "S3":
        slides = [line for line in lines if line]
        titles = [slides[i + 1] for i, line in enumerate(slides[:-1]) if line == "Notes"]
        return found + [(title, title) for title in titles]
    part, count = "", 1
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""]):
        if line in ("Theoretical Questions", "Practical & Coding Questions"):
            part, count = line.split()[-2].replace("Theoretical", "Theory"), 1
        elif part and re.match(rf"{count}\. [A-Z]", line) and "**" not in line:
            found.append((f"{part} {count}", line))
            count += 1
        alone = line and not before and not after and len(line) <= 80
        if not alone or re.search(r"[.:,;*?]$|\*\*|<|\t", line) or re.match(r"Step|Answer", line):
            continue
        if number := re.match(r"(\d|[a-d])\. [A-Z]", line):
            found.append((number[1] if number[1].isdigit() else f"4{number[1]}", line))
        elif re.match(r'"?[A-Z]|\(\d\)', line) and "$" not in re.sub(r"\$[^$]*\$$", "", line):
            found.append((line, line))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_heading_and_listing_has_a_row(name: str) -> None:
    found = headings(name)
    said = {each for row in rows()[name] for each in row[0].split("; ")}
    said |= {plain(each) for each in said} | {row[0].split()[0].rstrip(";") for row in rows()[name]}
    missing = [key for key, _ in found if key not in said and plain(key) not in said | NO_SUBJECT]
    assert len(found) >= 30 and not missing


@pytest.mark.parametrize("name", NAMES)
def test_every_heading_finds_a_topic(name: str) -> None:
    lost = []
    for _, title in headings(name):
        try:
            find(title)
        except UsageError:
            lost.append(plain(title))
    # Two headings of S4 have a subject only where they stand.
    assert set(lost) <= NO_SUBJECT | {"how they work together", "detailed explanation"}


def test_rows_have_a_name_a_command_and_a_page() -> None:
    for name in NAMES:
        for row in rows()[name]:
            assert len(row) == 5 and all(row[:4]), row


@pytest.mark.parametrize(
    "name", sorted({n for cell in cells(1) for n in re.findall(r"`(.+?)`", cell)})
)
def test_name_can_be_imported(name: str) -> None:
    place: Any = importlib.import_module("regard")
    path = "regard"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            place = getattr(place, part)
        except AttributeError:
            place = importlib.import_module(path)
    assert place is not None


@pytest.mark.parametrize("line", sorted({c.strip("`") for c in cells(2)}))
def test_command_can_be_typed(line: str) -> None:
    regard, verb, *rest = shlex.split(line)
    assert regard == "regard" and verb in first_words()
    assert not first_words()[verb] or rest[0] == first_words()[verb]
    options: Any = parse(command_of(verb)[0], verb, rest)
    if verb == "explain":
        given = {n: v for n, v in vars(options).items() if isinstance(v, tuple) and n != "numbers"}
        called(options.topic, options.numbers, given)
    if verb == "recipes":
        assert (ROOT / "regard" / "recipes" / f"{rest[1]}.toml").is_file()


def test_pages_and_errata_are_there_and_none_is_left_out() -> None:
    for link in {link for cell in cells(3) for link in re.findall(r"\]\((.+?)\)", cell)}:
        assert (ROOT / "docs" / link).is_file(), link
    known = set(
        re.findall(r"S[0-4]-\d\d", (ROOT / "docs" / "errata.md").read_text(encoding="utf-8"))
    )
    for name in NAMES:
        said = {number for row in rows()[name] for number in re.findall(r"S\d-\d\d", row[4])}
        wanted = {number for number in known if number.startswith(name)}
        assert said == wanted, (name, said ^ wanted)
