"""The documentation's site in a real browser, from its files: light and dark, narrow and wide, and its search."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_site import builder

PAGES = ("index", "tutorial", "mechanisms/masks", "reference/settings", "reference/api", "errata")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    builder().build(folder)
    return folder


@pytest.fixture(params=[(360, "light"), (360, "dark"), (1440, "light"), (1440, "dark")], ids=str)
def page(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    width, scheme = request.param
    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
    found = context.new_page()
    found.wrong = []
    found.on("pageerror", lambda error: found.wrong.append(str(error)))
    found.on("requestfailed", lambda request: found.wrong.append(request.url))
    yield found
    assert not found.wrong
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_and_can_be_read(page: Any, site: Path, name: str) -> None:
    page.goto(f"file://{site}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    style = "getComputedStyle(document.body)"
    ink, paper = (page.evaluate(f"{style}.{x}") for x in ("color", "backgroundColor"))
    lights = [sum(map(int, x[4:-1].split(","))) for x in (ink, paper)]
    assert abs(lights[0] - lights[1]) > 450, (ink, paper)
    assert page.locator("main h1").count() == 1


def test_search_finds_by_heading_and_by_word(page: Any, site: Path) -> None:
    page.goto(f"file://{site}/mechanisms/masks.html")
    for words, first in (
        ("look-ahead mask", "Masks"),
        ("RoPE", "Rotary positions (RoPE)"),
        ("train.optim lr", "Optim: train.optim"),
        ("paged attention", "paged-cache"),
    ):
        page.keyboard.press("/")
        page.fill("#query", words)
        assert first in page.locator("#hits a").all_inner_texts()[0].split("\n"), words
    page.keyboard.press("Enter")
    page.wait_for_url("**/reference/words.html#paged-cache")
    page.fill("#query", "xyzzyxyzzy")
    assert "No section has any" in page.inner_text("#hits")
    page.keyboard.press("Escape")
    assert page.locator("#hits").is_hidden()
