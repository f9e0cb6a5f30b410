"""Exact attention on request, from any backend, mechanism and cache: pass a Probe to a call and
read it afterwards.

    probe = Probe(layers=[0, "decoder.3.cross"], heads=[2], rows=[-1], what=("weight", "score"))
    model(ids, cache=cache, probe=probe)           # any number of calls: a forward, steps, training
    probe.maps["0.self"][0]                        # weights of the first call, (b h' t' s)
    probe.of("score")["0.self"][0]                 # another kind, of the same shape
    generate(probe.on(model), prompts, beams=4)    # the model as it is, every call of it watched

    "weight"  softmax(score): rows sum to 1 less a sink's share, 0 if all is hidden; of sums 1 each
    "score"   scaled q.k or the layer's own score, capped, plus bias; -inf: hidden, or not chosen
    "norm"    weight times the length of the head's value vector: how much a key really gives
    "chosen"  bool (b 1 t' s), keys inside the softmax: by the mask, or by a sparse indexer
    "raw"     q.k alone, masked keys too; none where layers have their own score, or are sparse

The maps are computed beside the kernel that computes the output (native steps of prepared models
too), from the same q and k, in float32 at least: no logit and no gradient changes, nothing stays on
the model, and only chosen heads and rows are ever made. Dropout is left out. Compiled code is
refused: cut open by a probe, it would round otherwise. `reduce` is for maps too large to keep: it
is given each head's map alone, (b 1 t' s), as soon as that is there, and what it returns is kept
instead (heads joined along axis 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from regard.attention.core import Terms, finish, scores, softmax
from regard.attention.sparse import Spread
from regard.errors import UsageError, nearest
from regard.fast.specialise import share
from regard.mask import Visible
from regard.models import Model

# What a map has at keys that are not chosen.
KINDS = {"weight": 0.0, "score": -torch.inf, "norm": 0.0, "chosen": False, "raw": 0.0}
# Place -> call -> map; kind -> map.
Maps = dict[str, list[Tensor]]
Kinds = dict[str, Tensor]
# Rows or heads; None: all.
Index = list[int] | None
M = TypeVar("M", bound=Model)


class Probe:
    """What to look at: `what` kinds of map, of these layers, heads and rows; None means all.

    `layers`: numbers (in every tower), or places such as "decoder.3.cross". `heads`: numbers.
    `rows`: queries of a call, -1 being its last; rows that a call does not have are left out. Heads
    and rows come in ascending order. Keys are those the layer saw, in its cache's order. In a beam
    search a step's rows are the beams as they stood then; to see a finished text whole, feed it
    once more. More than `most` cells of one kind are refused before they are made."""

    def __init__(
        self,
        layers: Iterable[int | str] | str | None = None,
        heads: Iterable[int] | None = None,
        rows: Iterable[int] | None = None,
        *,
        what: str | Iterable[str] = "weight",
        reduce: Callable[[Tensor], Tensor] | None = None,
        most: float = math.inf,
    ):
        layers = [layers] if isinstance(layers, str) else layers
        self.layers = None if layers is None else set(layers)
        self.heads = None if heads is None else sorted(set(heads))
        self.rows = None if rows is None else list(rows)
        self.what = (what,) if isinstance(what, str) else tuple(what)
        self.reduce = reduce
        self.most = most
        for kind in self.what:
            if kind not in KINDS:
                raise UsageError(f"probe: there is no map {kind!r}; {nearest(kind, KINDS)}")
        # Every place that asked, in order; how large the maps of those that were seen are (heads,
        # queries, keys), and how their scores are made.
        self.sites: dict[str, None] = {}
        self.sizes: dict[str, tuple[int, int, int]] = {}
        self.how: dict[str, dict[str, Any]] = {}
        self._maps: dict[str, Maps] = {kind: {} for kind in self.what}
        # Runs of queries of a sparse call.
        self._waiting: dict[str, list[tuple[Kinds, Tensor]]] = {}

    def __repr__(self) -> str:
        asked = {"layers": self.layers, "heads": self.heads, "rows": self.rows}
        said = [f"{n}={sorted(x, key=str)}" for n, x in asked.items() if x is not None]
        said.append(f"what={', '.join(self.what)}")
        many = ", ".join(self.sizes) or "nothing"
        return f"Probe({', '.join(said)}): saw {many}"

    def at(self, site: str, batch: int | None = None) -> Recorder | None:
        """The recorder for a place, or None if it is not wanted. `batch`: rows of the call."""
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            raise UsageError(
                "a probe would change the bits of compiled code; leave compile out to look inside"
            )
        self.sites[site] = None
        wanted = self.layers is None or not self.layers.isdisjoint((site, number_of(site)))
        # A checkpointed block is computed once more in the backward pass.
        again = torch._C._current_graph_task_id() != -1
        return Recorder(self, site, batch) if wanted and not again else None

    def on(self, model: M) -> M:
        """A twin of the model, of the same weights, that shows every call to this probe: for
        `generate` and others that make the calls themselves."""
        twin = share(type(model), model)
        twin.watch = lambda ids: _Call(self, len(ids))
        return twin

    def _note(
        self, site: str, size: tuple[int, int, int], terms: Terms, sparse: bool = False
    ) -> None:
        """What is known of a place before its maps are made."""
        # A sink's logit stands in its first column.
        biased = terms.bias is not None and bool(terms.bias[..., terms.sinks :].any())
        self.sizes[site] = size
        cells = 0
        for h, t, s in self.sizes.values():
            heads = self.heads or range(h)
            rows = range(t) if self.rows is None else self.rows
            cells += len(heads) * len(rows) * s
        if cells > self.most:
            raise UsageError(
                f"these maps have more than {self.most:,} weights; ask for fewer layers, heads "
                "or rows at once"
            )
        self.how[site] = {
            "scale": terms.scale,
            "biased": biased,
            "capped": terms.softcap is not None,
            "sinks": terms.sinks > 0,
            "summed": terms.times is not None,
            "sparse": sparse,
        }

    @property
    def maps(self) -> Maps:
        """Weights (b h' t' s) by place, one tensor for each call."""
        return self.of("weight")

    def of(self, kind: str) -> Maps:
        """Maps of this kind by place, one tensor for each call."""
        if kind not in self._maps:
            raise UsageError(
                f"probe: {kind!r} was not asked for; make it Probe(what={(*self.what, kind)!r})"
            )
        known = {*self.sites, *map(number_of, self.sites)}
        lost = [] if self.layers is None or not known else sorted(self.layers - known, key=str)
        if lost:
            raise UsageError(
                f"probe: there is no layer {lost[0]!r}; this model has {', '.join(self.sites)}"
            )
        return self._maps[kind]


@dataclass
class _Call:
    """A probe of one call on `batch` rows."""

    probe: Probe
    batch: int

    def at(self, site: str) -> Recorder | None:
        return self.probe.at(site, self.batch)


@dataclass
class Recorder:
    """What the probe wants from one place. `batch`: rows of the call, where they are known; beams
    that share a source stand side by side as its queries."""

    probe: Probe
    site: str
    batch: int | None = None

    @torch.no_grad()
    def see(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Visible | Tensor | None, terms: Terms
    ) -> None:
        """q (b h t d), k (b g s d): a whole dense attention; only chosen heads and rows are
        computed."""
        b, h, t = q.shape[:3]
        self.probe._note(self.site, (h, t, k.shape[2] - terms.sinks), terms)
        # Beams side by side as one source's queries.
        share = max(1, (self.batch or b) // b)
        rows = _repeat(self._rows(0, t // share, t // share), share, t // share)
        mask = _seen(mask, rows) if isinstance(mask, Visible) else _part(mask, 2, rows)
        q = _pick(q, 2, rows)
        terms = _cut(terms, 2, rows)

        def compute(heads: Index) -> Kinds:
            """(b h (share t) s) -> ((b share) h t s)"""
            maps = self._maps(heads, q, k, v, mask, terms)
            apart = (share, q.shape[2] // share)
            if "raw" in self.probe.what and terms.score is None:
                maps["raw"] = _scores(q, k[:, :, terms.sinks :], heads, Terms(1.0))
            return {
                kind: a if share == 1 else a.unflatten(2, apart).transpose(1, 2).flatten(0, 1)
                for kind, a in maps.items()
            }

        self._file(self._heads(h), h, compute)

    @torch.no_grad()
    def gathered(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, terms: Terms, where: Spread
    ) -> None:
        """A run of queries, each with the keys chosen for it. The maps stay k wide until the call
        is through."""
        b, n, _ = where.chosen.shape
        t, s = where.size
        self.probe._note(self.site, (q.shape[1], t, s), terms, sparse=True)
        rows = self._rows(where.rows.start, where.rows.stop, t)
        flat = _repeat(rows, b, n)
        q, k, v, mask = (_pick(x, 0, flat) for x in (q, k, v, mask))
        terms = _cut(terms, 0, flat)
        heads = self._heads(q.shape[1])
        maps = self._maps(heads, q, k, v, mask, terms)
        # ((b n) h 1 k) -> (b h n k).
        apart = (b, len(q) // b)
        maps = {i: a.squeeze(2).unflatten(0, apart).transpose(1, 2) for i, a in maps.items()}
        if where.rows.start == 0:
            self.probe._waiting[self.site] = []
        self.probe._waiting[self.site].append((maps, _pick(where.chosen, 1, rows)))
        if where.rows.stop < t:
            return
        runs = self.probe._waiting.pop(self.site)
        # b 1 t' k.
        chosen = torch.cat([chosen for _, chosen in runs], 1)[:, None]
        maps = {kind: torch.cat([run[kind] for run, _ in runs], 2) for kind in maps}

        def place(one: Index) -> Kinds:
            """At the slots `chosen`: (b h n k) -> (b h n s)."""
            whole = {}
            for kind, a in maps.items():
                a = _pick(a, 1, one if a.shape[1] > 1 else None)
                empty = a.new_full((*a.shape[:3], s), KINDS[kind])
                whole[kind] = empty.scatter(-1, chosen.expand(-1, a.shape[1], -1, -1), a)
            return whole

        self._file(None, q.shape[1] if heads is None else len(heads), place)

    def _file(self, heads: Index, count: int, compute: Callable[[Index], Kinds]) -> None:
        """The maps of these heads (None: all of `count`), or head by head what `reduce` makes of
        them."""
        reduce = self.probe.reduce
        if reduce is None:
            maps = compute(heads)
        else:
            every = range(count) if heads is None else heads
            parts = [{kind: reduce(_wide(a)) for kind, a in compute([i]).items()} for i in every]
            maps = {kind: torch.cat([part[kind] for part in parts], 1) for kind in parts[0]}
        for kind, a in maps.items():
            self.probe._maps[kind].setdefault(self.site, []).append(a)

    def _maps(
        self,
        heads: Index,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        terms: Terms,
    ) -> Kinds:
        """The maps of these heads for queries q (b h t d) over keys k (b g s d)."""
        what = self.probe.what
        skip = terms.sinks
        b, h, t = q.shape[:3]
        # b h' t s.
        x = _scores(q, k, heads, terms)
        with _no_autocast(q):
            mask = _part(mask, 1, heads)
            a = softmax(x, mask)[..., skip:] if {"weight", "norm"} & {*what} else x
            times = _part(terms.times, 1, heads)
            a = a if times is None else a * times
            x = x[..., skip:]
            mask = None if mask is None else mask[..., skip:]
            maps = {"weight": a}
            if "score" in what:
                maps["score"] = x if mask is None else x.masked_fill(~mask, -torch.inf)
            if "norm" in what:
                maps["norm"] = a * _lengths(v[:, :, skip:], heads, h, terms.up)
            if "chosen" in what:
                seen = mask if mask is not None else x.new_ones(1, 1, 1, 1, dtype=torch.bool)
                maps["chosen"] = seen.expand(b, -1, t, x.shape[-1])
        return {kind: a for kind, a in maps.items() if kind in what}

    def _heads(self, count: int) -> Index:
        heads = self.probe.heads
        wrong = [i for i in heads or () if not 0 <= i < count]
        if wrong:
            raise UsageError(
                f"probe: there is no head {wrong[0]} at {self.site}; its heads are 0 to {count - 1}"
            )
        return heads

    def _rows(self, start: int, stop: int, size: int) -> Index:
        """The chosen rows within start..stop, counted from start."""
        if self.probe.rows is None:
            return None
        rows = {i + size if i < 0 else i for i in self.probe.rows}
        return sorted(i - start for i in rows if start <= i < stop)


def thumbnail(size: int = 64) -> Callable[[Tensor], Tensor]:
    """A small picture of a map, for Probe(reduce=thumbnail()): the largest weight of each of at
    most size x size fields. The mean would wash out a line one token wide."""
    return lambda a: F.adaptive_max_pool2d(a, [min(size, n) for n in a.shape[-2:]])


# --- the arithmetic -----------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, heads: Index, terms: Terms) -> Tensor:
    """Scores (b h' t s) of these heads before the mask; heads that share keys read them as they
    lie."""
    h, t = q.shape[1:3]
    g = k.shape[1]
    if terms.score is not None:
        # As the layer computes it, row by row: it may be wide inside.
        bare = Terms(terms.scale, score=terms.score)
        x = _wide(_pick(torch.cat([scores(row, k, bare) for row in q.split(1, 2)], 2), 1, heads))
        return finish(x, _cut(terms, 1, heads))
    with _no_autocast(q):
        if heads is None:
            x = _wide(q).unflatten(1, (g, h // g)).flatten(2, 3) @ _wide(k).mT
            x = x.unflatten(2, (h // g, t)).flatten(1, 2)
        else:
            each = ((q.narrow(1, i, 1), k.narrow(1, i * g // h, 1)) for i in heads)
            parts = [_wide(queries) @ _wide(keys).mT for queries, keys in each]
            x = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return finish(x * terms.scale, _cut(terms, 1, heads))


def _lengths(v: Tensor, heads: Index, count: int, up: Tensor | None) -> Tensor:
    """Euclidean lengths (b h' 1 s) of the values v (b g s e); of `up` v where v is what all heads
    share."""
    if up is not None:
        each = (_wide(v[:, 0]) @ _wide(w).T for w in _pick(up, 0, heads))  # b s e
        return torch.stack([torch.linalg.vector_norm(x, dim=-1) for x in each], 1)[:, :, None]
    wide = torch.promote_types(v.dtype, torch.float32)
    lengths = torch.linalg.vector_norm(v, dim=-1, dtype=wide)  # b g s
    return _pick(lengths.repeat_interleave(count // v.shape[1], 1), 1, heads)[:, :, None]


def _no_autocast(x: Tensor) -> AbstractContextManager[object]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _seen(mask: Visible, rows: Index) -> Tensor | None:
    """What these rows see: (b 1 t' s), or None for everything."""
    if rows is not None and len(rows) == 1:
        mask = mask.part(slice(rows[0], rows[0] + 1))
        rows = None
    if mask.everything:
        return None
    return mask.tensor() if rows is None else mask.rows(torch.tensor(rows, dtype=torch.long))


def _pick(x: Tensor, axis: int, index: Index) -> Tensor:
    if index is None:
        return x
    if len(index) == 1:
        return x.narrow(axis, index[0], 1)
    return x.index_select(axis, torch.tensor(index, dtype=torch.long, device=x.device))


def _repeat(rows: Index, count: int, size: int) -> Index:
    """`rows` of each of `count` runs of `size`."""
    return None if rows is None else [run * size + i for run in range(count) for i in rows]


def _cut(terms: Terms, axis: int, index: Index) -> Terms:
    bias, times = (_part(x, axis, index) for x in (terms.bias, terms.times))
    return replace(terms, bias=bias, times=times)


def _part(x: Tensor | None, axis: int, index: Index) -> Tensor | None:
    """The same where an axis of size 1 stands for all."""
    return x if x is None or x.shape[axis] == 1 else _pick(x, axis, index)


def number_of(site: str) -> int | None:
    """The layer of a place: 3 of "decoder.3.cross"."""
    return next((int(part) for part in site.split(".") if part.isdigit()), None)
