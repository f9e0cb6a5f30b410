"""Recurrent language models and seq2seq, with or without attention over a memory of states.

First the parts: Elman, GRU and LSTM cells, Luong's and Bahdanau's attention, their decoders. The cells' equations are
the specification; torch's fused layers run the same weights and are tested equal to them. A state has a fixed size,
(h,) or (h, c), and padding never moves it. Then the two flows of data around them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.attention import Context, attend
from regard.attention.core import Terms
from regard.attention.protocol import Entries, Seen
from regard.attention.scores import READS, check_score, make_score
from regard.cache import Cache, CacheSpec
from regard.config import Choice, Count, Fraction, settings
from regard.errors import UsageError
from regard.layers import LM, make_head
from regard.mask import Causal, Full, Span, Visible
from regard.models.base import Lengths, Model, check_ids, cross_cache, new_source, positions

State = tuple[Tensor, ...]  # (h,) or (h, c): (b m) of one cell, (layers b m) of a stack
Gate = Callable[[Tensor], Tensor]


# x is W x + b of the token and h is U h + d of the state before it; `gate` is the sigmoid


def elman(x: Tensor, h: Tensor, state: State, gate: Gate = torch.sigmoid) -> State:
    """h' = tanh(W x + b + U h + d) (Elman 1990)."""
    return (torch.tanh(x + h),)


