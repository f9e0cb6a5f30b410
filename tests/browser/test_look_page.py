"""The page of regard look in a real browser: its numbers, by mouse and by keys, light and dark, narrow and wide.

Needs Playwright (pip install 'regard[browser]') and a Chromium of the system; `make test-browser` runs this alone.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.look.trace import Full, Given, Picture, View, trace
from regard.look.view import Panel, page

api = pytest.importorskip(
    "playwright.sync_api", reason="needs Playwright: pip install 'regard[browser]'"
)
CHROMIUM = (
    os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt install chromium, or CHROMIUM=its path"
)
SMALL: dict[str, Any] = dict(layers=3, dim=24, heads=3, ffn_dim=20)
TEXT = ["the", "king", "said", "to", "the", "queen", "that", "he", "would", "<b>not</b>", "go"]
SHOTS = os.environ.get("REGARD_SHOTS")  # a folder for screenshots


# --- pages to open ------------------------------------------------------------------------------------------------


def loud(model: Any) -> Any:
    for p in model.parameters():
        if p.dim() > 1:
            p.data.mul_(4.0)
    return model.eval()


def decoder(words: list[str], asked: tuple[int, int] = (0, 0), **changes: Any) -> list[View]:
    torch.manual_seed(1)
    model = loud(regard.build("gpt2", vocab=50, max_len=1100, **{**SMALL, **changes}))
    return trace(model, Given(torch.randint(50, (1, len(words))), words), *asked)


def encoder_decoder() -> list[View]:
    torch.manual_seed(2)
    model = loud(regard.build("t5-small", vocab=50, **SMALL))
    source, target = (
        ["der", "Hund", "spielt", "im", "Park", "</s>"],
        ["the", "dog", "plays", "</s>"],
    )
    ids = torch.randint(50, (1, 4)), torch.randint(50, (1, 6))
    return trace(model, Given(ids[0], ["<s>", *target[:-1]], ids[1], source, target))


def vision() -> list[View]:
    torch.manual_seed(3)
    model = loud(regard.build("vit-base", size=32, patch=8, labels=3, **SMALL))
    across, down = np.meshgrid(np.arange(32), np.arange(32))
    pixels = np.stack([across * 8, down * 8, (across - down) % 32 * 8], -1).astype(np.uint8)
    names = ["class", *(f"{i},{j}" for i in range(1, 5) for j in range(1, 5))]
    given = Given(torch.randn(1, 3, 32, 32), names, picture=Picture(pixels, 8, 1))
    return trace(model, given)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def opened(
    browser: Any, path: Path, panels: list[Panel], *, width: int = 1440, hash: str = "", **more: Any
) -> Iterator[Any]:
    """A tab with the page, from disk; any request, error or word on the console fails the test."""
    file = path / "page.html"
    file.write_text(page("a page", panels), encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, **more)
    tab, wrong = context.new_page(), []
    tab.on("console", lambda said: wrong.append(said.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda r: r.url.startswith(file.as_uri()) or wrong.append(r.url))
    tab.goto(file.as_uri() + hash)
    tab.wait_for_selector("html[data-ready]")
    yield tab
    assert not wrong, wrong
    context.close()


def readout(tab: Any, panel: int = 0) -> str:
    return tab.locator(".readout").nth(panel).inner_text()


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("-∞", "-inf").replace("–", "nan"))


def bars(tab: Any) -> list[list[str]]:
    rows = tab.locator(".bars tbody tr").all()
    return [[cell.inner_text() for cell in row.locator("th, td").all()] for row in rows]


def full(view: View, layer: int, head: int) -> Full:
    found = view.layers[layer].heads[head]
    assert isinstance(found, Full)
    return found


def cell(tab: Any, row: int, column: int, view: View) -> dict[str, float]:
    """Where a cell of a map that is shown whole lies on its canvas."""
    place = tab.evaluate(
        "(() => { const c = document.querySelector('.map'); return [c.clientWidth, c.clientHeight]; })()"
    )
    side = (
        34  # the largest a cell gets; cells end at the right and lower edge, tokens are before them
    )
    return {
        "x": place[0] - 1 - side * (len(view.columns) - column - 0.5),
        "y": place[1] - 1 - side * (len(view.rows) - row - 0.5),
    }


# --- numbers ------------------------------------------------------------------------------------------------------


def test_rows_of_the_page_are_the_librarys(browser: Any, tmp_path: Path) -> None:
    (view,) = views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.1.2.7.0") as tab:
        head, scale = full(view, 1, 2), view.layers[1].scale
        assert head.raw is not None
        rows = bars(tab)
        assert [row[0] for row in rows] == TEXT
        for j, (_, _, raw, scaled, masked, softmax) in enumerate(rows):
            assert number(raw) == pytest.approx(head.raw[7, j], abs=6e-4)
            assert number(scaled) == pytest.approx(head.raw[7, j] * scale, abs=6e-4)
            assert number(masked) == pytest.approx(head.score[7, j], abs=6e-4)
            assert number(softmax) == pytest.approx(head.weight[7, j], abs=6e-5)
        assert "sum to 1.0000" in tab.locator(".bars caption").inner_text()


@pytest.mark.parametrize("measure", ["weight", "score", "norm"])
def test_table_of_the_map_has_every_value(browser: Any, tmp_path: Path, measure: str) -> None:
    (view,) = views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.0.1.3.0") as tab:
        tab.check(f"input[value={measure}]")
        tab.get_by_label("show as table").check()
        rows = tab.locator(".values tbody tr").all()
        found = [[number(c.inner_text()) for c in row.locator("td").all()] for row in rows]
        head = full(view, 0, 1)
        expected = {"weight": head.weight, "score": head.score, "norm": head.weight * head.norm}
        seen = np.where(np.isneginf(head.score), np.nan, expected[measure])
        np.testing.assert_allclose(
            found, seen, atol=6e-4 if measure == "score" else 6e-5, rtol=0.06
        )


def test_mean_of_heads_and_hidden_first_token(browser: Any, tmp_path: Path) -> None:
    (view,) = views = decoder(TEXT)
    mean = np.mean([full(view, 2, h).weight for h in range(3)], 0)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.2.0.9.4") as tab:
        tab.get_by_label("average the heads").check()
        assert number(readout(tab).split()[-1]) == pytest.approx(mean[9, 4], abs=6e-5)
        assert "mean of its heads" in tab.locator(".large h3").inner_text()
        tab.get_by_label("hide the first token").check()
        assert [row[0] for row in bars(tab)] == TEXT[1:]
        most = tab.locator(".scale span").last.inner_text().split()[0]
        seen = np.where(np.triu(np.ones_like(mean), 1) > 0, 0, mean)[:, 1:]
        assert number(most) == pytest.approx(seen.max(), abs=6e-4)


def test_pixels_are_the_palette_of_the_values(browser: Any, tmp_path: Path) -> None:
    """A darker cell is a larger weight, on a light page."""
    (view,) = views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.0.0.0.0") as tab:
        script = """() => { const c = document.querySelector(".thumb");
            return [c.width, c.height, Array.from(c.getContext("2d").getImageData(0, 0, c.width, c.height).data)]; }"""
        wide, high, pixels = tab.evaluate(script)
        light = np.array(pixels).reshape(high, wide, 4)[..., :3].sum(-1)
        weight = full(view, 0, 0).weight
        assert (wide, high) == (len(TEXT), len(TEXT))
        order = [
            light[i, j]
            for w, i, j in sorted((weight[i, j], i, j) for i in range(high) for j in range(i + 1))
        ]
        assert all(a >= b - 3 for a, b in pairwise(order))


# --- by mouse and by keys -----------------------------------------------------------------------------------------


def test_keys_move_the_cell_and_it_is_said(browser: Any, tmp_path: Path) -> None:
    (view,) = views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.1.0.2.1") as tab:
        tab.locator(".map").focus()
        weight = full(view, 1, 0).weight
        for key, row, column in [
            ("ArrowDown", 3, 1),
            ("ArrowLeft", 3, 0),
            ("ArrowUp", 2, 0),
            ("ArrowRight", 2, 1),
            ("End", 2, len(TEXT) - 1),
            ("Home", 2, 0),
            ("PageDown", len(TEXT) - 1, 0),
        ]:
            tab.keyboard.press(key)
            said = tab.locator("#live").inner_text()
            assert f"row {TEXT[row]}" in said and f"column {TEXT[column]}" in said, key
            end = "masked" if column > row else f"{weight[row, column]:.4f}"
            assert said.endswith(end) or number(said.split()[-1]) < 1e-4
            assert readout(tab) == said
            assert f"at0=self.1.0.{row}.{column}" in tab.url


def test_every_head_is_reached_by_keys_from_one_tab_stop(browser: Any, tmp_path: Path) -> None:
    views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.0.0.2.1") as tab:
        assert tab.locator(".thumb[tabindex='0']").count() == 1
        tab.locator(".thumb[tabindex='0']").focus()
        for key, place in [
            ("ArrowRight", "layer 0, head 1"),
            ("ArrowDown", "layer 1, head 1"),
            ("End", "layer 1, head 2"),
            ("ArrowDown", "layer 2, head 2"),
            ("Home", "layer 2, head 0"),
            ("ArrowUp", "layer 1, head 0"),
        ]:
            tab.keyboard.press(key)
            assert place in tab.locator(".large h3").inner_text()
            assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == place


def test_mouse_shows_on_hover_and_keeps_on_click(browser: Any, tmp_path: Path) -> None:
    (view,) = views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.1.1.2.1") as tab:
        tab.locator(".map").hover(position=cell(tab, 8, 3, view))
        assert "row would, column to" in readout(tab) and "at0=self.1.1.2.1" in tab.url
        tab.mouse.move(1, 1)
        assert "row said, column king" in readout(tab)
        tab.locator(".map").click(position=cell(tab, 8, 3, view))
        assert (
            "at0=self.1.1.8.3" in tab.url and "would" in tab.locator(".bars caption").inner_text()
        )
        tab.locator(".thumb").nth(8).click()
        assert "layer 2, head 2" in tab.locator(".large h3").inner_text()
        tab.locator(".bars tbody tr").nth(5).click()
        assert "at0=self.2.2.8.5" in tab.url


def test_views_by_mouse_and_by_keys_and_back(browser: Any, tmp_path: Path) -> None:
    views = encoder_decoder()
    with opened(browser, tmp_path, [Panel("m", "", views)]) as tab:
        title = tab.locator(".large h3")
        assert "Cross-attention" in title.inner_text()
        tab.get_by_role("radio", name="Encoder").check()
        assert "Encoder" in title.inner_text() and tab.locator(".bars tbody tr").count() == 6
        tab.get_by_role("radio", name="Encoder").focus()
        tab.keyboard.press("ArrowRight")
        assert "Decoder" in title.inner_text() and tab.locator(".bars tbody tr").count() == 4
        tab.go_back()
        assert "Encoder" in title.inner_text()
        tab.go_back()
        assert "Cross-attention" in title.inner_text()
        assert tab.locator("input[value=cross]").is_checked()
        assert "+ bias, masked" not in tab.locator(".bars thead").inner_text()
        tab.get_by_role("radio", name="Encoder").check()
        assert "+ bias, masked" in tab.locator(".bars thead").inner_text()


def test_a_view_in_the_address_is_opened(browser: Any, tmp_path: Path) -> None:
    (view,) = views = decoder(TEXT)
    hash = "#measure=norm&first=hidden&order=value&at0=self.2.1.6.3"
    with opened(browser, tmp_path, [Panel("m", "", views)], hash=hash) as tab:
        assert "layer 2, head 1" in tab.locator(".large h3").inner_text()
        assert tab.get_by_label("hide the first token").is_checked()
        assert tab.locator("input[value=norm]").is_checked()
        head = full(view, 2, 1)
        expected = (head.weight * head.norm)[6]
        best = 1 + int(expected[1:].argmax())
        assert bars(tab)[0][0] == TEXT[best]


@pytest.mark.parametrize("hash", ["#at0=none.9.x.-3", "#at0=self.99.99.99.99", "#measure=%00&at0="])
def test_an_address_that_makes_no_sense_opens_what_there_is(
    browser: Any, tmp_path: Path, hash: str
) -> None:
    with opened(browser, tmp_path, [Panel("m", "", decoder(TEXT))], hash=hash) as tab:
        assert re.search(r"layer 2, head [02]", tab.locator(".large h3").inner_text())


def test_tokens_are_text_and_never_markup(browser: Any, tmp_path: Path) -> None:
    words = ["<img src=x onerror=alert(1)>", "</script>", "&lt;", "مرحبا", "😀", "a"]
    with opened(browser, tmp_path, [Panel("<i>m</i>", "<b>", decoder(words))]) as tab:
        tab.get_by_label("show as table").check()
        assert [row[0] for row in bars(tab)] == words
        assert tab.locator("main img, main i, main b").count() == 0
        assert tab.locator("h2").inner_text() == "<i>m</i>"


# --- pictures, pairs, long texts ----------------------------------------------------------------------------------


def test_picture_shows_where_a_patch_looks(browser: Any, tmp_path: Path) -> None:
    (view,) = views = vision()
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.0.1.0.0") as tab:
        photo, told = tab.locator(".photo"), tab.locator(".picture p")
        weight = full(view, 0, 1).weight
        for act, row in [
            ("click", 1),
            ("ArrowDown", 5),
            ("ArrowRight", 6),
            ("Home", 0),
        ]:
            if act == "click":
                photo.click(position={"x": 10, "y": 10})
            else:
                photo.press(act)
            best = 1 + int(weight[row, 1:].argmax())
            said = f"row {view.rows[row]}: most on {view.columns[best]}, {weight[row, best]:.4f}"
            assert told.inner_text().startswith(said)


def test_two_models_move_together(browser: Any, tmp_path: Path) -> None:
    panels = [Panel("a", "", decoder(TEXT)), Panel("b", "", decoder(TEXT, layers=1, heads=2))]
    with opened(browser, tmp_path, panels, hash="#at0=self.0.0.2.1&at1=self.0.1.2.1") as tab:
        boxes = [tab.locator(".panel").nth(i).bounding_box() for i in (0, 1)]
        assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
        tab.locator(".map").first.focus()
        tab.keyboard.press("ArrowDown")
        for i in (0, 1):
            assert "row to, column king" in readout(tab, i)
        weight = full(panels[1].views[0], 0, 1).weight
        assert number(readout(tab, 1).split()[-1]) == pytest.approx(weight[3, 1], abs=6e-5)


def test_a_thousand_tokens_stay_usable(browser: Any, tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(1024)]
    (view,) = views = decoder(words, (1, 1), layers=2, heads=2)
    assert not view.whole
    panel = Panel("m", "", views, layer=1, head=1)
    with opened(browser, tmp_path, [panel], hash="#at0=self.1.1.1000.990") as tab:
        assert "max-pooled" in tab.locator(".all").inner_text()
        weight = full(view, 1, 1).weight
        assert readout(tab).startswith("row w1000, column w990")
        assert number(readout(tab).split()[-1]) == pytest.approx(weight[1000, 990], rel=0.06)
        tab.locator(".map").focus()
        tab.keyboard.press("ArrowUp")
        assert "row w999, column w990" in readout(tab)
        assert "of 1024" in tab.locator(".head .shown").inner_text()
        tab.locator(".overview").click(position={"x": 5, "y": 80})
        assert re.search(r"row w5\d\d, column w[23]\d", readout(tab))
        tab.get_by_label("largest first").check()
        row = int(re.findall(r"row w(\d+)", readout(tab))[0])
        assert bars(tab)[0][0] == words[int(weight[row].argmax())]
        tab.locator(".thumb").first.click()  # a pooled head
        assert re.search(r"rows \d+–\d+, columns \d+–\d+, [\d.e−]+$", readout(tab))
        tab.get_by_label("average the heads").check()
        assert "mean" in tab.locator(".large h3").inner_text()


# --- looks --------------------------------------------------------------------------------------------------------

PAGES = {
    "decoder": lambda: [Panel("a decoder", "12 tokens", decoder(TEXT))],
    "pair": lambda: [Panel("an encoder-decoder", "6 and 4 tokens", encoder_decoder())],
    "vision": lambda: [Panel("a vision model", "17 tokens", vision())],
    "two": lambda: [Panel("a", "", decoder(TEXT)), Panel("b", "", decoder(TEXT, layers=1))],
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("name", PAGES)
def test_page_fits_and_follows_the_scheme(
    browser: Any, tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    more = {"color_scheme": scheme, "reduced_motion": "reduce"}
    with opened(browser, tmp_path, PAGES[name](), width=width, **more) as tab:
        for label in ("score", "show as table"):
            tab.get_by_label(label, exact=True).check()
            size = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert size[0] <= size[1], "the page scrolls sideways"
        inner = tab.evaluate(
            "(e => [e.scrollWidth, e.clientWidth])(document.querySelector('.row .wide'))"
        )
        assert inner[0] <= inner[1], "the row's numbers do not fit"
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 380
        assert light == (scheme == "light")
        assert "not an explanation" in tab.locator(".note").inner_text()
        if SHOTS:
            tab.get_by_label("weight", exact=True).check()
            tab.get_by_label("show as table").uncheck()
            tab.wait_for_timeout(100)
            tab.screenshot(path=f"{SHOTS}/{name}-{width}-{scheme}.png", full_page=True)


def test_boxes_do_not_overlap(browser: Any, tmp_path: Path) -> None:
    for width in (360, 800, 1440):
        with opened(browser, tmp_path, PAGES["pair"](), width=width) as tab:
            parts = [tab.locator(f".{name}").bounding_box() for name in ("all", "large", "steps")]
            for i, a in enumerate(parts):
                for b in parts[i + 1 :]:
                    beside = a["x"] + a["width"] <= b["x"] + 1 or b["x"] + b["width"] <= a["x"] + 1
                    assert beside or a["y"] + a["height"] <= b["y"] + 1, width
