"""Exact attention weights on request, from any backend: pass a Probe to a call and read its maps afterwards.

The probe computes the weights of the heads and rows it was asked for, beside the fused kernel that computes the output;
it changes no logit and leaves nothing on the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from regard.attention import Terms, weights
from regard.config import UsageError
from regard.mask import Visible


class Probe:
    """Which weights to look at. `model(ids, probe=probe)`, then `probe.maps["0.self"][0]`: (b h' t' s).

    `layers`: numbers (in every tower), or places such as "decoder.3.cross". `heads`: numbers. `rows`: queries of a
    call, -1 being its last; rows that a call does not have are left out. None means all. Heads and rows come in
    ascending order. Keys are those the layer saw, in its cache's order; a sink is no key: its weight is what
    a row lacks to 1.
    """

    def __init__(
        self,
        layers: Iterable[int | str] | None = None,
        heads: Iterable[int] | None = None,
        rows: Iterable[int] | None = None,
    ):
        self.layers = None if layers is None else set(layers)
        self.heads = None if heads is None else sorted(set(heads))
        self.rows = None if rows is None else list(rows)
        self._sites: dict[str, None] = {}  # every place that asked, in order
        self._parts: dict[str, list[list[Tensor]]] = {}  # place -> call -> chunks of queries

    def at(self, site: str) -> Recorder | None:
        """The recorder for a place, or None if its layer is not wanted."""
        self._sites[site] = None
        wanted = self.layers is None or not self.layers.isdisjoint((site, _number(site)))
        return Recorder(self, site) if wanted else None

    @property
    def maps(self) -> dict[str, list[Tensor]]:
        """Weights (b h' t' s) by place, one tensor for each call."""
        known = {*self._sites, *map(_number, self._sites)}
        lost = [] if self.layers is None or not known else sorted(self.layers - known, key=str)
        if lost:
            raise UsageError(
                f"probe: there is no layer {lost[0]!r}; this model has {', '.join(self._sites)}"
            )
        for calls in self._parts.values():
            calls[:] = [[torch.cat(chunks, 2)] if len(chunks) > 1 else chunks for chunks in calls]
        return {site: [chunks[0] for chunks in calls] for site, calls in self._parts.items()}


class Recorder:
    """What the probe wants from one place."""

    def __init__(self, probe: Probe, site: str):
        self.probe, self.site = probe, site

    @torch.no_grad()
    def see(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Visible | Tensor | None, terms: Terms
    ) -> None:
        """q (b h t d), k (b g s d): the whole of a dense attention; only chosen heads and rows are computed."""
        (h, t), g = q.shape[1:3], k.shape[1]
        heads, rows = self._heads(h, q.device), self._rows(0, t, t, q.device)
        if isinstance(mask, Visible):
            mask = None if mask.everything else mask.tensor() if rows is None else mask.rows(rows)
        else:
            mask = _part(mask, 2, rows)
        q, bias = _pick(q, 2, rows), _part(terms.bias, 2, rows)
        late = None
        if terms.score is not None:
            heads, late = None, heads  # a score may hold parameters of every head
        elif heads is not None:
            q, k = q[:, heads], k[:, heads // (h // g)]
            mask, bias = _part(mask, 1, heads), _part(bias, 1, heads)
        a = weights(q, k, mask, replace(terms, bias=bias))[..., terms.sinks :]  # b h' t' s
        self._keep(_pick(a, 1, late), new=True)

    @torch.no_grad()
    def put(self, weights: Tensor, rows: slice, size: int) -> None:
        """Weights (b h n s) of the queries `rows` out of `size`: sparse attention brings them chunk by chunk."""
        heads = self._heads(weights.shape[1], weights.device)
        wanted = self._rows(rows.start, rows.stop, size, weights.device)
        self._keep(_pick(_pick(weights, 1, heads), 2, wanted), new=rows.start == 0)

    def _keep(self, a: Tensor, new: bool) -> None:
        calls = self.probe._parts.setdefault(self.site, [])
        if new:
            calls.append([])
        calls[-1].append(a)

    def _heads(self, count: int, device: torch.device) -> Tensor | None:
        heads = self.probe.heads
        wrong = [i for i in heads or () if not 0 <= i < count]
        if wrong:
            raise UsageError(
                f"probe: there is no head {wrong[0]} at {self.site}; its heads are 0 to {count - 1}"
            )
        return None if heads is None else torch.tensor(heads, dtype=torch.long, device=device)

    def _rows(self, start: int, stop: int, size: int, device: torch.device) -> Tensor | None:
        """The chosen rows within start..stop, counted from start."""
        if self.probe.rows is None:
            return None
        rows = {i + size if i < 0 else i for i in self.probe.rows}
        inside = sorted(i - start for i in rows if start <= i < stop)
        return torch.tensor(inside, dtype=torch.long, device=device)


def _pick(x: Tensor, axis: int, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(axis, index)


def _part(x: Tensor | None, axis: int, index: Tensor | None) -> Tensor | None:
    """The same where an axis of size 1 stands for all."""
    return x if x is None or x.shape[axis] == 1 else _pick(x, axis, index)


def _number(site: str) -> int | None:
    """The layer of a place: 3 of "decoder.3.cross"."""
    return next((int(part) for part in site.split(".") if part.isdigit()), None)
