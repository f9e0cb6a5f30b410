"""Pages of attention to open in a browser, and how tests read them."""

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import regard
from regard.see.look import Full, Given, Panel, Picture, View, trace
from regard.see.page import page

SMALL: dict[str, Any] = dict(layers=3, dim=24, heads=3, ffn_dim=20)
TEXT = ["the", "king", "said", "to", "the", "queen", "that", "he", "would", "<b>not</b>", "go"]


# --- what is shown ------------------------------------------------------------------------------------------------


def loud(model: Any, times: float = 4.0) -> Any:
    for p in model.parameters():
        if p.dim() > 1:
            p.data.mul_(times)
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
    model = loud(regard.build("vit-base", size=32, patch=8, labels=3, **SMALL), 12.0)
    across, down = np.meshgrid(np.arange(32), np.arange(32))
    pixels = np.stack([across * 8, down * 8, (across - down) % 32 * 8], -1).astype(np.uint8)
    names = ["class", *(f"{i},{j}" for i in range(1, 5) for j in range(1, 5))]
    given = Given(torch.randn(1, 3, 32, 32), names, picture=Picture(pixels, 8, 1))
    return trace(model, given)


# --- how it is read -----------------------------------------------------------------------------------------------


@contextmanager
def opened(
    browser: Any,
    path: Path,
    panels: list[Panel] | str,
    *,
    width: int = 1440,
    hash: str = "",
    **more: Any,
) -> Iterator[Any]:
    """A tab with the page of these panels, or with this one, from disk; any request, error or word
    on the console fails the test."""
    file = path / "page.html"
    whole = panels if isinstance(panels, str) else page("a page", panels)
    file.write_text(whole, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, **more)
    tab, wrong = context.new_page(), []
    tab.on("console", lambda said: wrong.append(said.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda r: r.url.startswith(file.as_uri()) or wrong.append(r.url))
    tab.goto(file.as_uri() + hash)
    if not isinstance(panels, str):
        tab.wait_for_selector("html[data-ready]")
    yield tab
    assert not wrong, wrong
    context.close()


def readout(tab: Any, panel: int = 0) -> str:
    return tab.locator(".head .readout").nth(panel).inner_text()


def title(tab: Any, panel: int = 0) -> str:
    return tab.locator(".large h3").nth(panel).inner_text()


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("-∞", "-inf").replace("–", "nan"))


def last(text: str) -> float:
    """The number at the end of a sentence."""
    return number(text.split()[-1])


def bars(tab: Any) -> list[list[str]]:
    rows = tab.locator(".bars tbody tr").all()
    return [[cell.inner_text() for cell in row.locator("th, td").all()] for row in rows]


def full(view: View, layer: int, head: int) -> Full:
    found = view.layers[layer].heads[head]
    assert isinstance(found, Full)
    return found


def cell(tab: Any, row: int, column: int, view: View) -> dict[str, float]:
    """Where a cell of a map that is shown whole lies on its canvas."""
    script = "(c => [c.clientWidth, c.clientHeight])(document.querySelector('.map'))"
    wide, high = tab.evaluate(script)
    side = 34  # the largest a cell gets; cells end at the right and lower edge, tokens are before
    return {
        "x": wide - 2 - side * (len(view.columns) - column - 0.5),
        "y": high - 2 - side * (len(view.rows) - row - 0.5),
    }


def pixels(tab: Any, selector: str, index: int = 0) -> np.ndarray:
    """What a canvas shows on white, (h w 3)."""
    script = """([selector, index]) => {
        const canvas = document.querySelectorAll(selector)[index];
        const { width, height } = canvas;
        const pen = new OffscreenCanvas(width, height).getContext("2d");
        pen.fillStyle = "white";
        pen.fillRect(0, 0, width, height);
        pen.drawImage(canvas, 0, 0);
        const data = pen.getImageData(0, 0, width, height).data;
        let text = "";
        for (let i = 0; i < data.length; i += 8192) text += String.fromCharCode(...data.subarray(i, i + 8192));
        return [width, height, btoa(text)]; }"""
    wide, high, found = tab.evaluate(script, [selector, index])
    return (
        np.frombuffer(base64.b64decode(found), np.uint8).reshape(high, wide, 4)[..., :3].astype(int)
    )


def rgb(tab: Any, selector: str, what: str) -> list[int]:
    """A colour of the first such element: its text's, or its ground's."""
    script = f"(e => getComputedStyle(e).{what})(document.querySelector('{selector}'))"
    return [int(x) for x in re.findall(r"\d+", tab.evaluate(script))[:3]]


def contrast(a: list[int], b: list[int]) -> float:
    """By the web's accessibility rules: 4.5 for text."""

    def light(colour: list[int]) -> float:
        part = np.array(colour) / 255
        linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)
