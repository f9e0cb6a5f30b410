"""What encoders made of sources, for the rows of a graph: encoded once, in pages that a table of their own names."""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.attention.protocol import Context
from regard.cache import Pool
from regard.decode.sequence import Memory
from regard.decode.sources import source_length
from regard.fast.cuda import Pages
from regard.fast.cuda.prompts import RECORDED, next_power_of_two, round_up
from regard.fast.cuda.record import Recorder, send
from regard.mask import Span
from regard.models.base import Model


class Sources:
    """The sources of `rows` rows, in pages of a pool."""

    def __init__(self, model: Model, fast: Any, pool: Pool, rows: int, device: torch.device):
        self.fast, self.pool, self.device = fast, pool, device
        most = source_length(model) or len(pool.users) * pool.page
        size = (rows, -(-most // pool.page))
        table = torch.full(size, pool.blank, dtype=torch.int32, device=self.device)
        # `pos` is the last token of each row's source.
        pos = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.pages = Pages(pool.stores, table, most, pos)

    def of(self, rows: slice | Tensor, far: int) -> Pages:
        """What some rows see, none of them more than `far` tokens."""
        p = self.pages
        assert p.pos is not None
        return replace(p, table=p.table[rows], pos=p.pos[rows], bound=min(far, p.length))

    def remember(self, memories: abc.Sequence[Memory], recorder: Recorder) -> None:
        """Encode sources, and put what the decoder's layers keep of them into their pages."""
        page, device = self.pool.page, self.device
        each = [m.request.source for m in memories if m.request.source is not None]
        inside = torch.arange(page)
        places = [
            (torch.tensor(m.pages)[:, None] * page + inside).flatten()[: m.size] for m in memories
        ]
        if each[0].dim() > 1:
            found, _ = self.fast.encode(send(torch.stack(each), device))
            self.keep_sources(found, send(torch.cat(places), device))
        else:
            # Padding goes to a place that nobody reads.
            b, s = next_power_of_two(len(each)), round_up(max(map(len, each)), 16)
            ids, lengths = torch.zeros(b, s, dtype=torch.long), torch.ones(b, dtype=torch.long)
            to = torch.full_like(ids, self.pool.scratch * page)
            for i, (source, place) in enumerate(zip(each, places, strict=True)):
                ids[i, : len(source)], to[i, : len(source)], lengths[i] = source, place, len(source)
            numbers = send(torch.cat([ids.flatten(), to.flatten(), lengths]), device)
            small = b * s <= RECORDED and recordable(self.fast.config.encoder)
            recorder.again(("source", b, s), numbers, lambda x: self.read_sources(x, b, s), small)
        edits = [
            (row, i, number, m.size - 1)
            for m in memories
            for row in m.slot_ids
            for i, number in enumerate(m.pages)
        ]
        assert self.pages.pos is not None
        row, i, number, last = send(edits, device).T
        self.pages.table[row, i], self.pages.pos[row] = number.int(), last

    def read_sources(self, numbers: Tensor, b: int, s: int) -> None:
        """Source ids (b s), the places of their tokens (b s), and their lengths (b)."""
        ids, to, lengths = numbers.split([b * s, b * s, b])
        pos, fast = Span.ragged(lengths, s), self.fast
        ctx = Context(pos, fast.config.encoder.mask, site="encoder.")
        self.keep_sources(fast.encoder(fast.source(ids.view(b, s), pos), ctx), to)

    def keep_sources(self, memory: Tensor, to: Tensor) -> None:
        """What an encoder gave (b s m), at its places (b s)."""
        pages = Pages(by_token(self.pool), to[:, None], 1, torch.zeros_like(to))
        for i, block in enumerate(self.fast.decoder.blocks):
            block.cross.remember(memory.flatten(0, 1), pages.layer(i))


def recordable(encoder: Any) -> bool:
    """Whether a pass of the plain tower waits for nothing on the host: no experts, no choice of keys, no slopes."""
    plain = all(a.kind == "gqa" for a in encoder.each("attention"))
    experts = any(f.kind != "mlp" for f in encoder.each("ffn"))
    return plain and not experts and getattr(encoder.relative, "kind", "") != "alibi"


def by_token(pool: Pool) -> list[dict[str, Tensor]]:
    """What the layers keep, as pages of one token."""
    return [{n: x.flatten(0, 1)[:, None] for n, x in store.items()} for store in pool.stores]
