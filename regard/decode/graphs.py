"""Decoding on one GPU without waiting: a step of static shape as a CUDA graph, tokens chosen on the device, requests in
slots that are refilled as they come free.

`GraphDecoder(model, rows, length)` takes a decoder of plain blocks (grouped-query or latent attention, MLPs) and
computes what the model computes. With graph=False the same step runs eagerly, on any device. The host looks at the
tokens once in up to `look` steps, one round late, so that the device always has work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from regard.decode.sample import BROKEN
from regard.decode.sampling import draw, min_p, top_k, top_p, uniform
from regard.decode.settings import Request, Result, Settings
from regard.errors import UsageError
from regard.fast.cpu import Prepared
from regard.fast.cuda import Normed, SlotContext, Slots, Stream, slotted, why_not
from regard.kernels.triton import prompt as gpu_prompt
from regard.kernels.triton.linear import MOST
from regard.kernels.triton.prompt import Pack
from regard.kernels.triton.record import Recorder, send
from regard.kernels.triton.sample import State, advance, greedy, greedy_advance, log_prob
from regard.mask import Causal, Span
from regard.models.embedding import context

FILTERS = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
KNOWN = {"max_new_tokens", "temperature", "eos", "seed", *FILTERS}
SHORTEST = 256  # the smallest bucket of lengths
BUDGET = 16384  # tokens of prompts prefilled in one pass
RECORDED = 4096  # and in a pass that is recorded

# --- requests -----------------------------------------------------------------------------------------------------


@dataclass
class Slot:
    """A request in the making."""

    index: int  # of its result
    request: Request
    left: int  # tokens the device has not been asked for
    fresh: bool = True  # its first token, from the prefill, has not been logged
    ids: list[int] = field(default_factory=list)  # tokens the host has seen
    finish: str = ""

    def take(self, tokens: Sequence[int]) -> None:
        s = self.request.settings
        for token in tokens:
            if self.finish:
                return
            if token < 0:
                self.finish = "error"
            elif token in s.eos:
                self.finish = "eos"
            else:
                self.ids.append(token)
                self.finish = "length" if len(self.ids) >= s.max_new_tokens else ""


Flight = tuple[Tensor, Any, list[tuple[int, Slot, int, int]]]  # log, event, (row, slot, lines)


def kinds(settings: Sequence[Settings]) -> tuple[str, ...]:
    """What some row draws by; nothing where all are greedy."""
    if not any(s.temperature > 0 for s in settings):
        return ()
    idle = Settings()
    used = [n for n in FILTERS if any(getattr(s, n) != getattr(idle, n) for s in settings)]
    return ("temperature", *used)


class GraphDecoder:
    """`serve` requests in `rows` slots of at most `length` tokens, prompt and answer together. kernels=False is torch
    alone."""

    def __init__(
        self,
        model: Any,
        rows: int = 1,
        length: int = 1024,
        *,
        graph: bool | None = None,
        kernels: bool = True,
        look: int = 16,
    ):
        if isinstance(model, Prepared):
            raise UsageError(
                f"this model was prepared in {model.precision}, its weights are packed for products that a graph does "
                "not use; give the original"
            )
        why = why_not(model)
        if why:
            raise UsageError(f"this model has no CUDA graph: {why}. Use regard.generate")
        most = context(model.config.max_len, model.config.embedding)
        if most is not None and length > most:
            raise UsageError(f"length={length}, but the model's context is {most}")
        weight = model.embedding.weight
        self.model, self.rows, self.length, self.look = model, rows, length, look
        self.device, self.kernels = weight.device, kernels
        self.graph = weight.is_cuda if graph is None else graph
        if self.graph and not weight.is_cuda:
            raise UsageError(f"the model is on {self.device}; use model.cuda(), or graph=False")
        with torch.no_grad():
            self.fast, self.slots = slotted(model, rows, length, kernels)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=self.device)

        lines = zeros(look + 1, rows)
        each = (zeros(rows), zeros(rows), zeros(rows), zeros(rows), zeros(rows) + 1)
        self.state = State(*each, lines, lines.float(), length - 1)
        idle = {name: getattr(Settings(), name) for name in ("temperature", *FILTERS, "seed")}
        self.columns = {
            name: torch.full((rows, 1), value, device=self.device)
            for name, value in {**idle, "key": 0}.items()
        }
        self.held = Recorder()
        self.rooms: dict[Any, Tensor] = {}  # what recorded prefills read, by their sizes
        self.drew = [False] * rows  # whose columns are not idle

    # --- one step ---

    def logits(self, bound: int) -> Tensor:
        """Feed every row's token; (rows V). No row that counts is longer than `bound`."""
        s = self.state
        wide = self.kernels and self.rows > MOST
        slots = replace(self.slots, pos=s.pos, bound=bound)
        return self.scores(self.hidden(s.ids.clamp(min=0)[:, None], s.pos[:, None], slots, wide))

    def hidden(self, ids: Tensor, pos: Tensor, slots: Slots, wide: bool) -> Normed:
        """What the last block gives for tokens (b t) at their positions, laid end to end."""
        span = Span(pos)
        x = self.fast.embedding(ids, span).flatten(0, 1).contiguous()
        ctx = SlotContext(span, Causal())
        return self.fast.tower(Stream(x, wide), ctx, caches=(slots, None))

    def scores(self, hidden: Normed) -> Tensor:
        """Logits (n V)."""
        return self.fast.logits(hidden)

    def step(self, bound: int, kind: tuple[str, ...]) -> None:
        """What a graph holds: logits, choice, and the state moved on by one token."""
        logits = self.logits(bound)
        if not kind and self.kernels:
            greedy_advance(self.state, logits)
        else:
            tokens = self.choose(logits, kind)
            advance(self.state, tokens, log_prob(logits, tokens))

    def choose(self, logits: Tensor, kind: tuple[str, ...], rows: Tensor | None = None) -> Tensor:
        """The next token of every row, or of some: as SampleLane.pick, for the filters in `kind`."""
        raw = logits.float()
        best = greedy(raw)
        if not kind:
            return best
        count = self.state.count if rows is None else self.state.count[rows]
        at = {n: c if rows is None else c[rows] for n, c in self.columns.items()}
        kept = raw / at["temperature"].clamp(min=1e-6)
        for name, keep in FILTERS.items():
            if name in kind:
                kept = keep(kept, at[name])
        u = uniform(at["seed"][:, 0], at["key"][:, 0], count)
        drawn = draw(kept.nan_to_num(0.0, neginf=-torch.inf), u)
        return torch.where((at["temperature"][:, 0] > 0) & (best >= 0), drawn, best)

    @torch.no_grad()
    def run(self, steps: int, bound: int, kind: tuple[str, ...] = ()) -> None:
        """Advance every row by `steps` <= look tokens; the log holds what they were fed first, then what they chose."""
        if self.graph:
            self.capture(bound, kind)
        with self.held.timed("decode"):
            self.state.log[0].copy_(self.state.ids)
            self.state.tick.fill_(1)
            for _ in range(steps):
                self.held.graphs[bound, kind].replay() if self.graph else self.step(bound, kind)

    @torch.no_grad()
    def capture(self, bound: int, kind: tuple[str, ...] = ()) -> None:
        """Record the step for this bucket, once. What trying it writes to the caches is written over before it is
        seen."""
        if (bound, kind) not in self.held.graphs:
            state = self.state.tensors()
            self.held.try_and_record((bound, kind), lambda: self.step(bound, kind), state)

    def bucket(self, longest: int) -> int:
        """The smallest power of two of tokens that holds `longest`."""
        return min(max(SHORTEST, 1 << (longest - 1).bit_length()), self.length)

    # --- prompts ---

    @torch.no_grad()
    def prefill(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Read prompts into slots and choose their first tokens, without waiting for the device. Sizes that come again
        are recorded as a graph; large ones keep the device busy without."""
        texts = [r.ids for r in requests]
        sizes, kind = gpu_prompt.sizes_of(texts), kinds([r.settings for r in requests])
        numbers = send(gpu_prompt.flat(texts, slots, sizes), self.device)
        with self.held.timed("prefill"):
            self.tell(slots, requests)
            key = (sizes, kind)
            again = key in self.rooms
            room = self.rooms.setdefault(key, torch.empty_like(numbers))
            if not (again and self.graph and sizes[0] <= RECORDED):
                return self.read(Pack.of(numbers, sizes), kind)
            if key not in self.held.graphs:
                self.held.record(key, lambda: self.read(Pack.of(room, sizes), kind))
            room.copy_(numbers)
            self.held.graphs[key].replay()

    def read(self, pack: Pack, kind: tuple[str, ...]) -> None:
        """What a prompts' graph holds: caches filled, first tokens chosen, the state set."""
        # What an earlier request left: a mask weighs it with 0, and 0 * NaN is NaN. Kernels do not read it.
        for block, memory in zip(self.fast.tower.blocks, self.slots.memory, strict=True):
            if not block.attention.fast(memory[0]):
                for each in memory:
                    each.index_fill_(0, pack.rows, 0)
        slots = replace(self.slots, pack=pack)
        hidden = self.hidden(pack.ids[None], pack.pos[None], slots, True).take(pack.last)
        self.state.count.index_fill_(0, pack.rows, 0)
        self.state.pos[pack.rows] = pack.lengths
        self.state.ids[pack.rows] = self.choose(self.scores(hidden), kind, pack.rows)
        self.state.count.index_fill_(0, pack.rows, 1)

    def tell(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Settings into the columns; greedy after greedy has none to tell."""
        draws = [r.settings.temperature > 0 for r in requests]
        if not any(draws) and not any(self.drew[i] for i in slots):
            return
        rows = send(list(slots), self.device)
        for name, column in self.columns.items():
            key = [(r.key or 0) * 1024 for r in requests]
            values = key if name == "key" else [getattr(r.settings, name) for r in requests]
            column[rows] = send(values, self.device).to(column.dtype)[:, None]
        for i, drew in zip(slots, draws, strict=True):
            self.drew[i] = drew

    # --- many requests ---

    def serve(
        self, requests: Sequence[Request], *, refill: bool = True, few: int | None = None
    ) -> list[Result]:
        """Answers in the order of the requests, without log probabilities. Slots are refilled when `few` (an eighth)
        are free, the longest answers first, so that none is left alone at the end; refill=False is static batching: all
        slots are filled together, in order."""
        asked = [self.check(i, r) for i, r in enumerate(requests)]
        waiting = deque(sorted(asked, key=lambda s: -s.left) if refill else asked)
        slots: list[Slot | None] = [None] * self.rows
        results: dict[int, Result] = {}
        flying: Flight | None = None
        few = min(few or max(1, self.rows // 8), self.rows)
        while len(results) < len(requests):
            free = [i for i, s in enumerate(slots) if s is None or s.finish or not s.left]
            enough = min(few, len(waiting)) if refill else self.rows
            if waiting and (len(free) >= enough):
                self.admit(free, slots, waiting)
            launched = self.launch(slots, few if refill and waiting else self.rows)
            if flying is not None:  # this round runs while the last one is read
                land(flying, results)
            flying = launched
        return [results[i] for i in range(len(requests))]

    def admit(self, free: list[int], slots: list[Slot | None], waiting: deque[Slot]) -> None:
        """Fill free slots from the queue, in as few passes as the budget allows."""
        while free and waiting:
            group: list[Slot] = []
            size = 0
            while waiting and len(group) < len(free):
                size = max(size, len(waiting[0].request.ids))
                if group and size * (len(group) + 1) > BUDGET:
                    break
                group.append(waiting.popleft())
            rows, free = free[: len(group)], free[len(group) :]
            self.prefill(rows, [s.request for s in group])
            for i, slot in zip(rows, group, strict=True):
                slots[i] = slot

    def launch(self, slots: list[Slot | None], few: int) -> Flight | None:
        """Start the next round: until `few` of the rows are through, or for `look` steps."""
        live = [(i, s) for i, s in enumerate(slots) if s and not s.finish and (s.left or s.fresh)]
        if not live:
            return None
        lefts = sorted(s.left for _, s in live)
        steps = min(self.look, lefts[min(few, len(lefts)) - 1])
        lines, longest = [], 1
        for i, s in live:
            took = min(steps, s.left)
            lines.append((i, s, 0 if s.fresh else 1, 1 + took))
            s.left, s.fresh = s.left - took, False
            total = len(s.request.ids) + s.request.settings.max_new_tokens - s.left
            longest = max(longest, total)
        kind = kinds([s.request.settings for _, s in live])
        self.run(steps, self.bucket(longest), kind)
        log = self.state.log[: steps + 1]
        if self.device.type != "cuda":
            return log.clone(), None, lines
        host = torch.empty(log.shape, dtype=log.dtype, pin_memory=True)
        host.copy_(log, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event, lines

    def check(self, index: int, request: Request) -> Slot:
        """A request that can be served, keyed by its place."""
        s, vocab = request.settings, self.model.config.embedding.vocab
        for f in fields(s):
            if f.name not in KNOWN and getattr(s, f.name) != f.default:
                raise UsageError(f"{f.name} is not decoded in graphs; use regard.generate")
        if request.stop or request.source is not None or request.deadline is not None:
            raise UsageError("stop, source and deadline are not known here; use regard.generate")
        wrong = next((i for i in [*request.ids, *s.eos] if not 0 <= i < vocab), None)
        if wrong is not None or not request.ids:
            what = f"token {wrong} is not in 0..{vocab - 1}"
            raise UsageError(f"request {index}: {what if request.ids else 'the prompt is empty'}")
        if len(request.ids) + s.max_new_tokens > self.length:
            raise UsageError(
                f"{len(request.ids)} tokens of prompt and {s.max_new_tokens} new ones do not fit length={self.length}"
            )
        key = index if request.key is None else request.key
        return Slot(index, replace(request, key=key), s.max_new_tokens - 1)


def land(flight: Flight, results: dict[int, Result]) -> None:
    """Read a round's tokens; those of a slot that had ended are dropped."""
    host, event, lines = flight
    if event is not None:
        event.synchronize()
    columns = host.t().tolist()
    for row, slot, first, last in lines:
        if not slot.finish:
            slot.take(columns[row][first:last])
            if slot.finish:
                error = BROKEN if slot.finish == "error" else None
                results[slot.index] = Result(slot.ids, [], 0.0, slot.finish, error=error)
