"""The page of regard look in a real browser: pictures, and texts too long to be shown at once."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.see import look as module
from regard.see.look import Panel, Pooled
from regard.see.probe import Probe
from tests.browser.pages import (
    SMALL,
    TEXT,
    bars,
    decoder,
    full,
    last,
    loud,
    number,
    opened,
    pixels,
    readout,
    title,
    vision,
)


def test_picture_shows_where_a_patch_looks(browser: Any, tmp_path: Path) -> None:
    (view,) = views = vision()
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.0.1.0.0") as tab:
        photo, told = tab.locator(".over"), tab.locator(".picture .readout")
        weight = full(view, 0, 1).weight
        for act, row in [
            ("click", 1),
            ("ArrowDown", 5),
            ("ArrowRight", 6),
            ("Home", 0),
        ]:
            if act == "click":
                photo.click(position={"x": 10, "y": 10})
                tab.mouse.move(1, 1)
            else:
                photo.press(act)
            best = 1 + int(weight[row, 1:].argmax())
            value = f"{weight[row, best]:.4f}"
            said = f"row “{view.rows[row]}” reads {view.columns[best]}: weight {value}"
            assert told.inner_text().startswith(said)
        photo.hover(position={"x": 10, "y": 10})
        assert told.inner_text().startswith("row “class” reads 1,1: weight ")
        assert last(told.inner_text()) == pytest.approx(weight[0, 1], abs=6e-5)


def test_picture_is_shown_as_it_is_and_bright_where_it_is_read(
    browser: Any, tmp_path: Path
) -> None:
    (view,) = views = vision()
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.0.1.0.0") as tab:
        plain, over = (pixels(tab, ".photo", i).astype(float) for i in (0, 1))
        middle = (np.arange(32) + 0.5) * len(plain) / 32
        at = np.ix_(middle.astype(int), middle.astype(int))
        assert view.picture is not None
        np.testing.assert_allclose(plain[at], view.picture.pixels, atol=2)
        yellow = (over[..., 0] - over[..., 2])[at].reshape(4, 8, 4, 8).mean((1, 3))
        weight = full(view, 0, 1).weight[0, 1:]
        assert yellow.argmax() == weight.argmax()


def test_heads_that_are_there_as_weights_alone_are_the_librarys(
    browser: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "WHOLE", 100)
    (view,) = views = decoder(TEXT)
    head = view.layers[2].heads[1]
    assert isinstance(head, Pooled) and view.step == (1, 1)
    with opened(browser, tmp_path, [Panel("m", "", views)], hash="#at0=self.2.1.9.4") as tab:
        assert "layer 0, head 0 alone" in tab.locator(".all").inner_text()
        tab.get_by_label("show as table").check()
        rows = tab.locator(".values tbody tr").all()
        found = [[number(c.inner_text()) for c in row.locator("td").all()] for row in rows]
        seen = np.where(np.triu(np.ones_like(head.cells), 1) > 0, np.nan, head.cells)
        np.testing.assert_allclose(found, seen, atol=6e-5, rtol=0.06)
        assert "sum to 1.0000" in tab.locator(".bars caption").inner_text()
        assert "--layer 2 --head 1" in tab.locator(".row .shown").inner_text()
        tab.get_by_label("score", exact=True).check()
        assert "its score is not in the page" in title(tab)
        tab.get_by_label("hide the first token").check()
        assert [row[0] for row in bars(tab)] == TEXT[1:]


def test_a_thousand_tokens_are_seen_by_parts(browser: Any, tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(1024)]
    torch.manual_seed(1)
    model = loud(regard.build("gpt2", vocab=50, max_len=1100, **{**SMALL, "layers": 2, "heads": 4}))
    given = module.Given(torch.randint(50, (1, 1024)), words)
    (view,) = views = module.trace(model, given, 1, 1)
    panel = Panel("m", "", views, layer=1, head=1)
    with opened(browser, tmp_path, [panel], hash="#at0=self.1.1.1000.990") as tab:
        assert "max-pooled" in tab.locator(".all").inner_text()
        weight = full(view, 1, 1).weight
        assert readout(tab).startswith("row “w1000”, column “w990”")
        assert last(readout(tab)) == pytest.approx(weight[1000, 990], rel=0.06, abs=6e-5)
        tab.locator(".map").focus()
        tab.keyboard.press("ArrowUp")
        assert "row “w999”, column “w990”" in readout(tab)
        assert "of 1024" in tab.locator(".head .shown").last.inner_text()
        tab.locator(".overview").click(position={"x": 5, "y": 80})
        assert re.search(r"row “w5\d\d”, column “w[23]\d”", readout(tab))
        tab.get_by_label("largest first").check()
        row = int(re.findall(r"row “w(\d+)”", readout(tab))[0])
        assert bars(tab)[0][0] == words[int(weight[row].argmax())]
        tab.locator(".thumb").first.click()  # a pooled head
        assert re.search(r"rows \d+–\d+, columns \d+–\d+: weight [\d.e−]+$", readout(tab))
        probe = Probe(["0.self"], [0])
        with torch.no_grad():
            model(given.ids, probe=probe)
        first, _, low = (int(x) for x in re.findall(r"(\d+)–(\d+), columns (\d+)", readout(tab))[0])
        a = probe.maps["0.self"][0][0, 0, first : first + 16, low : low + 16]
        assert last(readout(tab)) == pytest.approx(float(a.max()), abs=1e-4)
        tab.locator(".map").press("End")
        assert readout(tab).endswith("masked")
        tab.get_by_label("average the heads").check()
        assert "mean" in title(tab)


def test_a_thousand_tokens_in_twelve_layers_of_twelve_heads_stay_quick(
    browser: Any, tmp_path: Path
) -> None:
    words = [f"w{i}" for i in range(1024)]
    views = decoder(words, (11, 0), layers=12, heads=12, dim=48)
    script = """async (places) => { const times = [];
        for (const i of places) {
          const start = performance.now();
          document.querySelectorAll(".thumb")[i].click();
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
          times.push(performance.now() - start);
        } return times; }"""
    with opened(browser, tmp_path, [Panel("m", "", views, layer=11)]) as tab:
        assert tab.locator(".thumb").count() == 144
        times = tab.evaluate(script, [0, 77, 132, 5, 132])  # 132 is the head in full
        assert np.median(times) < 300, times
        painted = tab.evaluate("performance.getEntriesByType('paint').map((e) => e.startTime)")
        assert max(painted) < 3000, painted
