"""The page of regard look in a real browser: its numbers and its colours, light and dark, narrow and wide."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.see.look import Panel
from tests.browser.pages import (
    TEXT,
    bars,
    contrast,
    decoder,
    encoder_decoder,
    full,
    last,
    number,
    opened,
    pixels,
    readout,
    rgb,
    title,
    vision,
)

SHOTS = os.environ.get("REGARD_SHOTS")  # a folder for screenshots


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
        assert tab.locator(".bars tr.masked").count() == len(TEXT) - 8
        assert tab.locator(".bars tr.masked .bar").count() == 0


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
        assert last(readout(tab)) == pytest.approx(mean[9, 4], abs=6e-5)
        assert "mean of its heads" in title(tab)
        assert tab.locator(".thumb[aria-selected=true]").count() == 3
        tab.get_by_label("hide the first token").check()
        assert [row[0] for row in bars(tab)] == TEXT[1:]
        assert "first column is hidden" in tab.locator(".bars caption").inner_text()
        most = tab.locator(".colours span").last.inner_text()
        seen = np.where(np.triu(np.ones_like(mean), 1) > 0, 0, mean)[:, 1:]
        assert number(most) == pytest.approx(seen.max(), abs=6e-4)


# --- colours ------------------------------------------------------------------------------------------------------


def test_pixels_are_the_palette_of_the_values(browser: Any, tmp_path: Path) -> None:
    """A darker cell is a larger weight, on a light page."""
    (view,) = views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.0.0.0.0") as tab:
        light = pixels(tab, ".thumb").sum(-1)
        weight = full(view, 0, 0).weight
        assert light.shape == (len(TEXT), len(TEXT))
        order = [
            light[i, j]
            for w, i, j in sorted(
                (weight[i, j], i, j) for i in range(len(TEXT)) for j in range(i + 1)
            )
        ]
        assert all(a >= b - 3 for a, b in pairwise(order))


def test_colours_by_row_give_each_row_the_darkest(browser: Any, tmp_path: Path) -> None:
    (view,) = views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.0.0.9.0") as tab:
        before = pixels(tab, ".thumb").sum(-1)
        tab.get_by_label("colours by row").check()
        tab.wait_for_timeout(100)
        after = pixels(tab, ".thumb").sum(-1)
        weight = full(view, 0, 0).weight
        assert (after.argmin(-1) == weight.argmax(-1)).all()
        assert len(set(after.min(-1))) == 1 < len(set(before.min(-1)))
        most = tab.locator(".colours span").last.inner_text()
        assert number(most) == pytest.approx(weight[9].max(), rel=6e-3)
        assert "in the chosen row" in tab.locator(".scale").inner_text()
        assert "colours=row" in tab.url


def test_bars_of_scores_have_the_colours_of_the_map(browser: Any, tmp_path: Path) -> None:
    (view,) = views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.1.2.7.0") as tab:
        tab.get_by_label("score", exact=True).check()
        score = full(view, 1, 2).score[7, :8]
        above = [bar.get_attribute("class") == "bar above" for bar in tab.locator(".bar").all()]
        assert above == (score > 0).tolist() and len(set(above)) == 2


def test_colours_follow_the_scheme_while_the_page_is_open(browser: Any, tmp_path: Path) -> None:
    with opened(browser, tmp_path, [Panel("m", "", decoder(TEXT))], color_scheme="light") as tab:
        light = pixels(tab, ".thumb")[0, 0].sum()
        tab.emulate_media(color_scheme="dark")
        # The weight is 1: the far end of either ramp. A busy machine draws late.
        for _ in range(50):
            tab.wait_for_timeout(100)
            if (dark := pixels(tab, ".thumb")[0, 0].sum()) > 200:
                break
        assert light < 200 < dark


# --- looks --------------------------------------------------------------------------------------------------------

LONG = ["<img src=x onerror=alert(1)>", "مرحبا", "😀", "Donaudampfschifffahrtsgesellschaft", "a"]
PAGES = {
    "decoder": lambda: [Panel("a decoder", "12 tokens", decoder(TEXT))],
    "heads": lambda: [Panel("32 heads", "5 tokens", decoder(LONG, heads=32, dim=64))],
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
        for label in ("lines", "score", "show as table", "map"):
            tab.get_by_label(label, exact=True).check()
            size = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert size[0] <= size[1], "the page scrolls sideways"
        inner = tab.evaluate(
            "(e => [e.scrollWidth, e.clientWidth])(document.querySelector('.row .wide'))"
        )
        assert inner[0] <= inner[1], "the row's numbers do not fit"
        light = sum(rgb(tab, "body", "backgroundColor")) > 380
        assert light == (scheme == "light")
        assert "not an explanation" in tab.locator(".note").inner_text()
        if SHOTS:
            tab.get_by_label("weight", exact=True).check()
            tab.get_by_label("show as table").uncheck()
            tab.wait_for_timeout(100)
            tab.screenshot(path=f"{SHOTS}/{name}-{width}-{scheme}.png", full_page=True)


def test_what_is_pressed_is_large_enough_to_be_hit(browser: Any, tmp_path: Path) -> None:
    """24 pixels, by the web's accessibility rules."""
    for width in (360, 1440):
        with opened(browser, tmp_path, PAGES["pair"](), width=width, hash="#as=lines") as tab:
            for part in tab.locator("label, .chip, .thumb").all():
                box = part.bounding_box()
                assert min(box["width"], box["height"]) >= 24, part.inner_text()


def test_boxes_do_not_overlap(browser: Any, tmp_path: Path) -> None:
    for width in (360, 800, 1440):
        with opened(browser, tmp_path, PAGES["pair"](), width=width) as tab:
            parts = [tab.locator(f".{name}").bounding_box() for name in ("all", "large", "steps")]
            for i, a in enumerate(parts):
                for b in parts[i + 1 :]:
                    beside = a["x"] + a["width"] <= b["x"] + 1 or b["x"] + b["width"] <= a["x"] + 1
                    assert beside or a["y"] + a["height"] <= b["y"] + 1, width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_ground(browser: Any, tmp_path: Path, scheme: str) -> None:
    with opened(browser, tmp_path, PAGES["pair"](), color_scheme=scheme) as tab:
        ground = rgb(tab, "body", "backgroundColor")
        for part in ("h1", ".shown", ".layer", ".scale", ".group legend", ".bars th", ".numbers"):
            assert contrast(rgb(tab, part, "color"), ground) >= 4.5, part
        tab.get_by_label("lines").check()
        tab.get_by_role("button", name="head 1", exact=True).click()
        for chip in ('.chip[aria-pressed="true"]', '.chip[aria-pressed="false"]'):
            behind = rgb(tab, ".note" if "true" in chip else "body", "backgroundColor")
            assert contrast(rgb(tab, chip, "color"), behind) >= 4.5, chip