def gru(x: Tensor, h: Tensor, state: State, gate: Gate = torch.sigmoid) -> State:
    """r, z = sigmoid(W x + b + U h + d), n = tanh(W x + b + r (U h + d)), h' = (1 - z) n + z h (Cho et al. 2014)."""
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = h.chunk(3, -1)
    r, z = gate(x_r + h_r), gate(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return ((1 - z) * n + z * state[0],)


def lstm(x: Tensor, h: Tensor, state: State, gate: Gate = torch.sigmoid) -> State:
    """i, f, o = sigmoid(...), g = tanh(W x + b + U h + d),  c' = f c + i g,  h' = o tanh(c') (Gers et al. 2000)."""
    i, f, g, o = (x + h).chunk(4, -1)
    c = gate(f) * state[1] + gate(i) * torch.tanh(g)
    return gate(o) * torch.tanh(c), c


@dataclass(frozen=True)
class Cell:
    """A cell's equations, torch's layer with the same weights, and the names of what its state holds."""

    gates: Callable[..., State]
    fast: Callable[..., nn.RNNBase]
    state: tuple[str, ...]


CELLS: dict[str, Cell] = {
    "elman": Cell(elman, nn.RNN, ("h",)),
    "gru": Cell(gru, nn.GRU, ("h",)),
    "lstm": Cell(lstm, nn.LSTM, ("h", "c")),
}


class Recurrence(nn.Module):
    """Cells on top of each other: x (b t i) -> the top's h (b t m), and the state after each row's last real token."""

    def __init__(
        self, cell: str, inputs: int, dim: int, layers: int, dropout: float, both: bool = False
    ):
        super().__init__()
        self.cell, self.dim, self.layers = CELLS[cell], dim, layers
        options = {"dropout": dropout if layers > 1 else 0.0, "bidirectional": both}
        self.rnn = self.cell.fast(inputs, dim, layers, batch_first=True, **options)

    def start(self, x: Tensor) -> State:
        depth = self.layers * (2 if self.rnn.bidirectional else 1)
        return tuple(x.new_zeros(depth, len(x), self.dim) for _ in self.cell.state)

    def forward(self, x: Tensor, state: State, lengths: Any = None) -> tuple[Tensor, State]:
        """By torch's fused layer, in both directions if `both`; `plain` says what it computes."""
        given = state if len(state) > 1 else state[0]
        if lengths is None:
            y, new = self.rnn(x, given)
            return y, new if len(state) > 1 else (new,)
        n = lengths.clamp(min=1).cpu()  # torch packs no empty row; `hold` undoes its one step
        y, new = self.rnn(pack_padded_sequence(x, n, True, enforce_sorted=False), given)
        y, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        return y, hold(new if len(state) > 1 else (new,), state, lengths > 0)

    def plain(self, x: Tensor, state: State, lengths: Any = None) -> tuple[Tensor, State]:
        """The same written out: layer by layer, in each direction, token by token; padding never moves a state."""
        ends: list[State] = []
        for i in range(self.layers):
            outs = []
            for side in ("", "_reverse") if self.rnn.bidirectional else ("",):
                names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                w, u, b, d = (getattr(self.rnn, f"{name}_l{i}{side}") for name in names)
                now = tuple(s[len(ends)] for s in state)
                inputs, out = self.product(x, w, b).unbind(1), {}
                for t in reversed(range(len(inputs))) if side else range(len(inputs)):
                    new = self.cell.gates(inputs[t], self.product(now[0], u, d), now, self.sigmoid)
                    now = new if lengths is None else hold(new, now, lengths > t)
                    out[t] = now[0]
                outs.append(torch.stack([out[t] for t in range(len(inputs))], 1))
                ends.append(now)
            x = torch.cat(outs, -1)
        return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def cache_specs(self) -> list[CacheSpec]:
        return [CacheSpec(state={n: (self.dim,) for n in self.cell.state})] * self.layers

    def load(self, cache: Cache) -> State:
        return tuple(torch.stack([s[name] for s in cache.states]) for name in self.cell.state)

    def store(self, cache: Cache, state: State) -> None:
        for i, old in enumerate(cache.states):
            named = zip(self.cell.state, state, strict=True)
            cache.states[i] = {name: s[i].to(old[name]) for name, s in named}


def hold(new: State, old: State, real: Tensor) -> State:
    """The new state where the token was real (b), the old one where it was padding."""
    return tuple(torch.where(real[:, None], a, b) for a, b in zip(new, old, strict=True))


# --- attention over a memory --------------------------------------------------------------------------------------


class MemoryAttention(nn.Module):
    """c_t = sum_s a_ts m_s,  a_t = softmax_s score(q_t, m_s).   q (b t m), memory (b s e) -> (b t e).
    Or a_ts = 1 / n (average), 1 (sum), or 1 for the best state alone (hard, with no gradient to the choice).

    Cache per token: the state m_s; for the additive score W_k m_s too, so that it is computed once."""

    def __init__(self, score: str, dim: int, memory_dim: int):
        super().__init__()
        self.score = make_score(score, dim, memory_dim, hidden=dim)
        self.memory_dim, self.key_dim = memory_dim, memory_dim if self.score.fused else dim

    def tokens(self) -> dict[str, tuple[int, ...]]:
        keys = {} if self.score.fused else {"k": (self.key_dim,)}
        return {"h": (self.memory_dim,), **keys}

    def flops(self, context: int) -> int:
        return 2 * context * (self.key_dim + self.memory_dim)

    def recall(self, x: Tensor, ctx: Context) -> tuple[Entries, Visible]:
        """What can be attended to: the context's memory, what a frozen cache holds of it, or x and all before it."""
        entries = {}
        if ctx.memory_pos is None or ctx.memory is not None:
            memory = entries["h"] = x if ctx.memory is None else ctx.memory
            if not self.score.fused:
                entries["k"] = self.score.key(memory)
        kept, pos = ctx.update_cache(**entries)
        return kept, ctx.visible(pos)

    def forward(
        self, q: Tensor, kept: Entries, mask: Seen = None, probe: Any = None, backend: str = "sdpa"
    ) -> Tensor:
        s, fused = self.score, self.score.fused
        q, k = s.query(q), kept["h" if fused else "k"]
        mask, times = s.read(q[:, None], k[:, None], mask)
        how: Any = {"score": None if fused else s.join, "scale": s.scale, "times": times}
        q, k, v = (x[:, :, None] for x in (q, k, kept["h"]))
        return attend(q, k, v, mask, probe=probe, backend=backend, **how)[:, :, 0]  # b t e


class LuongAttention(nn.Module):
    """Attention after the cell (Luong et al. 2015, eq. 5): the CURRENT state asks, h~_t = tanh(W [c_t; h_t]);
    with combine="linear" W [c_t; h_t] + b.

    h (b t m) -> (b t m). Where the context carries no memory, the memory is the states so far, h_1 .. h_t."""

    def __init__(self, score: str, dim: int, memory_dim: int, combine: str = "tanh"):
        super().__init__()
        self.attention, self.linear = MemoryAttention(score, dim, memory_dim), combine == "linear"
        self.combine = nn.Linear(memory_dim + dim, dim, bias=self.linear)

    def forward(self, h: Tensor, ctx: Context) -> Tensor:
        kept, mask = self.attention.recall(h, ctx)
        c = self.attention(h, kept, mask, probe=ctx.watch(), backend=ctx.backend)  # b t e
        z = self.combine(torch.cat([c, h], -1))
        return z if self.linear else torch.tanh(z)


class BahdanauStep(nn.Module):
    """Attention before the cell (Bahdanau et al. 2015, A.2): the PREVIOUS state asks, and the previous word is fed.

    c_t = sum_s softmax_s(w_v^T tanh(W_q h_{t-1} + W_k m_s)) m_s,   h_t = cell([y_{t-1}; c_t], h_{t-1})."""

    def __init__(
        self, dim: int, memory_dim: int, cell: str = "gru", layers: int = 1, dropout: float = 0.0
    ):
        super().__init__()
        self.attention = MemoryAttention("additive", dim, memory_dim)
        self.rnn = Recurrence(cell, dim + memory_dim, dim, layers, dropout)

    def forward(
        self, y: Tensor, state: State, kept: Entries, mask: Any = None, backend: str = "sdpa"
    ) -> State:
        """Embedding y (b m) of the previous word, state before -> state after. `kept`: of `attention.recall`."""
        c = self.attention(state[0][-1][:, None], kept, mask, backend=backend)  # b 1 e
        return self.rnn(torch.cat([y[:, None], c], -1), state)[1]


# --- decoders: x (b t m), state -> h (b t m), state ---------------------------------------------------------------


class LuongDecoder(nn.Module):
    """The cells over the whole row at once, then attention, if there is any."""

    def __init__(self, c: RecurrentConfig | Seq2SeqConfig, memory_dim: int):
        super().__init__()
        self.rnn = Recurrence(c.cell, c.dim, c.dim, c.layers, c.dropout)
        rest = (c.dim, memory_dim, c.combine)
        self.luong = LuongAttention(c.attention, *rest) if c.attention else None

    @property
    def attention(self) -> MemoryAttention | None:
        return None if self.luong is None else self.luong.attention

    def forward(self, x: Tensor, state: State, lengths: Any, ctx: Context) -> tuple[Tensor, State]:
        h, state = self.rnn(x, state, lengths)
        return h if self.luong is None else self.luong(h, ctx), state


class BahdanauDecoder(nn.Module):
    """Bahdanau's step, word after word; the memory's keys are computed once."""

    def __init__(self, c: RecurrentConfig | Seq2SeqConfig, memory_dim: int):
        super().__init__()
        self.step = BahdanauStep(c.dim, memory_dim, c.cell, c.layers, c.dropout)

    @property
    def rnn(self) -> Recurrence:
        return self.step.rnn

    @property
    def attention(self) -> MemoryAttention:
        return self.step.attention

    def forward(self, x: Tensor, state: State, lengths: Any, ctx: Context) -> tuple[Tensor, State]:
        kept, visible = self.attention.recall(x, ctx)
        mask = None if visible.everything else visible.rows(slice(0, 1))  # b 1 1 s, for every word
        asked, out = [], []
        for i, y in enumerate(x.unbind(1)):
            asked.append(state[0][-1])
            new = self.step(y, state, kept, mask, ctx.backend)
            state = new if lengths is None else hold(new, state, lengths > i)
            out.append(state[0][-1])
        watch = ctx.watch()
        if watch is not None:  # all words at once, as every other layer shows them
            score = self.attention.score
            q, k, v = score.query(torch.stack(asked, 1)), kept["k"], kept["h"]
            terms = Terms(1.0, score=score.join)
            watch.see(q[:, None], k[:, None], v[:, None], visible, terms)
        return torch.stack(out, 1), state


Decoder = LuongDecoder | BahdanauDecoder
COMBINED = ("tanh", "linear")


@settings
class RecurrentConfig:
    """A language model of stacked cells. `attention` is the score (dot, scaled_dot, bilinear, additive) by which each
    state looks back at the states so far, itself among them, or their average, sum or hard choice; None: the state is
    all there is."""

    vocab: Count  # tokens
    dim: Count  # width of a state
    layers: Count = 1  # stacked cells
    cell: Annotated[str, Choice(CELLS)] = "gru"  # elman, gru or lstm
    # score of a look back; average, sum, hard; none: no look back
    attention: Annotated[str, Choice(READS)] | None = None
    tied: bool = True  # the embedding is the head's matrix
    dropout: Fraction = 0.0  # between layers, in training
    # context and state: tanh(W [c; h]); linear: W [c; h] + b
    combine: Annotated[str, Choice(COMBINED)] = "tanh"
    kind: str = "recurrent"

    def __post_init__(self) -> None:
        _check(self, self.dim)

    def make(self) -> Recurrent:
        return Recurrent(self)


class Recurrent(Model):
    """ids (b t) -> logits (b t V). Cache: the state of each layer; with attention, every state of the top one too."""

    writer, words = "decoder", "embedding"

    def __init__(self, config: RecurrentConfig):
        super().__init__(config)
        c = config
        self.embedding = _embedding(c.vocab, c.dim)
        self.decoder = LuongDecoder(c, c.dim)
        self.head = make_head(LM(tied=c.tied), c.dim, c.vocab)
        self.dropout = nn.Dropout(c.dropout)

    def hidden(
        self, ids: Tensor, lengths: Lengths = None, *, cache: Cache | None = None, probe: Any = None,
        backend: str = "sdpa"
    ) -> Tensor:  # fmt: skip
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
        return [*below, replace(top, token=_kept(self.decoder))]


@settings
class Seq2SeqConfig:
    """An encoder reads the source, its last state starts the decoder. `attention` None: that is all the decoder knows
    (Sutskever et al. 2014); additive: Bahdanau's decoder; dot, scaled_dot, bilinear: Luong's, and with no score its
    average, sum and hard."""

    vocab: Count  # tokens of the target
    source_vocab: Count  # tokens of the source
    dim: Count  # width of a state
    layers: Count = 1  # stacked cells
    cell: Annotated[str, Choice(CELLS)] = "gru"  # elman, gru or lstm
    # a score; average, sum, hard; none: the bottleneck
    attention: Annotated[str, Choice(READS)] | None = "additive"
    bidirectional: bool = False  # the encoder, each direction of width `dim`
    tied: bool = False  # the embedding is the head's matrix
    dropout: Fraction = 0.0  # between layers, in training
    # context and state, Luong's: tanh(W [c; h]); linear: W [c; h] + b
    combine: Annotated[str, Choice(COMBINED)] = "tanh"
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
    writer, words = "decoder", "target"

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config)
        c = config
        self.source = _embedding(c.source_vocab, c.dim)
        self.encoder = Recurrence(c.cell, c.dim, c.dim, c.layers, c.dropout, c.bidirectional)
        names = self.encoder.cell.state if c.bidirectional else ()
        self.bridge = nn.ModuleDict({name: nn.Linear(2 * c.dim, c.dim) for name in names})
        self.target = _embedding(c.vocab, c.dim)
        decoder = BahdanauDecoder if c.attention == "additive" else LuongDecoder
        self.decoder: Decoder = decoder(c, c.memory_dim)
        self.head = make_head(LM(tied=c.tied), c.dim, c.vocab)
        self.dropout = nn.Dropout(c.dropout)

    def encode(self, source: Tensor, lengths: Lengths = None) -> tuple[Tensor, Span, State]:
        """source (b s) -> memory (b s e), its positions (-1 for padding), and the state the decoder starts from:
        the encoder's last, or with both directions tanh(W [forward; backward]) (Bahdanau et al. 2015, A.2.2)."""
        check_ids(source, self.config.source_vocab, "source")
        pos = positions(source, lengths, None)
        x = self.dropout(self.source(source))
        memory, state = self.encoder(x, self.encoder.start(x), _tensor(lengths, source))
        if self.config.bidirectional:
            # layers b 2m
            ends = [s.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) for s in state]
            bridges = zip(self.bridge.values(), ends, strict=True)
            state = tuple(torch.tanh(w(end)) for w, end in bridges)
        return memory, pos, state

    def hidden(
        self, ids: Tensor, lengths: Lengths = None, *, source: Tensor | None = None, source_lengths: Lengths = None,
        cache: Cache | None = None, probe: Any = None, backend: str = "sdpa"
    ) -> Tensor:  # fmt: skip
        """What the head reads (b t m). With a cache the source is needed on the first call only: its memory is kept,
        frozen, in `cache.cross`."""
        c, rnn = self.config, self.decoder.rnn
        check_ids(ids, c.vocab)
        probe = self.probe_of(ids, probe)
        source, memory = new_source(ids, source, cache), None
        cross = None if cache is None else cache.cross
        if source is not None:
            memory, memory_pos, state = self.encode(source, source_lengths)
        elif cache is not None and cross is not None:
            memory_pos, state = cross.span, rnn.load(cache)
        pos = positions(ids, lengths, None, cache)
        if cache is not None and memory is not None:
            cross = cross_cache(cache, self.source_specs(), memory, memory_pos)
            memory_pos = cross.span
        store = None if cross is None else cross.layer(0)
        site = f"decoder.{0 if c.attention == 'additive' else c.layers - 1}.cross"
        how: Any = {"probe": probe, "backend": backend, "site": site}
        ctx = Context(pos, Full(), store, memory, memory_pos, **how)
        x = self.dropout(self.target(ids))
        h, state = self.decoder(x, state, _tensor(lengths, ids), ctx)
        if cache is not None and cross is not None:
            cross.freeze()
            rnn.store(cache, state)
        return self.dropout(h)

    def cache_specs(self) -> list[CacheSpec]:
        return self.decoder.rnn.cache_specs()

    def source_specs(self) -> list[CacheSpec]:
        return [CacheSpec(token=_kept(self.decoder))]


def _check(config: RecurrentConfig | Seq2SeqConfig, memory_dim: int) -> None:
    c = config
    if c.attention is not None:
        check_score(c.attention, c.dim, memory_dim, "attention")
    before = isinstance(c, Seq2SeqConfig) and c.attention == "additive"
    if c.combine == "linear" and (before or c.attention is None):
        asked = f"combine='linear' joins what attention={c.attention!r} finds after the cell"
        raise UsageError(f"{asked}, which is nothing; set attention to another, such as bilinear")


def _embedding(vocab: int, dim: int) -> nn.Embedding:
    table = nn.Embedding(vocab, dim)
    nn.init.uniform_(table.weight, -0.1, 0.1)
    return table


def _tensor(lengths: Lengths, ids: Tensor) -> Tensor | None:
    return None if lengths is None else torch.as_tensor(lengths, device=ids.device)


def _kept(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """What its attention keeps of each token."""
    return {} if decoder.attention is None else decoder.attention.tokens()
