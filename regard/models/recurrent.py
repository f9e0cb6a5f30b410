"""Recurrent language models and seq2seq, with or without attention over a memory of states.

Their parts (cells, Luong's and Bahdanau's attention) are in cells.py; here are the two flows of data around them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Context
from regard.attention.scores import check_score
from regard.cache import Cache, CacheSpec, Contiguous
from regard.config import Count, Fraction, ranged
from regard.errors import UsageError
from regard.layers import LM, make_head
from regard.mask import Causal, Full, Span
from regard.models.base import Model, check_ids, check_source, positions
from regard.models.cells import CELLS, BahdanauDecoder, LuongDecoder, Recurrence, State

# --- the language model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
@ranged
class RecurrentConfig:
    """A language model of stacked cells. `attention` is the score (dot, scaled_dot, bilinear, additive) by which each
    state looks back at the states so far, itself among them; None: the state is all there is."""

    vocab: Count
    dim: Count
    layers: Count = 1
    cell: str = "gru"
    attention: str | None = None
    tied: bool = True
    dropout: Fraction = 0.0
    kind: str = "recurrent"

    def __post_init__(self) -> None:
        _check(self, self.dim)

    def make(self) -> Recurrent:
        return Recurrent(self)


class Recurrent(Model):
    """ids (b t) -> logits (b t V). Cache: the state of each layer; with attention, every state of the top one too."""

    def __init__(self, config: RecurrentConfig):
        super().__init__(config)
        c = config
        self.embedding = _embedding(c.vocab, c.dim)
        self.decoder = LuongDecoder(c.dim, c.dim, c.attention, c.cell, c.layers, c.dropout)
        self.head = make_head(LM(tied=c.tied), c.dim, c.vocab)
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | list[int] | None = None,
        *,
        cache: Cache | None = None,
        probe: Any = None,
        backend: str = "sdpa",
    ) -> Tensor:
        h = self.hidden(ids, lengths, cache=cache, probe=probe, backend=backend)
        return self.logits(h)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.embedding.weight)

    def hidden(
        self,
        ids: Tensor,
        lengths: Tensor | list[int] | None = None,
        *,
        cache: Cache | None = None,
        probe: Any = None,
        backend: str = "sdpa",
    ) -> Tensor:
        """What the head reads (b t m)."""
        check_ids(ids, self.config.vocab)
        probe = self.probe_of(ids, probe)
        pos = positions(ids, lengths, None, cache)
        x, rnn, top = self.dropout(self.embedding(ids)), self.decoder.rnn, self.config.layers - 1
        state = rnn.start(x) if cache is None else rnn.load(cache)
        store = None if cache is None else cache.layer(top)
        ctx = Context(pos, Causal(), store, probe=probe, backend=backend, site=f"{top}.self")
        h, state = self.decoder(x, state, _tensor(lengths, ids), ctx)
        if cache is not None:
            rnn.store(cache, state)
        return self.dropout(h)

    def cache_specs(self) -> list[CacheSpec]:
        *below, top = self.decoder.rnn.cache_specs()
        look = self.decoder.attention
        return [*below, replace(top, token={} if look is None else look.tokens())]

    def flops_per_token(self, context: int) -> int:
        return _flops(self.decoder, self.config, context)


# --- from sequence to sequence ------------------------------------------------------------------------------------


@dataclass(frozen=True)
@ranged
class Seq2SeqConfig:
    """An encoder reads the source, its last state starts the decoder. `attention` None: that is all the decoder knows
    (Sutskever et al. 2014); additive: Bahdanau's decoder; dot, scaled_dot, bilinear: Luong's."""

    vocab: Count
    source_vocab: Count
    dim: Count
    layers: Count = 1
    cell: str = "gru"
    attention: str | None = "additive"
    bidirectional: bool = False  # the encoder, each direction of width `dim`
    tied: bool = False
    dropout: Fraction = 0.0
    kind: str = "recurrent_seq2seq"

    def __post_init__(self) -> None:
        _check(self, self.memory_dim)

    @property
    def memory_dim(self) -> int:
        return 2 * self.dim if self.bidirectional else self.dim

    def make(self) -> Seq2Seq:
        return Seq2Seq(self)


class Seq2Seq(Model):
    """Target ids (b t) and source ids (b s) -> logits (b t V)."""

    reads_source = True

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        c = config
        self.source = _embedding(c.source_vocab, c.dim)
        self.encoder = Recurrence(c.cell, c.dim, c.dim, c.layers, c.dropout, c.bidirectional)
        names = self.encoder.cell.state if c.bidirectional else ()
        self.bridge = nn.ModuleDict({name: nn.Linear(2 * c.dim, c.dim) for name in names})
        self.target = _embedding(c.vocab, c.dim)
        self.decoder: BahdanauDecoder | LuongDecoder
        if c.attention == "additive":
            self.decoder = BahdanauDecoder(c.dim, c.memory_dim, c.cell, c.layers, c.dropout)
        else:
            self.decoder = LuongDecoder(
                c.dim, c.memory_dim, c.attention, c.cell, c.layers, c.dropout
            )
        self.head = make_head(LM(tied=c.tied), c.dim, c.vocab)
        self.dropout = nn.Dropout(c.dropout)

    def encode(
        self, source: Tensor, lengths: Tensor | list[int] | None = None
    ) -> tuple[Tensor, Span, State]:
        """source (b s) -> memory (b s e), its positions (-1 for padding), and the state the decoder starts from:
        the encoder's last, or with both directions tanh(W [forward; backward]) (Bahdanau et al. 2015, A.2.2)."""
        check_ids(source, self.config.source_vocab, "source")
        pos = positions(source, lengths, None)
        x = self.dropout(self.source(source))
        memory, state = self.encoder(x, self.encoder.start(x), _tensor(lengths, source))
        if self.config.bidirectional:
            ends = [
                s.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) for s in state
            ]  # layers b 2m
            state = tuple(
                torch.tanh(w(end)) for w, end in zip(self.bridge.values(), ends, strict=True)
            )
        return memory, pos, state

    def forward(
        self,
        ids: Tensor,
        lengths: Tensor | list[int] | None = None,
        *,
        source: Tensor | None = None,
        source_lengths: Tensor | list[int] | None = None,
        cache: Cache | None = None,
        probe: Any = None,
        backend: str = "sdpa",
    ) -> Tensor:
        """With a cache the source is needed on the first call only: its memory is kept, frozen, in `cache.cross`."""
        h = self.hidden(
            ids,
            lengths,
            source=source,
            source_lengths=source_lengths,
            cache=cache,
            probe=probe,
            backend=backend,
        )
        return self.logits(h)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden, self.target.weight)

    def hidden(
        self,
        ids: Tensor,
        lengths: Tensor | list[int] | None = None,
        *,
        source: Tensor | None = None,
        source_lengths: Tensor | list[int] | None = None,
        cache: Cache | None = None,
        probe: Any = None,
        backend: str = "sdpa",
    ) -> Tensor:
        """What the head reads (b t m)."""
        c = self.config
        check_ids(ids, c.vocab)
        probe = self.probe_of(ids, probe)
        memory, memory_pos, state = self._begin(ids, source, source_lengths, cache)
        pos = positions(ids, lengths, None, cache)
        cross = self._cross(memory, memory_pos, cache)
        there = Context(
            pos,
            Full(),
            None if cross is None else cross.layer(0),
            memory,
            memory_pos if cross is None else cross.span,
            probe=probe,
            backend=backend,
            site=f"decoder.{0 if c.attention == 'additive' else c.layers - 1}.cross",
        )
        x = self.dropout(self.target(ids))
        h, state = self.decoder(x, state, _tensor(lengths, ids), there)
        if cache is not None and cross is not None:
            cross.freeze()
            self.decoder.rnn.store(cache, state)
        return self.dropout(h)

    def _begin(
        self,
        ids: Tensor,
        source: Tensor | None,
        lengths: Tensor | list[int] | None,
        cache: Cache | None,
    ) -> tuple[Tensor | None, Span, State]:
        """The source's memory and the decoder's first state, or where the cache left off."""
        if check_source(ids, source, cache):
            assert source is not None
            return self.encode(source, lengths)
        assert cache is not None and cache.cross is not None
        return None, cache.cross.span, self.decoder.rnn.load(cache)

    def _cross(self, memory: Tensor | None, pos: Span, cache: Cache | None) -> Cache | None:
        if cache is None or memory is None:
            return cache and cache.cross
        look = self.decoder.attention
        spec = CacheSpec(token={} if look is None else look.tokens())
        b, s = memory.shape[:2]
        cross = Contiguous([spec], b, capacity=s, device=cache.device, dtype=cache.dtype)
        cross.begin(s, None if pos.start == 0 else (pos.index >= 0).sum(-1))
        cache.cross = cross
        return cross

    def cache_specs(self) -> list[CacheSpec]:
        return self.decoder.rnn.cache_specs()

    def flops_per_token(self, context: int) -> int:
        """Of a target token; encoding is paid once for each source token."""
        return _flops(self.decoder, self.config, context)


# --- small helpers ------------------------------------------------------------------------------------------------


def _check(config: RecurrentConfig | Seq2SeqConfig, memory_dim: int) -> None:
    c = config
    if c.cell not in CELLS:
        raise UsageError(f"cell={c.cell!r} is unknown; choose one of {', '.join(CELLS)}")
    if c.attention is not None:
        check_score(c.attention, c.dim, memory_dim, "attention")


def _embedding(vocab: int, dim: int) -> nn.Embedding:
    table = nn.Embedding(vocab, dim)
    nn.init.uniform_(table.weight, -0.1, 0.1)
    return table


def _tensor(lengths: Tensor | list[int] | None, ids: Tensor) -> Tensor | None:
    return None if lengths is None else torch.as_tensor(lengths, device=ids.device)


def _flops(decoder: LuongDecoder | BahdanauDecoder, config: Any, context: int) -> int:
    weights = sum(p.numel() for p in decoder.parameters() if p.dim() > 1)
    look = decoder.attention
    pairs = 0 if look is None else context * (look.key_dim + look.memory_dim)
    return 2 * (weights + config.vocab * config.dim + pairs)
