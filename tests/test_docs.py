"""The pages of docs/mechanisms: what docs/build.py would write now, with links and tests that exist."""

import importlib.util
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from regard.cli.explain import Options
from regard.cli.shared import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "mechanisms"
PARTS = ["Formula", "Code", "Example", "Cost", "Proof", "Common mistakes"]


@cache
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.path[:]
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@cache
def built() -> dict[str, str]:
    return builder().build()


def pages() -> list[Path]:
    return sorted(PAGES.glob("*.md"))


def test_pages_are_what_the_code_says() -> None:
    """After a change of code or source: python docs/build.py."""
    drifted = builder().differences(built(), PAGES)
    assert not drifted, f"run python docs/build.py: {drifted}"
    assert not any(b"\r" in path.read_bytes() for path in PAGES.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", pages(), ids=lambda p: p.stem)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    for link in links:
        assert not re.match(r"\w+:", link), f"{link}: pages are read offline"
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve()
        assert target.is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in map(builder().anchor, headings), link


@pytest.mark.parametrize("path", pages(), ids=lambda p: p.stem)
def test_page_has_its_parts_in_order(path: Path) -> None:
    if path.stem == "README":
        return
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == PARTS
    head = text.split("## Formula")[0]
    assert head.count("# ") == 1 and "> **" in head and "](pictures/" in head
    assert "../errata.md" in text and "$ regard explain" in text
    proof = text.split("## Proof")[1].split("##")[0]
    assert len(re.findall(r"^- \[`tests/", proof, re.M)) >= 2
    mistakes = text.split("## Common mistakes")[1]
    assert len(re.findall(r"^- ", mistakes, re.M)) >= 3


@pytest.mark.parametrize("path", pages(), ids=lambda p: p.stem)
def test_tests_that_a_page_names_exist(path: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text(encoding="utf-8")):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), name


def test_commands_on_the_pages_can_be_typed() -> None:
    lines = [
        x for text in built().values() for x in re.findall(r"^\$ regard explain (.+)$", text, re.M)
    ]
    assert len(lines) >= 24
    for line in lines:
        options = parse(Options, "explain", shlex.split(line))
        assert options is not None and options.topic == line.split()[0]


SNIPPETS = [
    (path.stem, code)
    for path in sorted((ROOT / "docs" / "source").glob("*.md"))
    for code in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
]


@pytest.mark.parametrize(("name", "code"), SNIPPETS, ids=[name for name, _ in SNIPPETS])
def test_python_on_the_pages_runs(name: str, code: str) -> None:
    exec(compile(code, name, "exec"), {})


def test_index_lists_every_page() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[.+?\]\(([\w-]+)\.md\) \| `.+` \| \[", index, re.M)
    assert sorted(rows) == [p.stem for p in pages() if p.stem != "README"]
    assert len(rows) >= 24


def test_pictures_need_nothing_else() -> None:
    for name, text in built().items():
        if name.endswith(".svg"):
            assert text.startswith("<svg ") and "<title>" in text and "<script" not in text
            assert ElementTree.fromstring(text).get("width")
            assert not re.search(r'(?:href|src)="(?!data:)|url\(', text)
            assert "prefers-color-scheme: dark" in text


def test_code_on_a_page_is_the_source() -> None:
    source = builder().source_of("regard/mask.py", "Causal.see")
    assert source.startswith("def see(self") and source.endswith("return k <= q + self.ahead")
    assert builder().source_of("regard/mask.py", "Causal").startswith("@dataclass(frozen=True)\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("@code regard/mask.py::Nothing", "has no Nothing"),
        ("@code regard/nothing.py::x", "there is no file"),
        ("@test tests/test_docs.py::test_nothing", "has no test_nothing"),
        ("@picture nothing words", "no such picture"),
        ("@errata Nothing", "has no part"),
        ("@nothing x", "is unknown"),
    ],
)
def test_source_that_asks_for_what_is_not_there_is_refused(line: str, said: str) -> None:
    text = "\n".join(["# A", *(f"## {part}" for part in PARTS), line])
    with pytest.raises(builder().Drift, match=said):
        builder().page("a", text)


def test_page_without_a_part_is_refused() -> None:
    with pytest.raises(builder().Drift, match="it needs"):
        builder().page("a", "# A\n## Formula\n## Code")


def test_check_sees_a_changed_a_missing_and_a_foreign_file(tmp_path: Path) -> None:
    files = {"a.md": "a\n", "b.md": "b\n", "c.md": "c\n"}
    (tmp_path / "a.md").write_text("a\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("other\n", encoding="utf-8")
    (tmp_path / "d.md").write_text("d\n", encoding="utf-8")
    wrong = builder().differences(files, tmp_path)
    assert wrong == ["d.md: nothing writes it", "b.md: differs", "c.md: missing"]


def test_check_forgives_a_picture_its_last_decimal_alone(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text('<svg x="1.2"><text>3</text></svg>', encoding="utf-8")
    for text, wrong in (
        ('<svg x="1.3"><text>3</text></svg>', []),
        ('<svg x="1.4"><text>3</text></svg>', ["a.svg: differs"]),
        ('<svg x="1.2"><text>4</text></svg>', ["a.svg: differs"]),
    ):
        assert builder().differences({"a.svg": text}, tmp_path) == wrong


def test_command_writes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder(), "build", built)
    to = ["--to", str(tmp_path / "new")]
    assert builder().main([*to, "--check"]) == 1 and not (tmp_path / "new").exists()
    assert builder().main(to) == builder().main([*to, "--check"]) == 0
    (tmp_path / "new" / "rope.md").write_text("other", encoding="utf-8")
    assert builder().main([*to, "--check"]) == 1
