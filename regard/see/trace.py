"""The attention of one input as data for a page or a picture: every head, in full or pooled, by
view.

A view is a kind of attention that shares its tokens: of one tower `self`, of two `encoder`,
`decoder` and `cross`. The first forward pools each head as soon as it is there, so that memory is
bounded by one head; the next one takes the heads that the page holds in full, with the steps to
their weights. Of a text between short and long, every head's weights are there one by one, and the
steps of one head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.core import Terms, scores
from regard.attention.sparse import Spread
from regard.errors import UsageError
from regard.mask import Visible
from regard.see.probe import Probe, Recorder

# Cells: of a pooled head's side at most; up to which every head is in full, every weight is there,
# the asked head is; of all pooled heads together.
SIDE, WHOLE, EVERY, ONE, THUMBS = 64, 1 << 19, 6 << 20, 1 << 21, 1 << 21
TITLES = {"self": "Self-attention", "cross": "Cross-attention"}
P = TypeVar("P", bound=Probe)


@dataclass(frozen=True)
class Full:
    """A head (t s) with the steps to its weights. `raw`: q.k before scale and mask, where scores
    are such products."""

    weight: np.ndarray
    score: np.ndarray  # -inf: masked
    norm: np.ndarray  # (s): lengths of the values
    raw: np.ndarray | None = None


@dataclass(frozen=True)
class Pooled:
    """The largest weight of each block of cells (t' s'); `first` (t'): of the first blocks, without
    the first token."""

    cells: np.ndarray
    first: np.ndarray


@dataclass(frozen=True)
class Layer:
    """`mean` of the heads, where they are pooled. The rest says how scores are made, where a head
    is in full."""

    number: int
    site: str
    heads: list[Full | Pooled]
    mean: Pooled
    scale: float = 1.0
    biased: bool = False
    capped: bool = False
    sinks: bool = False
    sparse: bool = False  # keys are chosen for each query


@dataclass(frozen=True)
class Picture:
    """The image that was read, bytes (size size 3), and how it was cut."""

    pixels: np.ndarray
    patch: int
    extra: int  # tokens before the patches


@dataclass(frozen=True)
class View:
    """`step`: tokens down and across that a pooled cell stands for. `picture`: what the columns are
    patches of."""

    name: str
    rows: list[str]
    columns: list[str]
    layers: list[Layer]
    step: tuple[int, int] = (1, 1)
    picture: Picture | None = None

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name.capitalize())

    @property
    def whole(self) -> bool:
        return all(isinstance(head, Full) for layer in self.layers for head in layer.heads)


@dataclass(frozen=True)
class Given:
    """What a model reads, (1 t) or an image (1 c h w), with the tokens' names: `fed` to the one
    tower or the decoder, `source` to the encoder, `written` at each place of the decoder."""

    ids: Tensor
    fed: list[str]
    source_ids: Tensor | None = None
    source: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    picture: Picture | None = None

    def names(self, view: str) -> tuple[list[str], list[str]]:
        if view == "encoder":
            return self.source, self.source
        return (self.written, self.source) if view == "cross" else (self.fed, self.fed)


@torch.inference_mode()
def trace(
    model: Any, given: Given, layer: int | None = None, head: int | None = None
) -> list[View]:
    """The views of a model on one input. `layer` and `head`: the one that is wanted in full where
    not all can be."""

    def run(probe: P) -> P:
        more = {} if given.source_ids is None else {"source": given.source_ids}
        # Without logits: no map needs them, and they are large.
        model.hidden(given.ids, probe=probe, **more)
        return probe

    pools = run(Pools(SIDE))
    if not pools.sizes:
        raise UsageError("this model has no attention to look at")
    views = _pooled(pools, given)
    check(views, layer, head)
    if pools.cells <= WHOLE:
        steps = run(Steps())
        return [replace(v, layers=[steps.filled(each) for each in v.layers]) for v in views]
    if pools.cells <= EVERY:
        views = _pooled(run(Pools()), given)
    for view in views:
        at, which = chosen(view, layer, head)
        if len(view.rows) * len(view.columns) <= ONE:
            steps = run(Steps([view.layers[at].site], [which]))
            view.layers[at] = steps.filled(view.layers[at])
    return views


def chosen(view: View, layer: int | None, head: int | None) -> tuple[int, int]:
    """The place of a layer in the view and a head of it: those asked for, else the last layer's
    first."""
    numbers = [each.number for each in view.layers]
    at = numbers.index(layer) if layer in numbers else len(numbers) - 1
    return at, min(head or 0, len(view.layers[at].heads) - 1)


def check(views: Sequence[View], layer: int | None, head: int | None) -> None:
    """A layer or head that no view has is a mistake; the message names those that it has."""
    layers = [each for view in views for each in view.layers]
    numbers = sorted({each.number for each in layers})
    if layer is not None and layer not in numbers:
        raise UsageError(f"there is no layer {layer}; this model's are {_listed(numbers)}")
    heads = max(len(each.heads) for each in layers if layer in (None, each.number))
    if head is not None and not 0 <= head < heads:
        raise UsageError(f"there is no head {head}; the heads are {_listed(range(heads))}")


def _listed(numbers: Sequence[int]) -> str:
    run = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]} to {numbers[-1]}" if run else " and ".join(map(str, numbers))


# --- every head, pooled -------------------------------------------------------------------------


class Pools(Probe):
    """A probe that keeps of each head, and of the mean of a layer's heads, no more than a thumbnail
    of `side` cells; without a side, every weight."""

    def __init__(self, side: int | None = None) -> None:
        super().__init__(reduce=self._pool)
        self.side = side
        self.sizes: dict[str, tuple[int, int]] = {}
        self._means: dict[str, Tensor] = {}
        self.site, self.sum = "", torch.empty(0)

    def at(self, site: str) -> Recorder | None:
        if site != self.site:
            self._close()
            self.site, self.sum = site, torch.empty(0)
        return super().at(site)

    def _close(self) -> None:
        """The layer that was watched is complete."""
        if self.sum.numel():
            self._means[self.site] = self._small(self.sum.div_(self.count(self.site)))
            self.sum = torch.empty(0)

    @property
    def means(self) -> dict[str, Tensor]:
        self._close()
        return self._means

    @property
    def cells(self) -> int:
        return sum(self.count(site) * rows * keys for site, (rows, keys) in self.sizes.items())

    def count(self, site: str) -> int:
        return self.maps[site][0].shape[1]

    def step(self, site: str) -> tuple[int, int]:
        """Tokens down and across that a cell stands for."""
        rows, keys = (-(-n // (self.side or n)) for n in self.sizes[site])
        return rows, keys

    def _pool(self, a: Tensor) -> Tensor:
        self.sizes[self.site] = (a.shape[2], a.shape[3])
        small = self._small(a)
        self.sum = self.sum.add_(a) if self.sum.numel() else a
        return small

    def _small(self, a: Tensor) -> Tensor:
        return _thumbs(a, *self.step(self.site)).float()


def _thumbs(a: Tensor, down: int, across: int) -> Tensor:
    """(b h t s) -> (b h t' 1 + s'): pooled, behind the first column of blocks without the first
    token."""
    small, rest = _largest(a, down, across), a[..., 1:across]
    first = _largest(rest, down, across) if rest.shape[3] else torch.zeros_like(small[..., :1])
    return torch.cat([first, small], 3)


def _largest(a: Tensor, down: int, across: int) -> Tensor:
    return a if down == across == 1 else F.max_pool2d(a, (down, across), ceil_mode=True)


def smaller(a: Tensor, step: int) -> Pooled:
    """(t' 1 + s') of a head, pooled once more."""
    # The first blocks without the first token.
    bare = torch.cat([a[:, :1], a[:, 2 : step + 1]], 1)
    cells = _largest(a[None, None, :, 1:], step, step)[0, 0]
    first = _largest(bare[None, None], step, bare.shape[1])[0, 0, :, 0]
    return Pooled(cells.cpu().numpy(), first.cpu().numpy())


def _pooled(pools: Pools, given: Given) -> list[View]:
    total = sum(pools.count(site) for site in pools.sizes)
    extra = 1
    while pools.side and total * (pools.side // extra) ** 2 > THUMBS:
        extra *= 2
    views: dict[str, View] = {}
    for site, size in pools.sizes.items():
        tower, number, kind = ("", *site.split("."))[-3:]
        name = kind if kind == "cross" or not tower else tower
        rows, columns = (_fit(names, n) for names, n in zip(given.names(name), size))
        down, across = pools.step(site)
        picture = None if name == "decoder" else given.picture
        view = View(name, rows, columns, [], (down * extra, across * extra), picture)
        heads: list[Full | Pooled] = [smaller(a, extra) for a in pools.maps[site][0][0]]
        mean = smaller(pools.means[site][0, 0], extra)
        views.setdefault(name, view).layers.append(Layer(int(number), site, heads, mean))
    return list(views.values())


def _fit(names: Sequence[str], size: int) -> list[str]:
    """As many names as there are tokens: a recurrent model's memory may have more or less."""
    return [*names[:size], *map(str, range(len(names), size))]


# --- some heads, in full ------------------------------------------------------------------------


class Steps(Probe):
    """A probe of whole heads that keeps q.k as well, and how scores were made of it."""

    def __init__(self, layers: Sequence[str] | None = None, heads: Sequence[int] | None = None):
        super().__init__(layers, heads, what=("weight", "score", "norm"))
        self.how: dict[str, dict[str, Any]] = {}
        self.raw: dict[str, Tensor] = {}

    def at(self, site: str) -> Recorder | None:
        return None if super().at(site) is None else StepRecorder(self, site)

    def filled(self, layer: Layer) -> Layer:
        """The layer with the heads that were watched in full."""
        kinds = [self.of(kind)[layer.site][0][0] for kind in ("weight", "score", "norm")]
        weight, score, norm = (a.float().cpu() for a in kinds)
        # h 1 s: where a key's value weighs most.
        row = weight.argmax(1, keepdim=True)
        most = weight.gather(1, row).clamp(min=torch.finfo(torch.float32).tiny)
        norm = (norm.gather(1, row) / most)[:, 0]
        raw = self.raw[layer.site].float().cpu().numpy() if layer.site in self.raw else None
        heads = list(layer.heads)
        which = range(len(heads)) if self.heads is None else self.heads
        for i, head in enumerate(which):
            a, x, lengths = (each[i].numpy() for each in (weight, score, norm))
            heads[head] = Full(a, x, lengths, None if raw is None else raw[i])
        return replace(layer, heads=heads, **self.how[layer.site])

    def learn(self, site: str, terms: Terms, sparse: bool = False) -> None:
        # A sink's logit stands in its first column.
        bias = terms.bias
        self.how[site] = {
            "scale": terms.scale,
            "biased": bias is not None and bool(bias[..., terms.sinks :].any()),
            "capped": terms.softcap is not None,
            "sinks": terms.sinks > 0,
            "sparse": sparse,
        }


class StepRecorder(Recorder):
    probe: Steps

    def see(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Visible | Tensor | None, terms: Terms
    ) -> None:
        super().see(q, k, v, mask, terms)
        self.probe.learn(self.site, terms)
        if terms.score is None:
            queries, keys = q[:1].float(), k[:1, :, terms.sinks :].float()
            if (heads := self.probe.heads) is not None:
                share = q.shape[1] // k.shape[1]
                queries, keys = queries[:, heads], keys[:, [i // share for i in heads]]
            self.probe.raw[self.site] = scores(queries, keys, Terms(1.0))[0]

    def gathered(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, terms: Terms, where: Spread
    ) -> None:
        super().gathered(q, k, v, mask, terms, where)
        self.probe.learn(self.site, terms, sparse=True)
