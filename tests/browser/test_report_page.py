"""The report of a run in a real browser: narrow and wide, light and dark, by keys, in any script."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.report.compare import comparison
from regard.report.folder import read
from regard.report.page import as_html
from regard.report.run import Map, report
from tests.browser.pages import contrast, opened, rgb
from tests.look.synthetic import events, make

SHOTS = os.environ.get("REGARD_SHOTS")  # a folder for screenshots
SIZE = "[document.documentElement.scrollWidth, window.innerWidth]"
TEXTS = {
    "Guten Morgen": ("صباح", "صباح الخير", "صباح الخير"),
    "今天天气很好，我们去公园散步吧。": (
        "The the",
        "The weather is nice",
        "The weather is nice today",
    ),
    "नमस्ते दुनिया": ("你好", "你好世界", "世界你好"),
    "Once upon": ("ooooo" * 40, "a time\nthere was", "a time"),
}


def made(folder: Path) -> str:
    texts = [
        {"step": 100 * (k + 1), "source": source, "text": said[k], "reference": said[2]}
        for source, said in TEXTS.items()
        for k in (0, 1)
    ]
    run = read(make(folder / "a run", texts=texts, changes={"train.schedule.warmup": "40" * 30}))
    maps = [
        Map(
            "decoder.0.self", head, ["he", "said", "مرحبا"], ["he", "said", "مرحبا"], np.array(rows)
        )
        for head, rows in enumerate([[[1.0, 0, 0], [0.2, 0.8, 0], [0.1, 0.2, 0.7]]] * 9)
    ]
    return as_html(run.name, report(run, maps, "Step 300."))


def compared(folder: Path) -> str:
    runs = [read(make(folder / name, events(60, lift))) for name, lift in (("a", 0), ("b", 0.5))]
    return as_html("Compared: a, b", comparison(runs))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("kind", [made, compared])
def test_report_fits_and_can_be_read(
    browser: Any, tmp_path: Path, kind: Any, width: int, scheme: str
) -> None:
    page = kind(tmp_path)
    with opened(browser, tmp_path, page, width=width, color_scheme=scheme) as tab:
        wide, room = tab.evaluate(SIZE)
        assert wide <= room, "the page scrolls sideways"
        ground = rgb(tab, "body", "backgroundColor")
        assert (sum(ground) > 380) == (scheme == "light")
        for part in ("h1", ".strong", ".tile dt", ".tile dd", ".card h3", ".shown", "svg text"):
            if tab.locator(part).count():
                boxed = part.startswith((".tile", ".card"))
                behind = rgb(tab, part.split()[0], "backgroundColor") if boxed else ground
                assert contrast(rgb(tab, part, "color"), behind) >= 4.5, part
        # Pictures of the other scheme are not there.
        shown = "es => new Set(es.map((e) => getComputedStyle(e).display)).size"
        for form in ("image.light", "image.dark") if kind is made else ():
            assert tab.locator(form).evaluate_all(shown) == 1
            assert tab.locator(form).first.is_visible() == form.endswith(scheme)
        if SHOTS:
            tab.screenshot(path=f"{SHOTS}/{kind.__name__}-{width}-{scheme}.png", full_page=True)


def test_the_figures_one_wants_first_are_seen_without_scrolling(
    browser: Any, tmp_path: Path
) -> None:
    with opened(browser, tmp_path, made(tmp_path), width=360) as tab:
        for tile in tab.locator(".tile").all():
            box = tile.bounding_box()
            assert box["y"] + box["height"] < 900
            inner = tile.evaluate("e => [e.scrollWidth, e.clientWidth]")
            assert inner[0] <= inner[1]
        tops = [tab.locator(name).first.bounding_box()["y"] for name in (".tiles", ".curve")]
        assert tops[0] < tops[1] < 900


def test_log_axis_is_switched_by_key(browser: Any, tmp_path: Path) -> None:
    with opened(browser, tmp_path, made(tmp_path)) as tab:
        loss = tab.locator("figure").first
        assert loss.locator(".linear").is_visible() and not loss.locator(".log").is_visible()
        tab.keyboard.press("Tab")
        outline = "getComputedStyle(document.activeElement).outlineWidth"
        assert tab.evaluate(outline) == "3px"
        tab.keyboard.press("Space")
        assert loss.locator(".log").is_visible() and not loss.locator(".linear").is_visible()
        loss.get_by_text("log axis").click()
        assert loss.locator(".linear").is_visible()


def test_samples_stand_beside_each_other_in_their_direction(browser: Any, tmp_path: Path) -> None:
    with opened(browser, tmp_path, made(tmp_path)) as tab:
        boxes = [card.bounding_box() for card in tab.locator(".cards").first.locator(".card").all()]
        assert len(boxes) == 3 and len({box["y"] for box in boxes}) == 1
        direction = "es => es.map((e) => getComputedStyle(e).direction)"
        found = tab.locator(".card p").evaluate_all(direction)
        assert found[:3] == ["rtl"] * 3 and set(found[3:]) == {"ltr"}
        assert "Noto Sans Arabic" in tab.evaluate("getComputedStyle(document.body).fontFamily")
    with opened(browser, tmp_path, made(tmp_path / "narrow"), width=360) as tab:
        for card in tab.locator(".card").all():
            inner = card.evaluate("e => [e.scrollWidth, e.clientWidth]")
            assert inner[0] <= inner[1]
