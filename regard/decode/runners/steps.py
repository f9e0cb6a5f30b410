"""The runner `graph`: a model's fast parts, the memory of its slots over pages, and the steps recorded as CUDA graphs.

The choice stays on the device. A step is recorded when it is first met; but where somebody would wait for that, as in
a server, it is put off: until `warm` has recorded it, a graph of more rows does its work, or the step runs as it is.
Off a GPU the same steps run as they are.
"""

from __future__ import annotations

import copy
import weakref
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.cache import Pool
from regard.decode.beam import Shape
from regard.decode.check import context_of
from regard.decode.runners.memory import Sources
from regard.decode.sampling import (
    MASK,
    TOPS,
    SamplingTensors,
    best_n,
    choose,
    scored,
    used_by,
)
from regard.decode.sequence import SLICE, Memory, Sequence
from regard.decode.settings import MOST_TOPS, Request, Settings
from regard.fast.cpu import Prepared
from regard.fast.cuda import GraphContext, Normed, Pages, ResidualStream, decoder, inner, why_not
from regard.fast.cuda.prompts import (
    RECORDED,
    Pack,
    Part,
    flat,
    next_power_of_two,
    sizes_of,
)
from regard.fast.cuda.record import Recorder, arrival, send, to_host
from regard.kernels.triton import ahead
from regard.kernels.triton.sample import State as DeviceState
from regard.kernels.triton.sample import advance, best, greedy_advance
from regard.mask import Causal, Full, Span
from regard.models.base import Model, border

# What is on its way to the host, and what tells that it has arrived.
Copies = tuple[list[Tensor], torch.cuda.Event | None]
SLOTS = 64  # at least, on a GPU: rows that are not used cost nothing
SHORTEST = 256  # the smallest bucket of lengths
# What most answers are asked for with.
USUAL = (Settings(), Settings(temperature=1.0))


