"""One self-contained HTML page of attention: data, style and script in it, nothing fetched; and
the colours of every map.

The modules of web/ are joined into one inline script, since browsers refuse module files that are
opened from disk. Every page of the project is made by `document`: one frame and one base style, by
the templates of `environment`, which escape all that they are given.

One table of colours and one list of fonts serve all pages and pictures: the script's, matplotlib's,
those of reports and of the documentation. Lightness runs one way from
the page's ground, so that colours read without hue; signed values run to blue below zero and to
orange above it. Weights are placed by their root, so that small ones show; 0, which is what is
masked, is grey."""

from __future__ import annotations

import base64
import colorsys
import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import FileSystemLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import Markup

from regard.see.format import strict, visible
from regard.see.heads import MEASURES
from regard.see.look import Full, Given, Layer, Panel, Pooled, View, exact, telling

WEB = Path(__file__).parent / "web"
# A module comes after those that it imports.
MODULES = (
    *("dom", "palette", "data", "scale", "overview", "map", "lines"),
    *("table", "heads", "thumbs", "row", "image", "state", "app"),
)
OPENED = "The page opens on the weight that stands out most from what other rows give that column."
# Cells above which a head is stored without what can be computed.
LARGE = 1 << 18
RAMPS: dict[str, dict[str, list[list[int]]]] = {
    "light": {
        "plain": [[255, 255, 255], [205, 232, 190], [90, 180, 180], [44, 100, 160], [26, 16, 62]],
        "signed": [[10, 60, 140], [120, 170, 225], [250, 250, 250], [240, 170, 100], [160, 70, 0]],
        "masked": [[226, 229, 233]],
    },
    "dark": {
        "plain": [[20, 23, 26], [44, 62, 122], [24, 134, 142], [116, 192, 92], [250, 236, 120]],
        "signed": [[130, 195, 255], [45, 95, 150], [20, 23, 26], [150, 85, 30], [255, 180, 100]],
        "masked": [[52, 57, 63]],
    },
}
# Of pages and pictures: the ground, text, lesser text, lines between parts, filled boxes, what is marked.
PAPER = {
    "light": {
        **{"back": "#ffffff", "ink": "#1b1f24", "soft": "#57606a"},
        **{"line": "#d0d7de", "fill": "#f3f5f7", "mark": "#b3261e"},
    },
    "dark": {
        **{"back": "#14171a", "ink": "#e6e9ec", "soft": "#a8b1bb"},
        **{"line": "#3d444d", "fill": "#1f2429", "mark": "#ff8a80"},
    },
}
# Latin by the system's own letters, then a font for each other script, so that none falls back to
# boxes.
FONTS = (
    *("system-ui", "-apple-system", "Segoe UI", "Noto Sans", "Noto Sans SC", "Noto Sans CJK SC"),
    *("PingFang SC", "Microsoft YaHei", "Hiragino Sans", "Noto Sans CJK JP", "Noto Sans CJK KR"),
    *("Noto Sans Arabic", "Geeza Pro", "Noto Sans Hebrew", "Noto Sans Devanagari"),
    *("Kohinoor Devanagari", "Nirmala UI", "Noto Sans Bengali", "Noto Sans Tamil"),
    *("Noto Sans Thai", "Leelawadee UI", "Noto Sans Symbols 2", "Noto Color Emoji", "sans-serif"),
)
SANS = ", ".join(f"'{name}'" if " " in name else name for name in FONTS)
# Of curves, heads and bars, one after the other.
SERIES = {
    "light": ("#0b62a8", "#b34700", "#007556", "#8f3f8f", "#7a6200", "#444c56"),
    "dark": ("#6cb6ff", "#ffa05c", "#4fd1a5", "#e0a3e0", "#e3c84b", "#b6bec8"),
}


