"""What README and docs/ name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/guide.md", "docs/architecture.md", "bench/RESULTS.md")
SHELVES = (
    "bench/RESULTS.md",
    "bench/LOG.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
)


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_exist(page: str) -> None:
    """Links from where the page is; `folder/file.py` from the checkout or the package."""
    prose = re.sub(r"```.*?```", "", text(page), flags=re.S)
    for link in re.findall(r"\]\(([^)\s#]+)\)", prose):
        assert ((ROOT / page).parent / link).exists(), link
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|md|png))`", prose):
        assert any((folder / name).is_file() for folder in (ROOT, ROOT / "regard")), name


def test_names_of_the_walk_exist() -> None:
    """`name` in `file.py`, as the walk of a token on a GPU has it."""
    pairs = re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", text("docs/architecture.md"))
    assert len(pairs) >= 8
    for name, file in pairs:
        source = (ROOT / "regard" / file).read_text(encoding="utf-8")
        for word in name.split("."):
            stands = rf"^ *(?:(?:class|def) {word}\b|{word}\b[^=\n]* = )"
            assert re.search(stands, source, re.M), f"{name} in {file}"


@pytest.mark.parametrize("page", SHELVES)
def test_lines_fit_a_screen(page: str) -> None:
    """At most 120 characters, tables too: these pages are read in an editor and in diffs."""
    long = [f"{page}:{i}" for i, line in enumerate(text(page).splitlines(), 1) if len(line) > 120]
    assert not long