class GraphSteps:
    """A model's fast parts, the memory of `rows` slots over a pool, and the graphs recorded for them."""

    def __init__(
        self, model: Model, pool: Pool, rows: int, length: int, *, kernels: bool = True, look: int = 16,
        fast: Any = None
    ):  # fmt: skip
        weight: Tensor = getattr(model, model.words).weight
        self.device, self.rows, self.look, self.kernels = weight.device, rows, look, kernels
        self.graph, self.vocab = weight.is_cuda, len(weight)
        self.fast, self.pool, self.places = fast or decoder(model, kernels), pool, rows
        self.searches: dict[Shape, Any] = {}  # for beams, by their shape: see beams.py
        places = -(-length // pool.page)
        table = torch.full((rows, places), pool.scratch, dtype=torch.int32, device=self.device)
        # In float32 at least, as the mechanisms have them.
        wide = torch.promote_types(weight.dtype, torch.float32)
        states = [
            {
                name: torch.zeros(rows, *size, dtype=wide, device=self.device)
                for name, size in spec.state.items()
            }
            for spec in model.cache_specs()
        ]
        self.pages = Pages(pool.stores, table, length, states=states)
        self.stateful = any(states)
        self.length = length
        self.sources = None
        if model.reads_source:
            self.sources = Sources(model, self.fast, pool, rows, self.device)

        def zeros(*shape: int, kind: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=self.device)

        self.state = DeviceState(
            ids=zeros(rows),
            pos=zeros(rows),
            count=zeros(rows),
            tick=zeros(rows),
            live=zeros(rows),
            log=zeros(look + 1, rows),
            logp=zeros(look + 1, rows, kind=torch.float32),
            last=length - 1,
        )
        # The log probability of the first token of a row, which its prompt's pass chose.
        self.first = zeros(rows, kind=torch.float32)
        self.columns = SamplingTensors(rows, len(self.fast.head.product.weight), self.device)
        # The best tokens of each line of the log, and their log probabilities; and those of the first.
        k = min(MOST_TOPS, self.columns.vocab)
        self.tops = [zeros(look + 1, rows, k), zeros(look + 1, rows, k, kind=torch.float32)]
        self.first_tops = [torch.zeros_like(x[0]) for x in self.tops]
        self.recorder = Recorder(self.graph, [self.state.live])
        # Where a round's log is copied to the host, while the next one begins.
        self.aside = torch.cuda.Stream(self.device) if self.graph else None
        self.marks: list[tuple[int, int]] = []
        self.owner: Callable[[], object] = lambda: None  # a weak reference to who has it
        self.early: Tensor | None = (
            None  # logits (rows V) of tokens that were fed before their choice
        )
        self.draft: GraphSteps | None = None  # of a model that guesses ahead
        self.guesses: Any = None  # see guesses.py

    # --- what a graph holds ---

    def hidden(
        self, ids: Tensor, pos: Tensor, pages: Pages, many: bool, memory: Pages | None
    ) -> Normed:
        """What the last block gives for tokens (b t) at their positions, laid end to end."""
        span, fast = Span(pos), self.fast
        x = ResidualStream(
            getattr(fast, fast.words)(ids, span).flatten(0, 1).contiguous(), many, self.kernels
        )
        ctx, cross = GraphContext(span, Causal()), memory and GraphContext(span, Full())
        return getattr(fast, fast.writer)(x, ctx, cross, caches=(pages, memory))

    def logits(self, width: int, bound: int, far: int) -> Tensor:
        """Feed the token of the first `width` rows; (width V)."""
        return self.fast.logits(self.fed(width, bound, far))

    def fed(self, width: int, bound: int, far: int) -> Normed:
        """What the last block gives for the token of the first `width` rows. No row that counts is longer than `bound`,
        no source than `far`."""
        s, rows = self.state, slice(0, width)
        mine: Any = {"table": self.pages.table[rows], "pos": s.pos[rows], "live": s.live[rows]}
        pages = replace(self.pages, bound=bound, **mine)
        # From two rows on norms and sums are kernels of their own, and products those of many rows: on an H200 two rows
        # take 836 us so, 908 by the kernel for one.
        # A beam that nothing is left for may have a token that the vocabulary does not.
        ids, pos = s.ids[rows].clamp(0, self.vocab - 1)[:, None], s.pos[rows, None]
        many, memory = self.kernels and width > 1, self.sources_of(rows, far)
        return self.hidden(ids, pos, pages, many, memory)

    def read_pack(self, pack: Pack, many: bool = True) -> Normed:
        """What the last block gives for the tokens of a pack, which are put into their pages."""
        pages = replace(self.pages, stores=self.pool.stores, pack=pack)
        # Every token is a row that sees the source of its prompt.
        memory = self.sources_of(pack.slot_ids[pack.row], pack.sizes.source)
        return self.hidden(pack.ids[None], pack.pos[None], pages, many, memory)

    def sources_of(self, rows: slice | Tensor, far: int) -> Pages | None:
        """What some rows see of their sources, none longer than `far`."""
        return None if self.sources is None else self.sources.of(rows, far)

    def _step(self, key: Any) -> None:
        self.step(*key[1:])

    def step(self, width: int, bound: int, far: int, used: frozenset[str]) -> None:
        """Logits, choice, and the state moved on by one token."""
        self.say(self.logits(width, bound, far), used)

    def say(self, logits: Tensor, used: frozenset[str]) -> None:
        """Choose by logits (b V) of the first rows, and move their state on."""
        width = len(logits)
        state = self.state.narrow(width)
        if used:
            tokens, *rest = self.choose(logits, slice(0, width), state.count, used)
            if TOPS in used:
                at = state.tick.clamp(max=self.look), torch.arange(width, device=self.device)
                for table, new in zip(self.tops, best_n(logits, rest[1]), strict=True):
                    table[at] = new
            self.columns.said(slice(0, width), tokens, state.live)
            advance(state, logits, tokens, *rest)
        else:
            greedy_advance(state, logits)

    def choose(
        self, logits: Tensor, rows: slice | Tensor, count: Tensor, used: frozenset[str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The next token of some rows, -1 where there is none; what is greatest, -1 where the logits are no numbers;
        their log sum exp."""
        tokens, norm = best(logits)
        if not used - {TOPS}:
            return tokens, tokens, norm
        return choose(logits, self.columns.at(rows, used), count), tokens, norm

    def read(
        self, pack: Pack, used: frozenset[str], wanted: abc.Sequence[tuple[int, int]] = ()
    ) -> list[Tensor]:
        """Prompts into their pages; those that are through begin to write. `wanted`: places of the pack, and tokens
        that follow there, whose log probabilities (and the best ones, and theirs) are given."""
        hidden = self.read_pack(pack)
        found = []
        for first in range(0, len(wanted), SLICE):
            at, tokens = send(list(wanted[first : first + SLICE]), self.device).T
            found.append(scored(self.fast.logits(hidden.take(at)), tokens))
        if pack.sizes.ends:
            self.pages.part(pack)
            self._begin(pack, hidden, used)
        return [torch.cat(x) for x in zip(*found, strict=True)]

    def _begin(self, pack: Pack, hidden: Normed, used: frozenset[str]) -> None:
        """The first token of prompts that are through."""
        s, at, logits = self.state, pack.rows, self.fast.logits(hidden.take(pack.last))
        tokens, greatest, norm = self.choose(logits, at, pack.said, used)
        if TOPS in used:
            for table, new in zip(self.first_tops, best_n(logits, norm), strict=True):
                table[at] = new
        self.columns.said(at, tokens)
        tokens = torch.where(greatest < 0, -1, tokens)
        own = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0].float()
        self.first[at] = torch.where(tokens < 0, 0.0, own - norm)
        s.ids[at], s.pos[at], s.count[at] = tokens, pack.lengths, pack.said + 1
        s.live.index_fill_(0, at, 1)

    # --- what the host calls ---

    def prefill(
        self,
        parts: abc.Sequence[Part],
        used: frozenset[str],
        wanted: abc.Sequence[tuple[int, int]] = (),
    ) -> list[Tensor]:
        """Read prompts without waiting for the device; what `wanted` asks for (see `read`) is on its way to the host.
        Sizes that come again are recorded as a graph; large ones keep the device busy without."""
        sizes = sizes_of(parts, self.pool.page)
        numbers = send(flat(parts, sizes), self.device)
        small = sizes.tokens <= RECORDED and not sizes.whole
        if wanted:
            return to_host(self.read(Pack.of(numbers, sizes), used, wanted))
        self.recorder.again(
            (sizes, used), numbers, lambda x: self.read(Pack.of(x, sizes), used), small
        )
        return []

    def remember(self, memories: abc.Sequence[Memory]) -> None:
        """Encode sources, and put what the decoder's layers keep of them into their pages."""
        assert self.sources is not None
        self.sources.remember(memories, self.recorder)

    def feeds_early(self, used: frozenset[str]) -> bool:
        """Whether tokens are fed before the masks of what follows are known. A state cannot be fed twice."""
        return MASK in used and not self.stateful

    def feed(self, width: int, bound: int, far: int) -> None:
        """The logits of the first rows, for a choice that comes later."""

        def call(key: Any) -> None:
            logits = self.logits(*key[1:])
            if self.early is None:
                self.early = logits.new_empty(self.rows, logits.shape[1])
            self.early[: len(logits)] = logits

        self.recorder.play(("feed", width, bound, far), call, self.changed)

    def run(self, steps: int, width: int, bound: int, far: int, used: frozenset[str]) -> Copies:
        """Advance the first `width` rows by `steps` <= look tokens; with masks by one, after `feed`. What they were fed
        first and what they chose then, with its log probability (steps + 1, rows), on its way to the host; and what
        tells that it has arrived."""
        s = self.state
        logs = [s.log, s.logp, *(self.tops if TOPS in used else ())]
        self.wait_for_copies()

        def say(_: Any) -> None:
            assert self.early is not None
            self.open(logs)
            self.say(self.early[:width], used)

        if steps and self.feeds_early(used):
            self.recorder.play(("say", width, used), say, self.changed)
        else:
            self.open(logs)
            for _ in range(steps):
                self.recorder.play(("step", width, bound, far, used), self._step, self.changed)
        return self.send_logs(logs, steps + 1)

    def wait_for_copies(self) -> None:
        """Until the log of the round before has been copied, nothing new is written to it."""
        if self.aside is not None:
            torch.cuda.current_stream().wait_stream(self.aside)

    def open(self, logs: abc.Sequence[Tensor]) -> None:
        """Begin the logs of a round with what is fed first."""
        s = self.state
        for log, first in zip(logs, (s.ids, self.first, *self.first_tops), strict=False):
            log[0].copy_(first)
        s.tick.fill_(1)

    def send_logs(self, logs: abc.Sequence[Tensor], lines: int) -> Copies:
        """The first lines of logs on their way to the host, beside what the device does next; and what tells that they
        have arrived."""
        if self.aside is not None:
            self.aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aside):
            # Whole lines lie end to end, so nothing is gathered first.
            return to_host([x[:lines] for x in logs]), arrival(self.device)

    def changed(self) -> list[Tensor]:
        """What a step changes."""
        said = self.columns.values.get("said")
        return [*self.state.tensors(), *([] if said is None else [said])]

    def recorders(self) -> list[Recorder]:
        return [self.recorder, *([] if self.draft is None else [self.draft.recorder])]

    def put_off(self, kinds: abc.Sequence[Settings] = ()) -> None:
        """From now on graphs wait for `warm`. Those of every number of rows are wanted, for the usual settings and
        these: the largest first, which can do the work of the others."""
        for recorder in self.recorders():
            recorder.puts_off = True
        least = ((width, self.bucket(1)) for width in widths(self.rows)[::-1])
        self.want([(self.rows, self.length), *least], [*USUAL, *kinds])

    @torch.inference_mode()
    def want(self, shapes: abc.Sequence[tuple[int, int]], kinds: abc.Sequence[Settings]) -> None:
        """Have `warm` record the steps of so many rows, of which the longest has so many tokens."""
        far = 0 if self.sources is None else next_power_of_two(self.sources.pages.length)
        for s in kinds:
            # What a choice depends on has its place when a row first has it.
            self.columns.put([0], [Sequence(Request([0], s), 0)])
            for shape in dict.fromkeys(shapes):
                key = ("step", *shape, far, used_by(s, 1, 1))
                self.recorder.want(key, self._step, self.changed)

    def bucket(self, longest: int) -> int:
        """The smallest power of two of tokens that holds `longest`."""
        return min(max(SHORTEST, 1 << (longest - 1).bit_length()), self.length)

    def place(self, edits: dict[tuple[int, int], int], idle: list[int]) -> None:
        """Pages into the block table, by (row, place); and rows that stay where they are from now on."""
        if edits:
            row, place, page = send([(*at, page) for at, page in edits.items()], self.device).T
            self.pages.table[row, place] = page.int()
        if idle:
            at = send(idle, self.device)
            self.state.live.index_fill_(0, at, 0)
            self.state.pos.index_fill_(0, at, 0)

    def reset(self) -> None:
        """No row is in use."""
        self.pages.table.fill_(self.pool.scratch)
        self.state.live.zero_()
        self.state.pos.zero_()


def widths(rows: int) -> list[int]:
    """The numbers of rows that steps have, where there may be so many."""
    return [1 << i for i in range((rows - 1).bit_length() + 1)]


_kept: weakref.WeakKeyDictionary[Model, GraphSteps] = weakref.WeakKeyDictionary()


def unused(model: Model) -> int:
    """Bytes of pages that were kept for a model and that nobody has: free for who comes next."""
    kept = _kept.get(model)
    return 0 if kept is None or kept.owner() is not None else kept.pool.nbytes


def why_plain(
    model: Model, backend: str = "sdpa", draft: Model | None = None, anywhere: bool = False
) -> str:
    """What keeps a model from a CUDA graph, or nothing. `anywhere`: off a GPU too, where its steps run as they are."""
    if isinstance(model, Prepared) and not model.graphs:
        return f"it was prepared in {model.precision} for a CPU"
    device = next(model.parameters()).device
    if device.type != "cuda" and not anywhere:
        return f"it is on {device}, not on a GPU"
    if backend != "sdpa":
        return f"backend={backend!r} was asked for"
    why = "" if draft is None else why_no_draft(draft, model)
    return f"its draft model has no graph: {why}" if why else why_not(model)


def why_no_draft(draft: Model, model: Model) -> str:
    """What keeps a draft model from the graph of a model, or nothing."""
    if isinstance(draft, Prepared):
        return f"it was prepared in {draft.precision}"
    if any(spec.state for x in (draft, model) for spec in x.cache_specs()):
        return "a state takes no guess back there"
    own, theirs = next(draft.parameters()), next(model.parameters())
    if (own.device, own.dtype) != (theirs.device, theirs.dtype):
        return f"it is {own.dtype} on {own.device}, the model {theirs.dtype} on {theirs.device}"
    return why_not(draft)


def steps_of(
    model: Model,
    rows: int,
    pages: int,
    page: int,
    length: int,
    exact: bool,
    draft: Model | None = None,
) -> GraphSteps:
    """The steps of a model: kept while it lives, its weights stay where they are, nobody else has it, and it is large
    enough. A weight that changes in place is seen by views of it, but not by copies: MLA's, and biases on positions.
    A `draft` model has its part of every page."""
    length = min(length, border(model) or length)
    kept = _kept.pop(model, None)
    if (
        kept is not None
        and kept.owner() is None
        and (kept.marks, kept.length) == (marks(model), length)
    ):
        have = len(kept.pool.users)
        enough = have == pages if exact else have >= pages
        if enough and kept.pool.page == page and kept.rows >= rows and same_draft(kept, draft):
            kept.pool.clear()
            kept.reset()
            for recorder in kept.recorders():
                recorder.puts_off, recorder.wanted = False, {}
            _kept[model] = kept
            return kept
    # Its memory first.
    del kept
    weight = next(model.parameters())
    if weight.is_cuda:
        # Beside the joining of weights, where no load has begun it.
        ahead.begin()
    specs = [*model.cache_specs(), *(() if draft is None else draft.cache_specs())]
    pool = Pool(specs, pages, page, weight.device, weight.dtype)
    slots = 1 << (rows - 1).bit_length()
    free = weight.is_cuda and not any(spec.state for spec in specs)
    new = GraphSteps(model, pool, max(slots, SLOTS) if free else slots, length)
    if draft is not None:
        new.draft = drafting(new, draft)
    if new.graph:
        ahead.begin().join()
        # Joining has moved weights.
        new.marks, _kept[model] = marks(model), new
    return new


def marks(model: Model) -> list[tuple[int, int]]:
    """Where the weights of a model lie, and where a graph has copies what they are."""
    tower = getattr(model, model.writer).config
    copied = tower.relative is not None or any(
        inner(a).kind == "mla" for a in tower.each("attention")
    )
    return [(p.data_ptr(), p._version if copied else 0) for p in model.parameters()]


def same_draft(kept: GraphSteps, draft: Model | None) -> bool:
    """Whether kept steps have this draft model; another that is still there does no harm to who asks for none."""
    own = kept.draft
    if draft is None:
        return own is None or own.owner() is not None
    return own is not None and own.owner() is draft and own.marks == marks(draft)


def drafting(steps: GraphSteps, draft: Model) -> GraphSteps:
    """The steps of a draft model, for the same rows, whose tokens lie in the same pages."""
    own, count = copy.copy(steps.pool), len(draft.cache_specs())
    own.stores = own.stores[-count:]
    length = min(steps.length, context_of(draft) or steps.length, border(draft) or steps.length)
    new = GraphSteps(draft, own, steps.rows, length, kernels=steps.kernels, look=1)
    new.pages.table = steps.pages.table
    new.owner, new.marks = weakref.ref(draft), marks(draft)
    return new
