"""The page of regard look in a real browser: every view by mouse, by keys and by address."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.see.heads import ranked
from regard.see.look import Panel
from tests.browser.pages import (
    TEXT,
    bars,
    cell,
    decoder,
    encoder_decoder,
    full,
    last,
    number,
    opened,
    pixels,
    readout,
    title,
    vision,
)


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
            assert f"row “{TEXT[row]}”" in said and f"column “{TEXT[column]}”" in said, key
            end = "masked" if column > row else f"weight {weight[row, column]:.4f}"
            assert said.endswith(end) or last(said) < 1e-4
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
            assert place in title(tab)
            assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == place


def test_tab_reaches_everything_and_shows_where_it_is(browser: Any, tmp_path: Path) -> None:
    with opened(browser, tmp_path, [Panel("m", "", vision())]) as tab:
        script = """(e => [e.name || e.className, getComputedStyle(e).outlineStyle,
            parseFloat(getComputedStyle(e).outlineWidth)])(document.activeElement)"""
        stops = []
        for _ in range(11):
            tab.keyboard.press("Tab")
            name, style, width = tab.evaluate(script)
            assert style == "solid" and width >= 3, name
            stops.append(name)
        controls = ["as", "measure", "averaged", "list", "bare", "rowwise", "table", "order"]
        assert stops == [*controls, "thumb", "photo over", "map"]


def test_mouse_shows_on_hover_and_keeps_on_click(browser: Any, tmp_path: Path) -> None:
    (view,) = views = decoder(TEXT)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.1.1.2.1") as tab:
        tab.locator(".map").hover(position=cell(tab, 8, 3, view))
        value = full(view, 1, 1).weight[8, 3]
        assert "row “would”, column “to”: weight" in readout(tab)
        assert last(readout(tab)) == pytest.approx(value, abs=6e-5)
        assert "at0=self.1.1.2.1" in tab.url
        tab.mouse.move(1, 1)
        assert "row “said”, column “king”" in readout(tab)
        tab.locator(".map").click(position=cell(tab, 8, 3, view))
        assert (
            "at0=self.1.1.8.3" in tab.url and "would" in tab.locator(".bars caption").inner_text()
        )
        assert tab.locator(".thumb").nth(8).get_attribute("title") == "layer 2, head 2"
        tab.locator(".thumb").nth(8).click()
        assert "layer 2, head 2" in title(tab)
        tab.locator(".bars tbody tr").nth(5).click()
        assert "at0=self.2.2.8.5" in tab.url


def test_views_by_mouse_and_by_keys_and_back(browser: Any, tmp_path: Path) -> None:
    views = encoder_decoder()
    with opened(browser, tmp_path, [Panel("m", "", views)]) as tab:
        assert "Cross-attention" in title(tab)
        tab.get_by_role("radio", name="Encoder").check()
        assert "Encoder" in title(tab) and tab.locator(".bars tbody tr").count() == 6
        tab.get_by_role("radio", name="Encoder").focus()
        tab.keyboard.press("ArrowRight")
        assert "Decoder" in title(tab) and tab.locator(".bars tbody tr").count() == 4
        tab.go_back()
        assert "Encoder" in title(tab)
        tab.go_back()
        assert "Cross-attention" in title(tab)
        assert tab.locator("input[value=cross]").is_checked()
        assert "+ bias" not in tab.locator(".bars thead").inner_text()
        tab.get_by_role("radio", name="Encoder").check()
        assert "+ bias,\nmasked" in tab.locator(".bars thead").inner_text()


def test_a_view_in_the_address_is_opened(browser: Any, tmp_path: Path) -> None:
    (view,) = views = decoder(TEXT)
    hash = "#measure=norm&first=hidden&order=value&at0=self.2.1.6.3"
    with opened(browser, tmp_path, [Panel("m", "", views)], hash=hash) as tab:
        assert "layer 2, head 1" in title(tab)
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
        assert re.search(r"layer \d, head \d", title(tab)) and "weight 0." in readout(tab)


def test_tokens_are_text_and_never_markup(browser: Any, tmp_path: Path) -> None:
    words = ["<img src=x onerror=alert(1)>", "</script>", "&lt;", "مرحبا", "😀", "a"]
    with opened(browser, tmp_path, [Panel("<i>m</i>", "<b>", decoder(words))]) as tab:
        tab.get_by_label("show as table").check()
        assert [row[0] for row in bars(tab)] == words
        assert tab.locator("main img, main i, main b").count() == 0
        assert tab.locator("h2").inner_text() == "<i>m</i>"


# --- lines --------------------------------------------------------------------------------------------------------


def test_lines_tell_what_a_token_reads_and_who_reads_it(browser: Any, tmp_path: Path) -> None:
    cross = encoder_decoder()[2]
    hash = "#as=lines&at0=cross.1.1.2.1"
    with opened(browser, tmp_path, [Panel("m", "", encoder_decoder())], hash=hash) as tab:
        lines, told = tab.locator(".lines"), tab.locator(".large .readout").last
        assert not tab.locator(".map").is_visible() and "its heads" in title(tab)
        maps = [full(cross, 1, h).weight for h in range(3)]
        head, column = divmod(int(max(range(18), key=lambda i: maps[i // 6][2, i % 6])), 6)
        best = f"“{cross.columns[column]}” {maps[head][2, column]:.4f} (head {head})"
        assert told.inner_text().startswith(f"row “plays” reads {best}")
        # The fourth token on the left, then the first on the right, 24 pixels from one to the next.
        wide = lines.bounding_box()["width"]
        lines.hover(position={"x": 5, "y": 4 + 24 * 3 + 9})
        assert told.inner_text().startswith("row “</s>” reads “") and "cross.1.1.2.1" in tab.url
        lines.hover(position={"x": wide - 5, "y": 4 + 9})
        who = max(range(12), key=lambda i: maps[i // 4][i % 4, 0])
        said = f"“{cross.rows[who % 4]}” {maps[who // 4][who % 4, 0]:.4f} (head {who // 4})"
        assert told.inner_text().startswith(f"column “der” is read by {said}")
        tab.mouse.move(1, 1)
        assert told.inner_text().startswith("row “plays” reads")
        lines.click(position={"x": 5, "y": 4 + 9})
        assert "at0=cross.1.1.0.1" in tab.url
        lines.press("ArrowDown")
        assert "at0=cross.1.1.1.1" in tab.url
        assert tab.locator("#live").inner_text().startswith("row “dog” reads")


def leading(tab: Any, colour: str) -> int:
    """How many points between the tokens have more of this colour than of the others."""
    seen = pixels(tab, ".lines")
    seen = seen[:, seen.shape[1] // 3 : -seen.shape[1] // 3].reshape(-1, 3)
    vivid = seen[seen.max(-1) - seen.min(-1) > 60]
    return int((vivid.argmax(-1) == ("red", "green", "blue").index(colour)).sum())


def test_heads_are_put_on_and_off_and_have_their_colours(browser: Any, tmp_path: Path) -> None:
    hash = "#as=lines&at0=cross.0.0.0.0"
    with opened(browser, tmp_path, [Panel("m", "", encoder_decoder())], hash=hash) as tab:
        chips, pressed = tab.locator(".chip"), "es => es.map((e) => e.ariaPressed)"
        assert chips.all_inner_texts() == ["all heads", "head 0 alone", "0", "1", "2"]
        assert chips.evaluate_all(pressed) == ["true", "false", "true", "true", "true"]
        tab.get_by_role("button", name="head 0 alone").click()
        assert chips.evaluate_all(pressed) == ["false", "true", "true", "false", "false"]
        assert "at0=cross.0.0.0.0.1-2" in tab.url
        assert leading(tab, "blue") > 0 == leading(tab, "red") + leading(tab, "green")
        tab.get_by_role("button", name="head 2", exact=True).press("Enter")
        assert tab.url.endswith("at0=cross.0.0.0.0.1") and leading(tab, "green") > 0
        assert tab.evaluate("document.activeElement.ariaLabel") == "head 2"
        # A head that is chosen is drawn.
        tab.locator(".thumb").nth(1).click()
        assert chips.evaluate_all(pressed)[2:] == ["true", "true", "true"]
        assert leading(tab, "red") > 0


def test_lines_of_a_long_text_are_the_keys_that_a_row_weighs_most(
    browser: Any, tmp_path: Path
) -> None:
    words = [f"w{i}" for i in range(150)]
    (view,) = views = decoder(words, heads=12, dim=48, layers=1)
    hash = "#as=lines&at0=self.0.5.140.3"
    with opened(browser, tmp_path, [Panel("m", "", views)], hash=hash) as tab:
        row = full(view, 0, 5).weight[140]
        best = f"“w{row.argmax()}” {row.max():.4f} (head 5)"
        told = tab.locator(".large .readout").last
        # Of many heads the chosen one is drawn alone.
        assert told.inner_text().startswith(f"row “w140” reads {best}")
        assert tab.locator(".lines").bounding_box()["height"] < 26 * 24 + 20
        listed = sorted({3, *row.argsort()[::-1][:25].tolist()})
        wide = tab.locator(".lines").bounding_box()["width"]
        tab.locator(".lines").click(position={"x": wide - 5, "y": 4 + 24 * 7 + 9})
        assert f"at0=self.0.5.140.{listed[7]}" in tab.url


# --- two models ---------------------------------------------------------------------------------------------------


def test_two_models_move_together_or_apart(browser: Any, tmp_path: Path) -> None:
    panels = [Panel("a", "", decoder(TEXT)), Panel("b", "", decoder(TEXT, layers=2, heads=2))]
    with opened(browser, tmp_path, panels, hash="#at0=self.0.0.2.1&at1=self.0.1.2.1") as tab:
        boxes = [tab.locator(".panel").nth(i).bounding_box() for i in (0, 1)]
        assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
        tab.locator(".thumb").nth(4).click()
        assert [title(tab, i)[-15:] for i in (0, 1)] == ["layer 1, head 1"] * 2
        tab.locator(".map").first.focus()
        tab.keyboard.press("ArrowDown")
        for i in (0, 1):
            assert "row “to”, column “king”" in readout(tab, i)
        weight = full(panels[1].views[0], 1, 1).weight
        assert last(readout(tab, 1)) == pytest.approx(weight[3, 1], abs=6e-5)
        tab.locator(".thumb").nth(8).click()  # the other has no layer 2, no head 2
        assert [title(tab, i)[-15:] for i in (0, 1)] == ["layer 2, head 2", "layer 1, head 1"]
        tab.get_by_label("move both panels together").uncheck()
        tab.locator(".thumb").first.click()
        assert [title(tab, i)[-15:] for i in (0, 1)] == ["layer 0, head 0", "layer 1, head 1"]


def test_a_model_of_other_views_and_tokens_stays_where_it_is(browser: Any, tmp_path: Path) -> None:
    panels = [Panel("a", "", decoder(TEXT)), Panel("b", "", encoder_decoder())]
    with opened(browser, tmp_path, panels, hash="#at0=self.0.0.2.1&at1=cross.1.1.2.1") as tab:
        tab.locator(".thumb").nth(8).click()
        tab.locator(".map").first.press("ArrowDown")
        assert "at1=cross.1.1.2.1" in tab.url and "at0=self.2.2.3.1" in tab.url


def test_table_of_heads_shows_the_map_of_a_head_and_sorts(browser: Any, tmp_path: Path) -> None:
    """Of every view; the numbers are the library's, the column and the head stand in the address."""
    views = encoder_decoder()
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=cross.0.0.0.0") as tab:
        assert not tab.locator(".measures").is_visible()
        tab.check("input[name=list]")
        rows = tab.locator(".measures tbody tr")
        heads = ranked(Panel("", "", views).heads)
        assert rows.count() == len(heads)
        names = [f"{head.view} {head.layer}.{head.head}" for head in heads]
        assert rows.locator("th").all_inner_texts() == names
        tab.locator(".measures thead button", has_text="previous").click()
        heads = ranked(heads, "previous")
        found = [number(row.locator("td").nth(2).inner_text()) for row in rows.all()]
        expected = [head.measures["previous"] for head in heads]
        np.testing.assert_allclose(found, expected, atol=6e-3, equal_nan=True)
        assert tab.locator("th[aria-sort=descending]").inner_text().startswith("previous")
        best = heads[0]
        rows.first.locator("button").press("Enter")
        assert f"list=previous&at0={best.view}.{best.layer}.{best.head}." in tab.url
        assert title(tab).endswith(f"layer {best.layer}, head {best.head}")
        assert rows.first.locator("button").get_attribute("aria-pressed") == "true"
