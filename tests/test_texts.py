"""docs/texts.md: every section and listing of the five texts has a row, and what the rows name exists."""

import importlib
import re
import shlex
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from regard.cli.main import command_of, first_words, main
from regard.cli.shared import parse
from regard.errors import UsageError
from regard.learn.explain import CHAPTERS, MEANINGS, called, explained, meanings, plainly, users

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("S0", "S1", "S2", "S3", "S4")


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


def headings() -> list[tuple[str, str, str, str]]:
    """Text, row of docs/texts.md, topic and heading, as tests/headings.txt has them."""
    lines = (ROOT / "tests" / "headings.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split(" | ", 3) for line in lines if not line.startswith("#")]
    return [(text, row, topic, heading) for text, row, topic, heading in found]


def taken(*said: str) -> str:
    """The topic of these words, or why there is none."""
    try:
        return called(said[0], said[1:], {})[0].name
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("name", NAMES)
def test_every_heading_and_listing_has_a_row(name: str) -> None:
    keys = [row for text, row, _, _ in headings() if text == name and row != "-"]
    said = {each for row in rows()[name] for each in row[0].split("; ")}
    said |= {plain(each) for each in said} | {row[0].split()[0].rstrip(";") for row in rows()[name]}
    missing = [key for key in keys if key not in said and plain(key) not in said]
    assert len(keys) >= 30 and not missing


WAYS: dict[str, Callable[[str], list[str]]] = {
    "quoted": lambda heading: [heading],
    "unquoted": str.split,
    "small letters": lambda heading: heading.lower().split(),
    "capitals": lambda heading: re.sub(r"\\[a-z]+", "", heading).upper().split(),
    "without marks": lambda heading: re.findall(r"\w+", re.sub(r"\\[a-z]+", "", heading)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_every_heading_finds_its_topic(name: str, way: str) -> None:
    wanted = {h: topic for text, _, topic, h in headings() if text == name}
    found = {heading: taken(*WAYS[way](heading)) for heading in wanted}
    assert {h: topic for h, topic in found.items() if topic != wanted[h]} == {}


@pytest.mark.parametrize(
    ("said", "nearest"),
    [
        ("sofmax", "softmax"),
        ("rotary possition", "rope"),
        ("flash atention", "flash-attention"),
        ("kv cahce", "kv-cache"),
        ("label smothing", "label-smoothing"),
        ("softmax one", "softmax"),
        ("weather of london", ""),
        ("position of the moon", ""),
    ],
)
def test_mistype_is_refused_with_the_nearest_names(said: str, nearest: str) -> None:
    for words in ([said], said.split(), said.upper().split()):
        why = taken(*words)
        assert why.startswith("there is no topic") and nearest in why.partition("nearest are")[2]


def test_topic_that_no_row_names_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "Dropout", "Policies"]) == 0
    assert capsys.readouterr().out.startswith("taken as: dropout\ndropout: Why")
    assert main(["explain", "FlashAttention"]) == 0
    assert capsys.readouterr().out.startswith("flash-attention: Why")


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


# --- a word for a topic stands where it leads --------------------------------------------------------


@cache
def written(topic: str) -> set[str]:
    """The words of what is printed of a topic, and of its pages in docs, and their beginnings: scaled, scaling."""
    pages = [explained(topic, (), {})]
    for source in (ROOT / "docs" / "source").glob("*.md"):
        if re.search(rf"^@(formula|question|explain) {topic}\b", source.read_text("utf-8"), re.M):
            page = ROOT / "docs" / "mechanisms" / source.name
            pages.append(page.read_text(encoding="utf-8"))
    # CamelCase and names_with_dashes are several words.
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", " ".join(pages)).replace("_", " ")
    words = plainly(text)
    return {"".join(pair) for pair in pairwise(words)} | {
        word[:end] for word in words for end in (*range(4, len(word)), len(word))
    }


def stands(word: str, topic: str) -> bool:
    return {word, word[: max(4, len(word) - 3)]} & written(topic) != set()


WORDS = {name: others.split(", ") for ts in CHAPTERS.values() for name, others in ts.items()}


@pytest.mark.parametrize("topic", WORDS)
def test_word_for_a_topic_stands_on_its_page_or_has_a_plain_form_that_does(topic: str) -> None:
    """But for words that three topics or more have in common, such as `model`: none of these tells where it leads."""
    rows = [row for row in WORDS[topic] if "".join(plainly(row)) not in written(topic)]
    own = {w for row in rows for w in plainly(row) if len(users()[w]) < 3}
    unsaid = {w for w in own if not stands(w, topic) and not meanings(topic, w)}
    forms = MEANINGS.get(topic, {}).items()
    elsewhere = {n: x for n, x in forms if not all(stands(w, topic) for w in plainly(x))}
    assert (unsaid, elsewhere) == (set(), {})


def test_plain_forms_are_of_words_that_lead_to_their_topic() -> None:
    assert MEANINGS.keys() <= WORDS.keys()
    for topic, forms in MEANINGS.items():
        known = {w for row in WORDS[topic] for w in plainly(row)}
        # Nothing is declared that nobody could type, and nothing that the page says itself.
        assert {n for n in forms if not set(plainly(n)) <= known} == set(), topic
        assert {n for n in forms if all(stands(w, topic) for w in plainly(n))} == set(), topic


def test_plain_form_of_a_word_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "nucleus", "sampling"]) == 0
    assert capsys.readouterr().out.startswith("nucleus, here: top-p\ndecoding: How")
