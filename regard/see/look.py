"""What a model attends to while it reads a text or a picture, as data for a page or for pictures.

A view is a kind of attention that shares its tokens: of one tower `self`, of two `encoder`,
`decoder` and `cross`. The first forward measures each head as soon as it is there (see/heads.py),
pools it, so that memory is bounded by a few heads, and tells how large the maps are. Of a short
text the next one takes every head in full, with the steps to its weights; of a longer text one
head. Between short and long there is room for every weight: a pool is then one of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import DSA, GQA, MLA, SSD, Compressed, DeltaRule
from regard.block import Tower
from regard.checkpoint import load
from regard.data.pictures import Pictures, load_arrays
from regard.decode.generate import GREEDY, default_length, generate, special_of, tokenizer_of
from regard.errors import DATA, UsageError, blaming
from regard.models import Canvas, PainterConfig, PairConfig, Patches, Sound
from regard.models.embedding import context
from regard.see.heads import Head, Pair, Read, measured
from regard.see.probe import Probe, number_of
from regard.text import Tokenizer, needed

# The longest side of a pooled head, and how many cells all of them together may have.
SIDE, THUMBS = 64, 1 << 21
# Up to so many cells every head is in full, every weight is there, the asked head is in full.
WHOLE, EVERY, ONE = 1 << 19, 6 << 20, 1 << 21
TITLES = {"self": "Self-attention", "cross": "Cross-attention"}
BLANK = " \n\r\t"
MARKS = str.maketrans(dict(zip(BLANK, "␣⏎␍⇥")) | {"▁": "␣", "Ġ": "␣", "Ċ": "⏎"})
# Marks such as </s> and [SEP], and what has neither letter nor digit.
NO_WORD = re.compile(r"<.*>|\[.*\]|[\W_]*", re.DOTALL)
P = TypeVar("P", bound=Probe)


@dataclass(frozen=True)
class Full:
    """A head (t s) with the steps to its weights. `score`: -inf where it is masked. `norm` (s): the
    lengths of the values. `raw`: q.k before scale and mask, where scores are such products."""

    weight: np.ndarray
    score: np.ndarray
    norm: np.ndarray
    raw: np.ndarray | None = None

    @property
    def cells(self) -> np.ndarray:
        return self.weight


@dataclass(frozen=True)
class Pooled:
    """The largest weight of each block of cells (t' s'); `first` (t'): of the first blocks, without
    the first token."""

    cells: np.ndarray
    first: np.ndarray


@dataclass(frozen=True)
class Layer:
    """`mean` of the heads, where they are pooled; `measures` of each, where it was measured. The
    rest says how scores are made, where a head is in full; `summed`: weights are 1, not shares of
    1; `sparse`: each query chooses its keys."""

    number: int
    site: str
    heads: Sequence[Full | Pooled]
    mean: Pooled | None = None
    measures: Sequence[dict[str, float]] = ()
    scale: float = 1.0
    biased: bool = False
    capped: bool = False
    sinks: bool = False
    summed: bool = False
    sparse: bool = False


@dataclass(frozen=True)
class Picture:
    """The image that was read, bytes (size size 3), and how it was cut: into patches of so many
    pixels, with `extra` tokens before them."""

    pixels: np.ndarray
    patch: int
    extra: int


@dataclass(frozen=True)
class View:
    """`step`: tokens down and across that a pooled cell stands for. `picture`: what the columns are
    patches of. `numbers`: which rows of the whole these are, where they were chosen."""

    name: str
    rows: list[str]
    columns: list[str]
    layers: list[Layer]
    step: tuple[int, int] = (1, 1)
    picture: Picture | None = None
    numbers: Sequence[int] = ()

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name.capitalize())

    @property
    def whole(self) -> bool:
        return all(isinstance(head, Full) for layer in self.layers for head in layer.heads)

    def small(self, head: Full | Pooled) -> Tensor:
        """A head's cells, as few as those of the pooled ones beside it."""
        cells = torch.from_numpy(head.cells)
        if isinstance(head, Pooled):
            return cells
        return F.max_pool2d(cells[None], self.step, ceil_mode=True)[0]

    def tokens(self, device: torch.device) -> Pair:
        """What is known of the tokens of a map."""
        places = None
        if (picture := self.picture) is not None:
            side = torch.arange(float(len(picture.pixels) // picture.patch), device=device)
            patches, no_place = torch.cartesian_prod(side, side), (0, 0, picture.extra, 0)
            places = F.pad(patches, no_place, value=math.nan)
        return Pair(self.rows, self.columns, device, self.name == "cross", places)


@dataclass(frozen=True)
class Panel:
    """A model's views on one input; `layer` and `head` are shown first. `without`: which layers have
    no heads, and why."""

    name: str
    note: str
    views: Sequence[View]
    layer: int | None = None
    head: int | None = None
    without: str = ""

    @property
    def heads(self) -> list[Head]:
        """Every head with its measures, in the model's order."""
        return [
            Head(view.name, layer.number, i, measures)
            for view in self.views
            for layer in view.layers
            for i, measures in enumerate(layer.measures)
        ]


@dataclass(frozen=True)
class Given:
    """What a model reads, (1 t) or an image (1 c h w), with the tokens' names: `fed` to the one
    tower or the decoder, `source` to the encoder or in the `memory` (1 s m), `written` at each
    place of the decoder."""

    ids: Tensor
    fed: list[str]
    source_ids: Tensor | None = None
    source: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    picture: Picture | None = None
    memory: Tensor | None = None


# --- what a model reads ---------------------------------------------------------------------------


def look(
    model: str | Path | Any,
    text: str = "",
    *,
    image: str | None = None,
    target: str | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> Panel:
    """What a model attends to while it reads the text, or the picture of this file: its maps in
    `views`, and every head in numbers in `heads`. `model` is a folder or a model; `target` is what an
    encoder-decoder writes, by default what it writes by itself. Of a long text the maps are pooled,
    but that of `layer` and `head`."""
    loaded = load(model) if isinstance(model, (str, Path)) else model
    name = Path(model).absolute().name if loaded is not model else type(model).__name__
    asked: Any = {"image": image, "target": target, "layer": layer, "head": head}
    asked["precision"] = str(next(loaded.parameters()).dtype).removeprefix("torch.")
    return panel(loaded, tokenizer_of(loaded), name, text, **asked)


def panel(
    model: Any,
    tokenizer: Tokenizer | None,
    name: str,
    text: str = "",
    *,
    image: str | None = None,
    target: str | None = None,
    memory: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    precision: str = "fp32",
    compared: bool = False,
) -> Panel:
    """A model's attention to the text or the picture; `target` is what an encoder-decoder writes,
    by default what it writes by itself; `memory` is the npy file of the features (s m) that a model
    of one tower attends to, if it has cross-attention. `layer` and `head` are shown first. `compared`: another
    model reads the same."""
    first = getattr(model.config, "source" if model.reads_source else "embedding", None)
    sees = isinstance(first, Patches)
    shown = image is not None
    kind = "pictures" if sees else "text"
    alike = "give --compare two models that read the same"
    aligns = f"--target asks how words align, and {name} has no cross-attention"
    tower: Any = getattr(model.config, "tower", None)
    remembers = tower is not None and tower.cross is not None
    wrong = (
        (isinstance(first, Sound), f"{name} reads sound; looks are into texts and pictures"),
        (isinstance(model.config, PairConfig), f"{name} is a pair of models; look at one of them"),
        (remembers and not memory, f"{name} attends to a memory; give one: --memory FILE.npy"),
        (memory and not remembers, f"{name} has no memory to attend to; leave --memory out"),
        (target is not None and not model.reads_source, f"{aligns}; leave --target out"),
        (compared and sees != shown and (shown or text), f"{name} reads {kind}; {alike}"),
        (sees and not shown, f"{name} reads pictures; give one: --image FILE"),
        (shown and not sees, f'{name} reads text; give that instead of --image: "some text"'),
        (shown and text, f"{name} reads a picture alone; leave the text out"),
        (
            not shown and not text.strip(),
            'there is no text to look at; say regard look MODEL "some text"',
        ),
    )
    for holds, message in wrong:
        if holds:
            raise UsageError(message)
    given = _given(model, tokenizer, first, text, image, target)
    if memory is not None:
        given = remembering(given, Path(memory), tower.memory_dim or tower.dim)
    views = trace(model, given, layer, head)
    count = f"{len(given.fed)} tokens"
    if given.source_ids is not None:
        count = f"{len(given.source)} source tokens, {len(given.fed)} target tokens"
    of = mechanisms(model.config)
    shapes = (shape(view, of.get(view.name, "")) for view in views)
    note = f"{count}, {precision}; {', '.join(shapes)}"
    return Panel(name, note, views, layer, head, headless(model.config, views))


def _given(
    model: Any,
    tokenizer: Tokenizer | None,
    first: Any,
    text: str,
    image: str | None,
    target: str | None,
) -> Given:
    device = next(model.parameters()).device
    ids: list[int] = []
    if isinstance(first, Patches):
        x, picture = read_picture(first, model.origin, Path(image or ""))
        given = Given(x.to(device), patches(first), picture=picture)
    else:
        ids = fits(needed(tokenizer).encode(text), model.config, first, "the text")
        given = Given(torch.tensor([ids], device=device), names(tokenizer, ids))
    if isinstance(model.config, PainterConfig):
        return drawing(model.config, given)
    if not model.reads_source:
        return given
    if target is not None:
        written = needed(tokenizer).encode_target(target)
    else:
        most = default_length(model, [ids or [0] * given.ids.shape[-1]])
        how: Any = {"max_new_tokens": most, **GREEDY}
        written = generate(model, [ids] if ids else given.ids, **how)[0].ids
        if not written:
            raise UsageError("the model wrote nothing; give what it should write: --target TEXT")
    written = fits(written, model.config, getattr(model.config, "target", None), "the target")
    return writing(model, tokenizer, given, written)


def remembering(given: Given, path: Path, width: int) -> Given:
    """The same with the features (s width) of an npy file as memory."""
    with blaming(DATA):
        features = load_arrays(path)
    if not isinstance(features, np.ndarray) or features.shape[1:] != (width,) or not len(features):
        held = getattr(features, "shape", "several arrays")
        raise UsageError(f"{path} must hold features of shape (s, {width}), it holds {held}")
    memory = torch.from_numpy(features.astype(np.float32))[None].to(given.ids.device)
    names = [str(i) for i in range(len(features))]
    return replace(given, source=names, written=given.fed, memory=memory)


def drawing(config: PainterConfig, given: Given) -> Given:
    """What a painter's patches attend to: each other, and the text."""
    squares = patches(config.canvas)
    return replace(given, fed=squares, source=given.fed, written=squares)


def writing(model: Any, tokenizer: Tokenizer | None, source: Given, written: list[int]) -> Given:
    """What an encoder-decoder reads while it writes these tokens: the source, and each token
    before, behind the one that starts."""
    fed = [special_of(model).start or 0, *written[:-1]]
    ids = torch.tensor([fed], device=source.ids.device)
    target = names(tokenizer, written)
    return Given(ids, names(tokenizer, fed), source.ids, source.fed, target, source.picture)


def names(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    return [str(i) if tokenizer is None else named(tokenizer, i) for i in ids]


def fits(ids: list[int], config: Any, side: Any, what: str) -> list[int]:
    """The ids, if there are some and the model can read them; `side`: how it embeds them."""
    limit = getattr(config, "max_len", None)
    longest = context(limit, side) if hasattr(side, "position") else limit
    if not ids:
        raise UsageError(f"{what} has no tokens; give some words")
    if longest is not None and len(ids) > longest:
        raise UsageError(
            f"{what} has {len(ids)} tokens, the model's context is {longest}; "
            f"shorten it: about {longest / len(ids):.0%} of it fits"
        )
    return ids


def read_picture(wanted: Patches, origin: Any, path: Path) -> tuple[Tensor, Picture]:
    """The image (1 c h w) as the model reads it, and as people see it."""
    reader = Pictures(wanted, origin)
    with blaming(DATA):
        x = reader.file(path)
    seen = (x.numpy().transpose(1, 2, 0) * reader.std + reader.mean) * 255
    pixels = np.broadcast_to(np.clip(np.rint(seen), 0, 255), (*seen.shape[:2], 3))
    return x[None], Picture(pixels.astype(np.uint8), wanted.patch, wanted.extra)


def named(tokenizer: Tokenizer, index: int) -> str:
    """A token as people would write it, with its spaces as ␣; as the vocabulary does where it is
    part of a letter."""
    text = tokenizer.decode([index], skip_special=False)
    bare = text.strip(BLANK)
    if text and not bare:
        return text.translate(MARKS)
    piece = "".join(tokenizer.pieces([index], skip_special=False))
    if not bare or "\ufffd" in text:
        return piece.translate(MARKS) or str(index)
    before, after = text.split(bare, 1)
    # The decoder may drop a first space, which the vocabulary has.
    dropped = piece[:1] if piece[:1] in ("▁", "Ġ") else ""
    return (before or dropped).translate(MARKS) + bare + after.translate(MARKS)


def patches(wanted: Patches | Canvas) -> list[str]:
    """Names of the tokens of an image: the class token, then patches by row and column from 1."""
    side = wanted.size // wanted.patch
    count = wanted.extra if isinstance(wanted, Patches) else 0
    extra = ["class", "distil", *(f"extra {i}" for i in range(2, count))][:count]
    return extra + [f"{i + 1},{j + 1}" for i in range(side) for j in range(side)]


def shape(view: View, mechanism: str) -> str:
    heads = sorted({len(layer.heads) for layer in view.layers})
    count = "–".join(map(str, dict.fromkeys((heads[0], heads[-1]))))
    layers = len(view.layers)
    each = "head" if count == "1" else "heads"
    text = f"{view.title.lower()}: {layers} layer{'s' * (layers > 1)} of {count} {each}"
    return f"{text} ({mechanism})" if mechanism else text


def mechanisms(config: Any) -> dict[str, str]:
    """What kind of attention each view of a model shows: mha, gqa, mla, ..."""
    parts = {name: getattr(config, name, None) for name in ("tower", "encoder", "decoder")}
    towers = {name: tower for name, tower in parts.items() if isinstance(tower, Tower)}
    kinds = {name: map(_kind, tower.each("attention")) for name, tower in towers.items()}
    names = {name: " and ".join(dict.fromkeys(each)) for name, each in kinds.items()}
    cross = getattr(towers.get("decoder", towers.get("tower")), "cross", None)
    return names | {"self": names.get("tower", ""), "cross": _kind(cross) if cross else ""}


def headless(config: Any, views: Sequence[View]) -> str:
    """The layers of the towers that no view shows, with what they are."""
    told = []
    for view in views:
        tower = getattr(config, "tower" if view.name == "self" else view.name, None)
        shown = {layer.number for layer in view.layers}
        kinds = map(_kind, tower.each("attention")) if isinstance(tower, Tower) else ()
        lost = {number: kind for number, kind in enumerate(kinds) if number not in shown}
        if lost:
            each = "layer" if len(lost) == 1 else "layers"
            what = " and ".join(dict.fromkeys(lost.values()))
            told.append(f"{each} {listed(list(lost))} of {view.title.lower()}: no heads ({what})")
    return "; ".join(told)


# What a view says of a mechanism, where the name of its kind says too little.
SAID: dict[type, Callable[[Any], str]] = {
    GQA: lambda a: {1: "mqa", a.heads: "mha"}.get(a.groups, f"gqa, {a.groups} key heads"),
    MLA: lambda a: f"mla, latent of {a.latent}",
    DSA: lambda a: f"{_kind(a.attention)}; dsa chooses {a.topk} keys",
    Compressed: lambda a: (
        f"the last {a.local} tokens" + (f", and entries of {a.rate}" if a.rate else "")
    ),
    DeltaRule: lambda a: "delta rule, a state that weighs no tokens",
    SSD: lambda a: "state-space dual, a state that weighs no tokens",
}


def _kind(attention: Any) -> str:
    """That of a mechanism without a row is its `kind`, or its class."""
    said = SAID.get(type(attention))
    return said(attention) if said else str(getattr(attention, "kind", type(attention).__name__))


# --- the views ------------------------------------------------------------------------------------


@torch.inference_mode()
def trace(
    model: Any, given: Given, layer: int | None = None, head: int | None = None
) -> list[View]:
    """The views of a model on one input. `layer` and `head`: the one that is wanted in full where
    not all can be."""

    def run(probe: P) -> P:
        return watched(model, given, probe)

    tokens: dict[str, Pair] = {}

    def measure(site: str, a: Tensor) -> dict[str, float]:
        if site not in tokens:
            # Of one place alone, since they are as large as a map.
            tokens.clear()
            tokens[site] = _view_of(given, site, a.shape).tokens(a.device)
        return measured(Read(a, tokens[site]))

    first = pools = run(Pools(SIDE, measure))
    sizes = pools.sizes
    _check(model.config, sizes, layer, head)
    cells = sum(h * t * s for h, t, s in sizes.values())
    if cells <= WHOLE:
        return [_measured(view, first.measures) for view in exact(model, given)]
    extra = 1
    if cells <= EVERY:
        pools = run(Pools(max(max(t, s) for _, t, s in sizes.values())))
    else:
        while sum(h for h, _, _ in sizes.values()) * (SIDE // extra) ** 2 > THUMBS:
            extra *= 2

    views: dict[str, View] = {}
    for site, (_, *size) in sizes.items():
        down, across = pools.step(site)
        view = _view_of(given, site, size, step=(down * extra, across * extra))
        *heads, mean = pools.pooled(site, extra)
        one = Layer(number_of(site) or 0, site, heads, mean)
        views.setdefault(view.name, view).layers.append(one)
    for view in views.values():
        at, which, *_ = telling(view, layer, head)
        if len(view.rows) * len(view.columns) <= ONE:
            view.layers[at] = run(Steps([view.layers[at].site], [which])).filled(view.layers[at])
    return [_measured(view, first.measures) for view in views.values()]


def _measured(view: View, measures: dict[str, list[dict[str, float]]]) -> View:
    layers = [replace(layer, measures=measures[layer.site]) for layer in view.layers]
    return replace(view, layers=layers)


@torch.inference_mode()
def exact(
    model: Any,
    given: Given,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    most: int = ONE,
) -> list[View]:
    """The views on one input with these layers, heads and rows alone (None: all), each of them in
    full; more than `most` cells are refused before they are made."""
    probe = watched(model, given, Steps(layers, heads, rows, most=most))
    views: dict[str, View] = {}
    for site, (_, *size) in probe.sizes.items():
        numbers = [i for i in range(size[0]) if rows is None or i in rows]
        if numbers:
            view = _view_of(given, site, size, numbers=numbers)
            layer = probe.filled(Layer(number_of(site) or 0, site, []))
            views.setdefault(view.name, view).layers.append(layer)
    if not views:
        sites = ", ".join(probe.sites) or "no attention"
        raise UsageError(
            f"there are no rows {rows} in layers {layers or 'of any number'}; rows count from 0, "
            f"and this model has {sites}"
        )
    return list(views.values())


def watched(model: Any, given: Given, probe: P) -> P:
    """The probe after one forward, without logits: no map needs them, and they are large."""
    more = {} if given.source_ids is None else {"source": given.source_ids}
    more |= {} if given.memory is None else {"memory": given.memory}
    model.hidden(given.ids, probe=probe, **more)
    return probe


def _view_of(
    given: Given, site: str, size: Sequence[int], numbers: Sequence[int] = (), **more: Any
) -> View:
    """The view that shows a place (3.self: self, decoder.3.cross: cross, decoder.3.self: decoder),
    without layers; `numbers`: some of its rows alone. A recurrent model's memory may have more
    tokens than were named, or less."""
    tower, _, kind = ("", *site.split("."))[-3:]
    name = kind if kind == "cross" or not tower else tower
    sides = {"encoder": (given.source,) * 2, "cross": (given.written, given.source)}
    rows, columns = (
        [*names[:n], *map(str, range(len(names), n))]
        for names, n in zip(sides.get(name, (given.fed,) * 2), size)
    )
    rows = [rows[i] for i in numbers] if numbers else rows
    picture = None if name == "decoder" else given.picture
    return View(name, rows, columns, [], picture=picture, numbers=numbers, **more)


def telling(
    view: View, layer: int | None = None, head: int | None = None
) -> tuple[int, int, int, int]:
    """Where to look first: a layer's place in the view, a head, a row and a column. Of the heads
    that are asked for, or of all, the weight that stands out most from what other rows give its
    column, so that what every row reads counts little."""
    numbers = [each.number for each in view.layers]
    layers = [numbers.index(layer)] if layer in numbers else range(len(numbers))
    places = [
        (i, j)
        for i in layers
        for j, _ in enumerate(view.layers[i].heads)
        if head is None or j == min(head, len(view.layers[i].heads) - 1)
    ]

    def most(place: tuple[int, int]) -> float:
        cells = view.small(view.layers[place[0]].heads[place[1]])
        return float(_standing_out(view, cells.numpy()).max())

    i, j = max(places, key=most)
    found = view.layers[i].heads[j]
    down, across = (1, 1) if isinstance(found, Full) else view.step
    stands = _standing_out(view, found.cells)
    row, column = np.unravel_index(int(stands.argmax()), stands.shape)
    return i, j, int(row) * down, int(column) * across


def _standing_out(view: View, cells: np.ndarray) -> np.ndarray:
    """By how much each weight is above the mean of the others in its column. What is rarely worth a
    look gets -1, as long as something is left: the first key, in a text a token itself and its
    neighbours, what is not a word; of a picture all but what its class token reads of patches."""
    seen = cells > 0
    stands = cells - (cells.sum(0) - cells) / np.maximum(seen.sum(0) - seen, 1)
    rows, columns = cells.shape
    dull = np.zeros(cells.shape, bool)
    dull[:, 0] = True
    if view.picture is not None:
        dull[:, : view.picture.extra] = True
        dull[1:] |= view.name != "cross"
    elif view.name != "cross":
        dull |= abs(np.arange(rows)[:, None] - np.arange(columns)) <= min(3, columns // 4)
    if cells.shape == (len(view.rows), len(view.columns)):
        rows_dull, columns_dull = (
            np.array([NO_WORD.fullmatch(name) is not None for name in names])
            for names in (view.rows, view.columns)
        )
        dull |= rows_dull[:, None] | columns_dull
    return np.where(dull & ~dull.all(), -1.0, stands)


def listed(numbers: Sequence[int]) -> str:
    run = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]} to {numbers[-1]}" if run else " and ".join(map(str, numbers))


def _check(
    config: Any, sizes: dict[str, tuple[int, int, int]], layer: int | None, head: int | None
) -> None:
    """A layer or head that no view has is a mistake; the message names those that it has."""
    if not sizes:
        kinds = " and ".join(kind for kind in mechanisms(config).values() if kind)
        what = kinds or "cells that remember, without attention"
        raise UsageError(f"this model has no attention to look at: its layers are {what}")
    numbers = sorted({number_of(site) or 0 for site in sizes})
    if layer is not None and layer not in numbers:
        raise UsageError(f"there is no layer {layer}; this model's are {listed(numbers)}")
    heads = max(h for site, (h, _, _) in sizes.items() if layer in (None, number_of(site)))
    if head is not None and not 0 <= head < heads:
        raise UsageError(f"there is no head {head}; the heads are {listed(range(heads))}")


class Pools(Probe):
    """A probe that keeps of each head, and behind them of their mean, a thumbnail of at most `side`
    cells down and across; and what `measure` says of a place and a head's map (t s) there."""

    def __init__(
        self, side: int, measure: Callable[[str, Tensor], dict[str, float]] | None = None
    ) -> None:
        super().__init__(reduce=self._pool)
        self.side = side
        self.measure = measure
        self.measures: dict[str, list[dict[str, float]]] = {}
        self.done = 0
        self.sum = torch.empty(0)

    def step(self, site: str) -> tuple[int, int]:
        """Tokens down and across that a cell stands for."""
        _, rows, keys = self.sizes[site]
        return -(-rows // self.side), -(-keys // self.side)

    def pooled(self, site: str, extra: int) -> list[Pooled]:
        """The heads and their mean, pooled once more by `extra` cells."""
        maps = self.maps[site][0]
        small = _largest(maps[..., :1], maps[..., 1:], extra, extra)[0].cpu().numpy()
        return [Pooled(a[:, 1:], a[:, 0]) for a in small]

    def _pool(self, a: Tensor) -> Tensor:
        # The place that is being watched.
        site = next(reversed(self.sizes))
        count, step = self.sizes[site][0], self.step(site)
        if self.measure is not None:
            self.measures.setdefault(site, []).append(self.measure(site, a[0, 0]))
        first = a.new_zeros(*a.shape[:3], 1)
        small = [_largest(first, a, *step)]
        self.sum = self.sum.add_(a) if self.done else a
        self.done = (self.done + 1) % count
        if not self.done:
            small.append(_largest(first, self.sum.div_(count), *step))
        return torch.cat(small, 1)


def _largest(first: Tensor, cells: Tensor, down: int, across: int) -> Tensor:
    """Cells (b h t s) max-pooled, behind a column of the first blocks without the first token,
    which `first` (b h t 1) has of the first cells: (b h t' 1 + s')."""
    first = torch.cat([first, cells[..., 1:across]], -1).amax(-1, keepdim=True)
    columns = ((first, 1), (cells, across))
    pools = [F.max_pool2d(x, (down, wide), ceil_mode=True) for x, wide in columns]
    return torch.cat(pools, 3).float()


class Steps(Probe):
    """A probe of whole heads, or of these layers, heads and rows of them."""

    def __init__(self, *chosen: Sequence[Any] | None, most: float = math.inf):
        super().__init__(*chosen, what=("weight", "score", "norm", "raw"), most=most)

    def filled(self, layer: Layer) -> Layer:
        """The layer with the heads that were watched in full."""
        kinds = [self.of(kind)[layer.site][0][0] for kind in ("weight", "score", "norm")]
        weight, score, norm = (a.float().cpu() for a in kinds)
        # h 1 s: where a key's value weighs most.
        row = weight.argmax(1, keepdim=True)
        most = weight.gather(1, row).clamp(min=torch.finfo(torch.float32).tiny)
        norm = (norm.gather(1, row) / most)[:, 0]
        raw = [a[0][0].float().cpu() for site, a in self.of("raw").items() if site == layer.site]
        arrays = [x.numpy() for x in (weight, score, norm, *raw)]
        which = range(len(weight)) if self.heads is None else self.heads
        heads = dict(enumerate(layer.heads)) | dict(zip(which, map(Full, *arrays)))
        return replace(layer, heads=list(heads.values()), **self.how[layer.site])