def environment(*folders: Path) -> SandboxedEnvironment:
    """Templates of these folders and of web/. Whatever they are given is only ever text: control
    characters are made visible, and in HTML it is escaped; Markup alone stays as it is."""
    return SandboxedEnvironment(
        loader=FileSystemLoader([*folders, WEB]),
        autoescape=lambda name: name is None or not name.endswith(".md"),
        finalize=lambda x: x if isinstance(x, Markup) else visible(x, "\n\t"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def document(
    env: SandboxedEnvironment,
    name: str,
    title: str,
    script: str = "",
    policy: str = "",
    **more: Any,
) -> str:
    """A page by the template of this name. Its style is colours.css, base.css and the sheet of its
    own name; its policy allows this style and this script, by their hashes, pictures that are in
    the page, what `policy` adds, and nothing else."""
    assert env.loader is not None
    sheets = [env.loader.get_source(env, f"{sheet}.css")[0] for sheet in ("colours", "base", name)]
    sheet = "\n".join([both(), *sheets])
    allowed = [f"style-src '{_hash(sheet)}'", "img-src data:", "base-uri 'none'"]
    allowed += [f"script-src '{_hash(script)}'"] if script else []
    policy = "; ".join(["default-src 'none'", *allowed, "form-action 'none'", policy]).rstrip("; ")
    safe = {"policy": Markup(policy), "style": Markup(sheet), "script": Markup(script)}
    return env.get_template(f"{name}.html").render(title=title, **safe, **more)


def style(scheme: str) -> str:
    """The rules that a scheme needs: its colours, and which form of a map is shown."""
    named = {**PAPER[scheme], **{f"s{i}": value for i, value in enumerate(SERIES[scheme])}}
    colours = " ".join(f"--{name}: {value};" for name, value in named.items())
    other = "light" if scheme == "dark" else "dark"
    return f":root {{ {colours} }} .{scheme} {{ display: inline; }} .{other} {{ display: none; }}"


def both() -> str:
    """The same for a page that follows the reader's own scheme."""
    fonts = f":root {{ --sans: {SANS}; }}"
    dark = f"@media (prefers-color-scheme: dark) {{ {style('dark')} }}"
    return f"{fonts}\n{style('light')}\n{dark}"


def page(title: str, panels: Sequence[Panel], sort: str = "") -> str:
    """The whole page, as HTML. `sort`: it opens with the table of heads, by this column."""
    models = [{**_panel(panel), "sort": sort} for panel in panels]
    data = json.dumps({"models": models}, allow_nan=False)
    given = {"data": Markup(data.replace("<", "\\u003c"))}
    return document(environment(), "look", title, joined(), **given)


def joined() -> str:
    """The colours and all modules as one script: imports left out, exports as plain names."""
    files = [(WEB / f"{name}.js").read_text(encoding="utf-8") for name in MODULES]
    whole = re.sub(r"^import .*;\n", "", "\n".join(files), flags=re.MULTILINE)
    return colours() + re.sub(r"^export ", "", whole, flags=re.MULTILINE)


def colours() -> str:
    """The colours as a script, which stands before the modules."""
    return f"const RAMPS = {json.dumps(RAMPS)}, SERIES = {json.dumps(SERIES)};\n"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- data ---------------------------------------------------------------------------------------


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "name": visible(panel.name),
        "note": visible(panel.note),
        "without": visible(panel.without),
        "measures": [[name, each.says, each.largest] for name, each in MEASURES.items()],
        "start": max(range(len(panel.views)), key=lambda i: panel.views[i].name == "cross"),
        "views": [_view(view, panel) for view in panel.views],
    }


def _view(view: View, panel: Panel) -> dict[str, Any]:
    place = telling(view, panel.layer, panel.head)
    start = dict(zip(("layer", "head", "row", "column"), place))
    data = {**_maps(view), "note": _note(view), "start": start}
    if (picture := view.picture) is not None:
        size = {"size": len(picture.pixels), "patch": picture.patch, "extra": picture.extra}
        data["image"] = {**size, "pixels": _text(picture.pixels)}
    return data


def maps(
    model: Any, given: Given, prompt: int | None = None, **chosen: Any
) -> list[dict[str, Any]]:
    """Maps of a text that was read and written, exactly, as the data of a page; `chosen` as `exact`
    takes it. Token k of an answer was written by row `answer_row` + k; `prompt`: how many tokens of
    a decoder's text stand before its answer."""
    starts = {"self": prompt and prompt - 1, "decoder": 0, "cross": 0}
    views = []
    for view in exact(model, given, **chosen):
        data = _maps(view, math.inf)
        for layer in data["layers"]:
            layer["head_numbers"] = sorted({*(chosen.get("heads") or range(len(layer["heads"])))})
        rows = {"row_numbers": list(view.numbers), "answer_row": starts.get(view.name)}
        views.append({**data, **rows})
    return views


def _maps(view: View, large: float = LARGE) -> dict[str, Any]:
    return {
        "name": view.name,
        "title": view.title,
        "rows": [visible(name) for name in view.rows],
        "columns": [visible(name) for name in view.columns],
        "step": list(view.step),
        "textRows": view.name == "cross",
        "layers": [_layer(layer, large) for layer in view.layers],
    }


def _note(view: View) -> str:
    """What a reader must know of this view: what its rows are, and what is not there in full."""
    notes = []
    down, across = view.step
    if view.name == "cross":
        notes.append("A row is named by the token that the model writes there.")
    if view.picture is not None:
        notes.append(
            "Patches are named by their row and column in the picture, from 1,1 at the top left."
        )
    notes.append(OPENED)
    if view.whole:
        return " ".join(notes)
    heads = [(layer.number, i, h) for layer in view.layers for i, h in enumerate(layer.heads)]
    full = ", ".join(f"layer {n}, head {i}" for n, i, h in heads if isinstance(h, Full))
    if (down, across) == (1, 1):
        more = f"scores and values of {full} alone" if full else "scores are not"
        notes.append(f"All weights are here; {more}.")
    else:
        notes.append(
            f"{len(view.rows)} × {len(view.columns)} tokens in every head are too many for one "
            f"page: heads are max-pooled, a cell is the largest weight of {down} × {across} tokens."
        )
        notes += [f"In full: {full}."] if full else []
    return " ".join([*notes, "For another: regard look ... --layer N --head N."])


def _layer(layer: Layer, large: float) -> dict[str, Any]:
    names = ("number", "site", "scale", "biased", "capped", "sinks", "summed", "sparse")
    data = {name: getattr(layer, name) for name in names}
    data["heads"] = [_full(h, large) if isinstance(h, Full) else _pooled(h) for h in layer.heads]
    if layer.measures:
        data["measures"] = [strict(list(each.values())) for each in layer.measures]
    if layer.mean is not None and any(isinstance(head, Pooled) for head in layer.heads):
        data["mean"] = _pooled(layer.mean)
    return data


def _full(head: Full, large: float) -> dict[str, str]:
    """Of a head with more than `large` cells a third: its weights are exp(score - total), with one
    total per row."""
    arrays = {"weight": head.weight, "score": head.score, "norm": head.norm, "raw": head.raw}
    if head.weight.size > large:
        at = head.weight.argmax(-1)[:, None]
        score, weight = (np.take_along_axis(x, at, -1)[:, 0] for x in (head.score, head.weight))
        total = np.where(weight > 0, score - np.log(np.where(weight > 0, weight, 1.0)), np.inf)
        arrays = {"score": head.score, "norm": head.norm, "total": total}
    return {name: _text(array.astype("<f4")) for name, array in arrays.items() if array is not None}


def _pooled(head: Pooled) -> dict[str, Any]:
    most = float(head.cells.max()) or 1.0
    return {"most": most, "cells": _levels(head.cells, most), "first": _levels(head.first, most)}


def _levels(cells: np.ndarray, most: float) -> str:
    """Roots of shares of `most`, in 16 bits; 0 is for what is 0 exactly, such as what is masked."""
    roots = np.rint(np.sqrt(cells / most) * 65535)
    return _text(np.where(cells > 0, np.maximum(roots, 1), 0).astype("<u2"))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


# --- colours --------------------------------------------------------------------------------------


def table(scheme: str, signed: bool = False) -> np.ndarray:
    """All colours of a scheme, "light" or "dark", as bytes (256 3): masked, then the ramp."""
    stops = np.array(RAMPS[scheme]["signed" if signed else "plain"], float)
    at = np.linspace(0, len(stops) - 1, 255)
    each = np.arange(len(stops))
    ramp = np.stack([np.interp(at, each, channel) for channel in stops.T], -1)
    return np.concatenate([RAMPS[scheme]["masked"], np.rint(ramp)]).astype(np.uint8)


def levels(values: np.ndarray, most: float | None = None, signed: bool = False) -> np.ndarray:
    """Which row of the table each value has; `most`, or the largest magnitude there is, has the
    last one."""
    seen = np.isfinite(values) & (signed | (values != 0))
    values = np.where(seen, values, 0.0)
    shares = values / (most or np.abs(values).max(initial=0.0) or 1.0)
    place = (shares + 1) / 2 if signed else np.sqrt(np.clip(shares, 0, 1))
    return np.where(seen, 1 + np.rint(254 * np.clip(place, 0, 1)), 0).astype(np.uint8)


def light(colour: Sequence[float]) -> float:
    """The relative luminance of red, green and blue from 0 to 1, as WCAG 2 defines it."""
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one: float, other: float) -> float:
    """Of two luminances, from 1 to 21: 4.5 and more for text, 3 and more for lines."""
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def image(values: np.ndarray, scheme: str, most: float | None = None) -> str:
    """A map as the data address of a PNG with one pixel for each value: thousands of them cost a
    browser nothing."""
    return png(levels(values, most), table(scheme))


def hues(scheme: str) -> np.ndarray:
    """256 colours that neighbours do not share, as bytes (256 3); the first is that of what is masked."""
    light = 0.42 if scheme == "light" else 0.62
    # Steps of the golden ratio never come back to a hue.
    each = [colorsys.hls_to_rgb(0.618034 * i % 1, light, 0.6) for i in range(255)]
    colours = np.rint(255 * np.array(each))
    return np.concatenate([RAMPS[scheme]["masked"], colours]).astype(np.uint8)


def png(rows: np.ndarray, colours: np.ndarray) -> str:
    """The data address of a picture with the colour of each number (h w)."""
    lines = np.pad(rows, ((0, 0), (1, 0))).tobytes()
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 3, 0, 0, 0),
        b"PLTE": colours.tobytes(),
        b"IDAT": zlib.compress(lines),
        b"IEND": b"",
    }
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks.items():
        check = zlib.crc32(kind + body)
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)
    return "data:image/png;base64," + base64.b64encode(data).decode()
