"""One self-contained HTML page of attention: data, style and script in it, nothing fetched.

The modules of web/ are joined into one inline script, since browsers refuse module files that are opened from disk; the
policy of the page allows this script and this style, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.report.show import visible
from regard.see.trace import Array, Full, Layer, Pooled, View, chosen

WEB = Path(__file__).parent / "web"
# a module comes after those that it imports
MODULES = (
    *("dom", "palette", "data", "scale", "overview", "map", "table", "thumbs", "row", "image"),
    *("state", "app"),
)
LARGE = 1 << 18  # cells above which a head is stored without what can be computed


@dataclass(frozen=True)
class Panel:
    """A model's views on one input; `layer` and `head` are shown first."""

    name: str
    told: str
    views: Sequence[View]
    layer: int | None = None
    head: int | None = None


def page(title: str, panels: Sequence[Panel]) -> str:
    """The whole page, as HTML."""
    script, style = joined(), (WEB / "style.css").read_text(encoding="utf-8")
    data = json.dumps({"models": [_panel(panel) for panel in panels]}, allow_nan=False)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(visible(title)),
        "policy": policy,
        "style": style,
        "script": script,
        "data": data.replace("<", "\\u003c"),
    }
    frame = (WEB / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], frame)


def joined() -> str:
    """All modules as one script: imports left out, exports as plain names."""
    files = [(WEB / f"{name}.js").read_text(encoding="utf-8") for name in MODULES]
    whole = re.sub(r"^import .*;\n", "", "\n".join(files), flags=re.MULTILINE)
    return re.sub(r"^export ", "", whole, flags=re.MULTILINE)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- data ---------------------------------------------------------------------------------------------------------


def _panel(panel: Panel) -> dict[str, Any]:
    first = max(range(len(panel.views)), key=lambda i: panel.views[i].name == "cross")
    layer, head = chosen(panel.views[first], panel.layer, panel.head)
    column = _column(panel.views[first], panel.views[first].layers[layer].heads[head])
    return {
        "name": visible(panel.name),
        "told": visible(panel.told),
        "start": {"view": first, "layer": layer, "head": head, "column": column},
        "views": [_view(view) for view in panel.views],
    }


def _column(view: View, head: Full | Pooled) -> int:
    """What the row that is shown first reads most: an image's class token, or the last row of a text."""
    cells = head.weight if isinstance(head, Full) else head.cells
    row = 0 if view.picture is not None and view.name != "cross" else -1
    return int(cells[row].argmax()) * (1 if isinstance(head, Full) else view.step[1])


def _view(view: View) -> dict[str, Any]:
    picture = view.picture
    found = {
        "name": view.name,
        "title": view.title,
        "told": _told(view),
        "rows": [visible(name) for name in view.rows],
        "columns": [visible(name) for name in view.columns],
        "step": list(view.step),
        "textRows": view.name == "cross",
        "layers": [_layer(layer) for layer in view.layers],
    }
    if picture is None:
        return found
    size = len(picture.pixels)
    cut = {"size": size, "patch": picture.patch, "extra": picture.extra}
    return {**found, "image": {**cut, "pixels": _text(picture.pixels)}}


def _told(view: View) -> str:
    """What a reader must know of this view: what its rows are, and what is not there in full."""
    said = []
    if view.name == "cross":
        said.append("A row is named by the token that the model writes there.")
    if view.picture is not None:
        said.append(
            "Patches are named by their row and column in the picture, from 1,1 at the top left."
        )
    if view.whole:
        return " ".join(said)
    full = [
        f"layer {layer.number}, head {i}"
        for layer in view.layers
        for i, head in enumerate(layer.heads)
        if isinstance(head, Full)
    ]
    if view.step == (1, 1):
        more = f"scores and values of {', '.join(full)} alone" if full else "scores are not"
        said.append(f"All weights are here; {more}.")
    else:
        down, across = view.step
        said.append(
            f"{len(view.rows)} × {len(view.columns)} tokens in every head are too many for one page: heads are "
            f"max-pooled, a cell is the largest weight of {down} × {across} tokens."
        )
        said += [f"In full: {', '.join(full)}."] if full else []
    said.append("For another: regard look ... --layer N --head N.")
    return " ".join(said)


def _layer(layer: Layer) -> dict[str, Any]:
    found = {
        "number": layer.number,
        "heads": [_full(head) if isinstance(head, Full) else _pooled(head) for head in layer.heads],
        "scale": layer.scale,
        "biased": layer.biased,
        "capped": layer.capped,
        "sinks": layer.sinks,
        "sparse": layer.sparse,
    }
    if any(isinstance(head, Pooled) for head in layer.heads):
        found["mean"] = _pooled(layer.mean)
    return found


def _full(head: Full) -> dict[str, str]:
    """Of a large head a third: its weights are exp(score - total), with one total a row."""
    arrays = {"weight": head.weight, "score": head.score, "norm": head.norm, "raw": head.raw}
    if head.weight.size > LARGE:
        arrays = {"score": head.score, "norm": head.norm, "total": _totals(head)}
    return {name: _text(array.astype("<f4")) for name, array in arrays.items() if array is not None}


def _totals(head: Full) -> Array:
    at = head.weight.argmax(-1)[:, None]
    score, weight = (np.take_along_axis(x, at, -1)[:, 0] for x in (head.score, head.weight))
    return np.where(weight > 0, score - np.log(np.where(weight > 0, weight, 1.0)), np.inf)


def _pooled(head: Pooled) -> dict[str, Any]:
    most = float(head.cells.max()) or 1.0
    return {"most": most, "cells": _levels(head.cells, most), "first": _levels(head.first, most)}


def _levels(cells: Array, most: float) -> str:
    """Roots of shares of `most`, in 16 bits; 0 is for what is 0 exactly, such as what is masked."""
    found = np.rint(np.sqrt(cells / most) * 65535)
    return _text(np.where(cells > 0, np.maximum(found, 1), 0).astype("<u2"))


def _text(array: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
