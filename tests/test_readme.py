"""What README and docs/ say can be typed, and what they name is there."""

import re
import shlex
from pathlib import Path

import pytest

from regard.cli.main import WORDS, command_of
from regard.cli.shared import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/guide.md", "docs/architecture.md", "bench/RESULTS.md")
COMMAND = r"(?:^|`)(regard [a-z][a-z-]*(?: [^`#\n]*)?)(?=`|#|$)"


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands() -> list[str]:
    found = [line for page in PAGES[:2] for line in re.findall(COMMAND, text(page), re.M)]
    return sorted({line.strip() for line in found if not line.strip().endswith("...")})


def test_every_command_is_on_the_page() -> None:
    shown = {line.split()[1] for line in commands()}
    assert set(WORDS) - shown <= {"tokenizer"} and shown <= set(WORDS)


@pytest.mark.parametrize("line", [x for x in commands() if len(x.split()) > 2])
def test_commands_can_be_typed(line: str) -> None:
    _, name, *rest = shlex.split(line)
    if WORDS[name]:
        assert rest.pop(0) == WORDS[name]
    assert parse(command_of(name)[0], name, rest) is not None or rest == ["--help-all"]


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
            assert re.search(rf"^ *(?:class|def) {word}\b", source, re.M), f"{name} in {file}"
