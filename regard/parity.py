"""Bug or rounding? One model run in every way it can be run, each held against float64.

    checks = parity(model)  # a list of Check: equal, rounding, tie or bug, and where the first bug is

Every run (alone, together, padded, chunk by chunk through a cache, by transformers) is recorded tensor by tensor
(`Recorder`), each number at [row, position] of the text that the run reads: however a run is cut into rows, chunks,
pages and padding, any two can be laid side by side. The oracle is the model itself in float64. Of each tensor that it
computes it notes how far the run's own is off, and goes on with the run's (`Oracle`, regard.fast.watch): so an error
shows where it is made and nowhere else. What rounding can do there tells it from a bug (`Envelope`).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from regard.attention.protocol import Mechanism
from regard.errors import UsageError
from regard.fast.watch import Form, WatchedExperts, WatchedMechanism, Watcher, watch
from regard.fast.watch import Step as Part
from regard.mask import Mask, Span, Visible
from regard.models import Model, Patches
from regard.models.embedding import Tokens, context

LEAST = 4  # tokens: a prompt, a chunk, a step
NOTHING = torch.zeros(1, 1)  # no error
FP8 = 2.0**-4  # of float8 e4m3
CHECKS = {
    "fused against reference": ("fused", "reference"),
    "batch against single": ("batch", "fused"),
    "padded against unpadded": ("padded", "fused"),
    "cached against uncached": ("contiguous", "fused"),
    "ring against uncached": ("ring", "fused"),
    "paged against uncached": ("paged", "fused"),
    "prefill against decode": ("prefill", "decode"),
    "rows reordered": ("reordered", "fused"),
    "absorbed against expanded": ("absorbed", "expanded"),
    "bf16 against fp32": ("bf16", "fused"),
    "packed against plain": ("packed", "fused"),
    "GPU against CPU": ("GPU", "fused"),
    "ours against transformers": ("fused", "transformers"),
}
Run = Callable[["Given"], "Trace"]


@dataclass(frozen=True)
class Check:
    """One run against another, or one alone (`judge`). `worst`: the largest error in units of the envelope; `where`:
    its tensor, which for a bug or a tie is the first one outside. A tie: scores of an indexer are equal, and the runs
    chose different keys among them; neither is wrong."""

    name: str
    verdict: str  # equal, rounding, tie, bug
    difference: float  # the largest between the answers
    worst: float
    where: str
    run: str = ""  # which of both has the bug, or chose other keys than ours
    row: int = 0
    position: int = 0


def parity(
    model: Model,
    given: Given | None = None,
    *,
    more: dict[str, Run] | None = None,
    sound: Model | None = None,
    only: Collection[str] = tuple(CHECKS),
) -> list[Check]:
    """The checks of CHECKS (or `only` some) that this model and machine allow. `more`: runs made elsewhere ("packed",
    "transformers"); `sound`: the model that the runs are held against, if it is not the one that runs."""
    rows = sample(model) if given is None else given
    truth, many = sound or model, rows.times(SAMPLES)
    check_weights(truth)
    runs = runs_of(model, rows) | (more or {})

    @cache
    def exact(dtype: torch.dtype) -> tuple[Model, Trace]:
        wide = oracle(truth, dtype)
        return wide, Runner(wide, many, "reference").together()

    @cache
    def envelope(dtype: torch.dtype, whole: bool) -> Envelope:
        wide, trace = exact(dtype)
        return Envelope(wide, many, trace.blocks() if whole else trace, dtype)

    @cache
    @torch.no_grad()
    def judged(name: str) -> tuple[Trace, Check]:
        trace = runs[name](rows)
        found = steps(exact(trace.dtype)[0], rows, trace)
        return trace, judge(found, envelope(trace.dtype, trace.whole), name)

    def check(name: str, one: str, other: str) -> Check:
        (a, first), (b, second) = judged(one), judged(other)
        x, y = a.tensors["logits"], b.tensors["logits"]
        both = a.real["logits"] & b.real["logits"]
        if a.lengths is not None and (truth.reads_source or not truth.decodes):
            # A cut text is another text to what sees all of it.
            both &= a.lengths[:, None] == x.shape[1]
        gap = float((x - y)[both].abs().max()) if both.any() else 0.0
        grave = ("rounding", "tie", "bug").index
        found = max(first, second, key=lambda one: grave(one.verdict))
        worst = found if found.verdict == "bug" else max(first, second, key=lambda one: one.worst)
        if found.verdict == "rounding":
            found = replace(worst, verdict="rounding" if gap else "equal", run="")
        return replace(found, name=name, difference=gap, worst=worst.worst)

    chosen = {name: pair for name, pair in CHECKS.items() if name in only}
    return [check(name, *pair) for name, pair in chosen.items() if set(pair) <= set(runs)]


def check_weights(model: Model) -> None:
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or not bool(weight.isfinite().all()):
            why = "has numbers that are not finite; parity needs finite ones"
            raise UsageError(f"the weight {name} {why}")


# --- the runs -----------------------------------------------------------------------------------------------------


def runs_of(model: Model, given: Given) -> dict[str, Run]:
    """Every way in which this model can be run."""
    # Rows of text may have different lengths; images have none.
    text = given.ids.dim() == 2
    size = given.ids.shape[1] if text else 1
    half = max(1, size // 2)
    chunks = [half, 1, *([size - half - 1] if size > half + 1 else [])]

    def cached(layout: str, chunks: list[int], shuffled: bool = False) -> Run:
        return lambda g: Runner(model, g).cached(layout, chunks, shuffled)

    def formed(form: str) -> Run:
        return lambda g: Runner(Form(form).copy(model), g).alone()

    runs: dict[str, Run] = {
        "reference": lambda g: Runner(model, g, "reference").alone(),
        "fused": lambda g: Runner(model, g).alone(),
        "batch": lambda g: Runner(model, g).together(),
    }
    if text:
        runs["padded"] = lambda g: Runner(model, g).together(cut=True)
    if model.decodes:
        runs["contiguous"] = cached("contiguous", chunks)
        runs["prefill"] = cached("contiguous", [size])
        runs["decode"] = cached("contiguous", [1] * size)
        runs["reordered"] = cached("contiguous", chunks, shuffled=True)
        if any(spec.token for spec in model.cache_specs()):
            runs["paged"] = cached("paged", chunks, shuffled=True)
            if None not in model.windows():
                runs["ring"] = cached("ring", [3] * (size // 3))
    mechanisms = (m for m in model.modules() if isinstance(m, Mechanism))
    runs |= {form: formed(form) for m in mechanisms for form in m.forms}
    runs["bf16"] = lambda g: Runner(copy.deepcopy(model).bfloat16(), g).alone()
    if torch.cuda.is_available():
        runs["GPU"] = lambda g: on_gpu(model, g)
    return runs


def on_gpu(model: Model, given: Given) -> Trace:
    # Else convolutions are of ten bits.
    with torch.backends.cudnn.flags(allow_tf32=False):
        return Runner(copy.deepcopy(model).cuda(), given).alone()


def sample(model: Model, *, rows: int = 3, tokens: int = 16, seed: int = 0) -> Given:
    """Random rows of what the model reads, `tokens` long or as long as it takes."""
    if rows < 2:
        raise UsageError(f"rows={rows}: to compare a batch with single rows takes at least 2")
    if tokens < LEAST:
        raise UsageError(f"tokens={tokens}: parity needs at least {LEAST} tokens a row")
    draw, c = torch.Generator().manual_seed(seed), model.config

    def read(part: Tokens | Patches | None, vocab: int, size: int) -> Tensor:
        if isinstance(part, Patches):
            return torch.randn(rows, part.channels, part.size, part.size, generator=draw)
        most = None if part is None else context(c.max_len, part)
        size = size if most is None else min(size, most)
        if size < LEAST:
            raise UsageError(f"the model's context is {size}; parity needs {LEAST} tokens a row")
        return torch.randint(vocab if part is None else part.vocab, (rows, size), generator=draw)

    # Recurrent models have the sizes of their vocabularies instead of embeddings.
    vocab = getattr(c, "vocab", 0)
    if not model.reads_source:
        return Given(read(getattr(c, "embedding", None), vocab, tokens))
    words = getattr(c, "source_vocab", 0)
    source = read(getattr(c, "source", None), words, max(tokens - 3, LEAST))
    return Given(read(getattr(c, "target", None), vocab, tokens), source)


def trace_of(model: Model, given: Given, dtype: torch.dtype) -> Trace:
    """An empty one, of the size of what is read."""

    def size(x: Tensor | None, part: str) -> int:
        if x is None or x.dim() == 2:
            return 0 if x is None else x.shape[1]
        patches = getattr(model.config, part)
        return patches.count + patches.extra

    positions, source = size(given.ids, "embedding"), size(given.source, "source")
    return Trace((len(given.ids), positions), source, dtype)


class Runner:
    """A run under way: calls of the model, and where their tokens belong."""

    def __init__(self, model: Model, given: Given, backend: str = "sdpa"):
        weight = next(model.parameters())
        self.given, self.backend, self.device = given, backend, weight.device
        self.trace = trace_of(model, given, weight.dtype)
        self.rows, self.size = self.trace.size
        self.recorder = Recorder(self.trace)
        self.model = watch(model, self.recorder)

    @torch.no_grad()
    def call(
        self,
        rows: list[int],
        start: int,
        sizes: list[int],
        sources: list[int] | None = None,
        **more: Any,
    ) -> None:
        """Feed tokens start .. start + size of these rows, padded to the longest."""
        ids, source, recorder = self.given.ids[rows], self.given.source, self.recorder
        recorder.cells = Cells(rows, [start] * len(rows), sizes)
        if ids.dim() == 2:
            ids = ids[:, start : start + max(sizes)]
        if len(set(sizes)) > 1:
            more["lengths"] = torch.tensor(sizes, device=self.device)
        if source is not None and sources is not None:
            recorder.source_cells = Cells(rows, [0] * len(rows), sources)
            more["source"] = source[rows].to(self.device)
            if source.dim() == 2:
                more["source"] = more["source"][:, : max(sources)]
            if len(set(sources)) > 1:
                more["source_lengths"] = torch.tensor(sources, device=self.device)
        y = self.model(ids.to(self.device), backend=self.backend, **more)
        self.trace.put_answer(y, recorder.cells)

    def alone(self) -> Trace:
        """Row by row."""
        for row in range(self.rows):
            self.call([row], 0, [self.size], [self.trace.source])
        return self.trace

    def together(self, cut: bool = False) -> Trace:
        """All rows in one batch, as long as each other or `cut` to different lengths."""
        rows, trace, source = list(range(self.rows)), self.trace, self.given.source
        lengths, sources = [self.size] * self.rows, [trace.source] * self.rows
        if cut:
            lengths = [max(1, n - n * i // (self.rows + 1)) for i, n in enumerate(lengths)]
            trace.lengths = torch.tensor(lengths)
        if cut and source is not None and source.dim() == 2:
            sources = [max(1, n - n * i // (self.rows + 1)) for i, n in enumerate(sources)][::-1]
            trace.source_lengths = torch.tensor(sources)
        self.call(rows, 0, lengths, sources)
        return trace

    def cached(self, layout: str, chunks: list[int], shuffled: bool = False) -> Trace:
        """All rows chunk by chunk; `shuffled`: rows trade places after each, as beams do."""
        pages = {"page": 4, "pages": 2 * self.rows * (self.size // 4 + 2)}
        options = {"paged": pages, "ring": {"chunk": max(chunks)}}.get(layout, {})
        cache, start = self.model.cache(self.rows, layout, **options), 0
        order, trade = list(range(self.rows)), [*range(1, self.rows), 0]
        sources: list[int] | None = [self.trace.source] * self.rows
        for size in chunks:
            self.call(order, start, [size] * self.rows, sources, cache=cache)
            start, sources = start + size, None
            if shuffled:
                cache = cache.take(torch.tensor(trade, device=self.device))
                order = [order[i] for i in trade]
        return self.trace


@torch.no_grad()
def record(theirs: Any, ours: Model, given: Given) -> Trace:
    """The same of a model of transformers, which is not imported here: row by row, what its blocks give, by hooks,
    under our names."""
    trace, row = trace_of(ours, given, next(theirs.parameters()).dtype), 0

    def noting(name: str, source: bool, first: bool) -> Any:
        def note(module: Any, args: tuple, kwargs: dict[str, Any], out: Any = None) -> None:
            x = (args[0] if args else kwargs["hidden_states"]) if first else out
            x = x[0] if isinstance(x, tuple) else x
            trace.put(name, x, Cells([row], [0], [x.shape[1]]), source)

        return note

    lists = [(n, m) for n, m in theirs.named_modules() if isinstance(m, nn.ModuleList)]
    with ExitStack() as hooks:
        for tower in ours.towers:
            name, source = "" if tower == "tower" else f"{tower} ", tower == "encoder"
            count = len(getattr(ours, tower).blocks)
            # The outermost list of that length, of an encoder-decoder within its tower.
            layers = next((m for n, m in lists if len(m) == count and name.strip() in n), None)
            if layers is None:
                kind = type(theirs).__name__
                raise UsageError(f"{kind} of transformers has no list of {count} blocks to watch")
            note = noting(f"{name}embedding", source, True)
            hooks.enter_context(layers[0].register_forward_pre_hook(note, with_kwargs=True))
            for i, layer in enumerate(layers):
                note = noting(f"{name}block {i} output", source, False)
                hooks.enter_context(layer.register_forward_hook(note, with_kwargs=True))
        for row in range(trace.size[0]):
            trace.put_answer(answer(theirs, given, row), Cells([row], [0], [trace.size[1]]))
    return trace


def answer(theirs: Any, given: Given, row: int) -> Tensor:
    """What its head gives, or its last hidden states."""
    ids = given.ids[row : row + 1]
    if given.source is not None:
        out = theirs(input_ids=given.source[row : row + 1], decoder_input_ids=ids)
    else:
        out = theirs(pixel_values=ids) if ids.dim() == 4 else theirs(input_ids=ids)
    if "start_logits" in out:
        return torch.stack([out.start_logits, out.end_logits], -1)
    names = ("prediction_logits", "logits", "last_hidden_state")
    return next(out[name] for name in names if name in out)


# --- what a run computed on its way -------------------------------------------------------------------------------


@dataclass
class Given:
    """What all runs read: ids (rows, positions) or images, and a source."""

    ids: Tensor
    source: Tensor | None = None

    def times(self, count: int) -> Given:
        """All rows `count` times."""
        source = None if self.source is None else torch.cat([self.source] * count)
        return Given(torch.cat([self.ids] * count), source)


class Cells:
    """Which token each place (b t) of a call holds: row i of the call is `sizes[i]` tokens of row `rows[i]`, the
    first at position `starts[i]`."""

    def __init__(self, rows: list[int], starts: list[int], sizes: list[int]):
        self.rows, self.ends = torch.tensor(rows), torch.tensor(starts) + torch.tensor(sizes)
        self.index = Span.ragged(torch.tensor(sizes), max(sizes), torch.tensor(starts)).index  # b t
        self.at = (self.index >= 0).nonzero(as_tuple=True)
        self.to = (self.rows[self.at[0]], self.index[self.at])

    def put(self, whole: Tensor, part: Tensor) -> None:
        """A call's tensor (b t ...) to its places in (rows, positions, ...)."""
        whole[self.to] = part[self.at].to(whole)

    def take(self, whole: Tensor) -> Tensor:
        """The reverse: zeros at padding."""
        part = whole.new_zeros(*self.index.shape, *whole.shape[2:])
        part[self.at] = whole[self.to]
        return part


@dataclass
class Attended:
    """One call of one attention: what it had as keys, by position, and what a sparse one chose."""

    cells: Cells
    kept: dict[str, Tensor]  # b (size + 1) ...; the last place is never seen
    held: Tensor  # b (size + 1)
    lengths: Tensor  # b: how many tokens there are to see
    chosen: Tensor | None = None  # b t k, positions

    @property
    def index(self) -> Tensor:
        """Positions of the keys, -1 where there is no token."""
        at = torch.arange(self.held.shape[1])
        return torch.where(at < self.lengths[:, None], at, -1)


@dataclass
class Trace:
    """All that one run computed: `tensors` (rows, positions, ...) by name, in float64."""

    size: tuple[int, int]  # rows, positions
    source: int = 0  # positions of the source
    dtype: torch.dtype = torch.float32
    lengths: Tensor | None = None  # of the rows, where they are cut
    source_lengths: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, list[Attended]] = field(default_factory=dict)
    real: dict[str, Tensor] = field(default_factory=dict)  # which places were computed

    @property
    def whole(self) -> bool:
        """Whether blocks are known by their outputs alone: those of other libraries, and of C code that adds to the
        stream as it multiplies."""
        return not any(name.endswith("attention output") for name in self.tensors)

    def blocks(self) -> Trace:
        """The same, known by what its blocks give alone."""
        inside = re.compile(r"block \d+ (?!output)")
        tensors = {name: x for name, x in self.tensors.items() if not inside.search(name)}
        return replace(self, tensors=tensors, calls={})

    def put(self, name: str, x: Tensor, cells: Cells, source: bool = False) -> None:
        if name not in self.tensors:
            shape = (self.size[0], self.source if source else self.size[1])
            self.tensors[name] = torch.zeros(*shape, *x.shape[2:], dtype=torch.float64)
            self.real[name] = torch.zeros(shape, dtype=torch.bool)
        cells.put(self.tensors[name], x.detach().cpu())
        self.real[name][cells.to] = True

    def put_answer(self, y: Tensor, cells: Cells) -> None:
        """What the model gave; one for each row (a label) lies at the row's first place."""
        if y.dim() == 2:
            cells, y = Cells(cells.rows.tolist(), [0] * len(y), [1] * len(y)), y[:, None]
        self.put("logits", y, cells)


class Recorder(Watcher):
    """Changes nothing and notes everything; `cells` and `source_cells` say which tokens the call under way reads."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.cells = self.source_cells = Cells([0], [0], [1])
        self.chosen: list[Tensor] = []

    def see(self, name: str, x: Tensor, source: bool = False) -> Tensor:
        self.trace.put(name, x, self.source_cells if source else self.cells, source)
        return x

    def mix(self, part: WatchedMechanism, step: Part, *args: Any) -> Tensor:
        self.chosen = []
        o, (_, kept, mask, _, _) = step(*args), args
        cells = self.source_cells if part.source else self.cells
        lengths = cells.ends
        if part.cross:
            # Rows of the source, in the order of this call.
            ends = torch.zeros(self.trace.size[0], dtype=torch.long)
            ends[self.source_cells.rows] = self.source_cells.ends
            lengths = ends[cells.rows]
        entries, held, slots = by_position(kept, mask.k.index.cpu(), int(lengths.max()))
        chosen = torch.cat(self.chosen, 1).cpu() if self.chosen else None
        if chosen is not None:
            chosen = slots.gather(1, chosen.flatten(1)).view_as(chosen)
        call = Attended(cells, entries, held, lengths, chosen)
        self.trace.calls.setdefault(part.name, []).append(call)
        return o

    def choice(self, step: Part, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        self.chosen.append(step(scores, k, order))
        return self.chosen[-1]

    def choose(self, part: WatchedExperts, step: Part, scores: Tensor, k: int) -> Tensor:
        chosen = step(scores, k)
        cells = self.source_cells if part.source else self.cells
        self.see(
            f"{part.name} choice {part.choices}",
            chosen.unflatten(0, cells.index.shape),
            part.source,
        )
        return chosen


def by_position(
    kept: dict[str, Tensor], index: Tensor, size: int
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Entries (b s ...) brought to their positions (b size + 1 ...), which of them were there, and for each slot its
    position; what has none goes to the last place."""
    b, s = next(iter(kept.values())).shape[:2]
    index = index.expand(b, s)
    place = torch.where((index >= 0) & (index < size), index, size)
    slot = torch.full((b, size + 1), -1).scatter(1, place, torch.arange(s).expand(b, s))
    slot[:, size] = -1
    held = slot >= 0
    row = torch.arange(b)[:, None]
    entries = {}
    for name, x in kept.items():
        y = x.detach().cpu().double()[row, slot.clamp(min=0)]
        entries[name] = y.masked_fill(~held.view(b, -1, *[1] * (y.dim() - 2)), 0.0)
    return entries, held, place


# --- what it should have been -------------------------------------------------------------------------------------


@dataclass
class Step:
    """One tensor of a run: its name, what it should be, how far it is off (rows, positions), and what it is measured by
    (`key`). `tied` (rows, positions): where scores of an indexer tie, so that another choice is as right as ours."""

    name: str
    value: Tensor
    error: Tensor
    key: str
    unit: float = 0.0  # a coarser rounding than the run's own
    tied: Tensor | None = None


def oracle(model: Model, dtype: torch.dtype) -> Model:
    """The model in float64, with the weights that it has in `dtype`."""
    return copy.deepcopy(model).to(device="cpu", dtype=dtype).double().eval()


def steps(model: Model, given: Given, trace: Trace, compared: bool = True) -> list[Step]:
    """Every step of the run that `trace` recorded, in the order of the computation; `model` is its oracle. Where
    nothing is to be `compared`, they hold values alone."""
    watcher, more = Oracle(trace, compared), {}
    if given.source is not None:
        more = {"source": given.source, "source_lengths": trace.source_lengths}
    y = watch(model, watcher)(given.ids, trace.lengths, **more, backend="reference")
    watcher.see("logits", F.pad(y[:, None], (0, 0, 0, trace.size[1] - 1)) if y.dim() == 2 else y)
    return watcher.steps


def rms(x: Tensor) -> Tensor:
    """Root mean square of each token's numbers: (rows, positions, ...) -> (rows, positions)."""
    return x.flatten(2).square().mean(-1).sqrt()


class Oracle(Watcher):
    """Notes how far a run's tensors are off, and goes on with them."""

    def __init__(self, trace: Trace, compared: bool):
        self.trace, self.compared = trace.blocks() if trace.whole else trace, compared
        self.steps: list[Step] = []
        # The call whose attention is being computed, and the scores by which it had to choose its keys.
        self.call: Attended | None = None
        self.scores: list[Tensor] = []
        # Where scores tie, of the block that is being computed, when its choices are not known.
        self.tied: list[Tensor] = []

    def see(self, name: str, x: Tensor, source: bool = False) -> Tensor:
        """Compare with what was recorded, and go on with that."""
        got = self.trace.tensors.get(name)
        if got is None:
            return x
        error = NOTHING
        if self.compared:
            error = torch.where(self.trace.real[name], rms(got - x), 0.0)
        tied, self.tied = torch.cat(self.tied, 1) if self.tied else None, []
        # Copies, because a model adds in place.
        self.steps.append(Step(name, x.clone(), error, name, tied=tied))
        return got.clone()

    def mix(self, part: WatchedMechanism, step: Part, *args: Any) -> Tensor:
        """Call by call as the run made them, each with the keys that it had."""
        calls, (q, kept, mask, ctx, _) = self.trace.calls.get(part.name), args
        if calls is None:
            return step(*args)
        if self.compared:
            for key, value in kept.items():
                self.read(f"{part.name}{key}", key, value, calls, mask.mask)
        parts, outputs, choices = q if isinstance(q, tuple) else (q,), [], []
        for call in calls:
            self.call, self.scores = call, []
            here = replace(ctx, pos=Span(call.cells.index), memory=None, memo={})
            seen = Visible(mask.mask, here.pos, Span(call.index))
            each = tuple(call.cells.take(x) for x in parts)
            few = each if isinstance(q, tuple) else each[0]
            outputs.append(step(few, call.kept, seen, here, here.bias(seen.k)))
            if call.chosen is not None:
                choices.append((call, torch.cat(self.scores, 1)))
        self.call = None
        if choices:
            self.chosen(part, choices, parts[0].shape[:2])
        o = outputs[0].new_zeros(*parts[0].shape[:2], *outputs[0].shape[2:])
        for call, y in zip(calls, outputs, strict=True):
            call.cells.put(o, y)
        return o

    def read(self, name: str, key: str, value: Tensor, calls: list[Attended], mask: Mask) -> None:
        """Keys (or values, or latents) as attention had them, which with a cache is as they were read."""
        error = torch.zeros(value.shape[:2])
        for call in calls:
            rows, size = call.cells.rows, call.held.shape[1] - 1
            off = rms(call.kept[key][:, :size] - value[rows, :size])
            off = torch.where(call.held[:, :size], off, torch.inf)
            seen = Visible(mask, Span(call.cells.index), Span(call.index)).tensor()
            real = (call.cells.index >= 0)[:, None, :, None]
            needed = (seen & real).any(2)[:, 0, :size].expand_as(off)
            here = torch.where(needed, off, 0.0).float()
            error[rows, :size] = error[rows, :size].maximum(here)
        self.steps.append(Step(f"{name} read from the cache", value, error, name))

    # --- choices: what was chosen is taken over, if it was the best up to rounding ----------------------------------

    def dense(self, step: Part, keys: int) -> bool:
        return step(keys) if self.call is None else self.call.chosen is None

    def choice(self, step: Part, scores: Tensor, k: int, order: Tensor | None) -> Tensor:
        if self.call is None:
            # Where the best key that is left scores as much as the worst that is chosen.
            best = scores.topk(min(k + 1, scores.shape[-1])).values
            tied = (best[..., k:] == best[..., k - 1 : k]) & (best[..., k:] > -torch.inf)
            self.tied.append(tied.any(-1))
            return step(scores, k, order)
        done = sum(each.shape[1] for each in self.scores)
        self.scores.append(scores)
        assert self.call.chosen is not None
        return self.call.chosen[:, done : done + scores.shape[1]]

    def chosen(self, part: WatchedMechanism, choices: list[Any], shape: torch.Size) -> None:
        """The step of an indexer's choices, from the scores of each call."""
        value = torch.zeros(*shape, shape[1] + 1, dtype=torch.float64)
        error = torch.zeros(shape, dtype=torch.float64)
        for call, scores in choices:
            call.cells.put(error, regret(scores, call.chosen, part.config.topk))
            finite = scores.masked_fill(scores == -torch.inf, 0.0)
            call.cells.put(value, F.pad(finite, (0, value.shape[-1] - finite.shape[-1])))
        unit = FP8 if part.config.precision == "fp8" else 0.0
        name = f"{part.name}choice"
        self.steps.append(Step(name, value, error, name, unit))

    def choose(self, part: WatchedExperts, step: Part, scores: Tensor, k: int) -> Tensor:
        name = f"{part.name} choice {part.choices}"
        if name not in self.trace.tensors:
            return step(scores, k)
        real, chosen = self.trace.real[name], self.trace.tensors[name].long()
        value = scores.unflatten(0, real.shape)
        error = torch.where(real, regret(value, chosen, k), 0.0)
        value = value.masked_fill(value == -torch.inf, 0.0)
        self.steps.append(Step(f"{part.name} choice", value, error, name))
        return chosen.flatten(0, 1)


def regret(scores: Tensor, chosen: Tensor, k: int) -> Tensor:
    """How much better the best that was left is than the worst that was taken, or 0: (... n), (... k) -> (...).
    Too few or too many are infinitely wrong; scores of -inf count as none."""
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    there = scores > -torch.inf
    worst = scores.masked_fill(~(taken & there), torch.inf).amin(-1)
    left = scores.masked_fill(taken, -torch.inf).amax(-1)
    right = (taken & there).sum(-1) == there.sum(-1).clamp(max=k)
    return torch.where(right, (left - worst).clamp(min=0.0), torch.inf)


# --- how far rounding can carry a result: the envelope that tells rounding from a bug -------------------------------
#
# Each tensor y of a run is held against f(x) in float64, x being what the run itself had before: so f's own rounding
# is all that may part them, and no error is counted twice. How much that is, the oracle is asked: f is computed again
# in float64 with every sum, product and function in it off by a random relative error of at most u, the unit roundoff
# of the run's dtype (operands of products and norms too, so that cancellation counts; those of a sum of n products by
# u sqrt(n) / 8 where that is more, for its partial sums, which are float32 in every dtype, are rounded too). The
# spread of the results, root mean square over the features of each token, is what rounding does to that token there;
# SAFETY times it is the envelope. A bug is an error outside of it, and the first one is named.

SAFETY, SAMPLES = 12.0, 4
EXACT = (
    *("embedding", "index", "index_select", "gather", "scatter", "cat", "stack", "clone", "copy_"),
    *("_to_copy", "masked_fill", "where", "relu", "neg", "abs", "clamp", "zeros", "ones", "full"),
    *("fill_", "zero_", "empty", "empty_like", "zeros_like", "repeat", "constant_pad_nd", "topk"),
    *("new_zeros", "new_full", "new_empty", "index_put_", "sort", "arange", "repeat_interleave"),
    *("amax", "amin", "max", "flip", "scalar_tensor", "lift_fresh"),
)
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "convolution": 1}  # operand that tells n
SUMS = ("sum", "mean", "_softmax", "native_layer_norm", "_fused_rms_norm", "pow")
CURVES = ("gelu", "silu")  # x times a number near 0 or 1: off by a share of x, not of the product


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding once."""
    return torch.finfo(dtype).eps / 2


class Rounding(TorchDispatchMode):
    """Every float64 operation in here is off by a relative error drawn from -u .. u."""

    def __init__(self, u: float):
        super().__init__()
        self.u, self.drawn = u, torch.Generator().manual_seed(0)

    def noise(self, x: Tensor, u: float = 0.0) -> Tensor:
        u = max(u, self.u)
        drawn = torch.rand(x.shape, generator=self.drawn, dtype=x.dtype)
        return drawn.mul_(2 * u).add_(1 - u)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in SUMS or name in PRODUCTS:
            partial = 0.0
            if name in PRODUCTS:
                # What rounding the partial sums does: of x (.. n), or of a convolution's weights (out in h w).
                x = args[PRODUCTS[name]]
                terms = x[0].numel() if x.dim() == 4 else x.shape[-1]
                partial = unit(torch.float32) * math.sqrt(terms) / 8
            args = tuple(x * self.noise(x, partial) if _wide(x) else x for x in args)
        out = func(*args, **(kwargs or {}))
        if name in CURVES:
            out += args[0] * (self.noise(args[0]) - 1)
        if name not in EXACT and not func.is_view:
            for x in tree_iter(out):
                if _wide(x):
                    x.mul_(self.noise(x))
        return out


def _wide(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


class Envelope:
    """What rounding does to each tensor of a model, for runs in `dtype`: learnt from the oracle's own run. Where that
    takes all keys and another run chooses, nothing is known of the choice."""

    def __init__(self, model: Model, given: Given, trace: Trace, dtype: torch.dtype):
        """`given` and its `trace` hold every row SAMPLES times: each is off in another way."""
        self.u = unit(dtype)
        self.spread: dict[str, Tensor] = {}
        exact = steps(model, given, trace, compared=False)
        with Rounding(self.u):
            drawn = steps(model, given, trace, compared=False)
        for a, b in zip(exact, drawn, strict=True):
            off = rms(a.value - b.value).unflatten(0, (SAMPLES, -1))
            self.spread[a.key] = off.square().mean(0).sqrt()

    def ratio(self, step: Step) -> Tensor:
        """The error in units of what rounding may do: more than 1 is outside (rows, positions)."""
        least = max(self.u, step.unit) * rms(step.value)
        allowed = SAFETY * torch.maximum(self.spread.get(step.key, NOTHING), least)
        ratio = torch.where(step.error != 0, step.error / allowed, 0.0)
        return ratio.nan_to_num(nan=torch.inf)


def judge(steps: list[Step], envelope: Envelope, run: str = "") -> Check:
    """What a run is worth: "rounding" and the place nearest to its envelope, or the first one outside."""
    worst, where, tie = 0.0, "", None
    for step in steps:
        ratio = envelope.ratio(step)
        if step.tied is not None and bool((ratio[step.tied] > 1).any()):
            tie = tie or step.name
            ratio = ratio.masked_fill(step.tied, 0.0)
        most = float(ratio.max())
        if most > 1:
            row, position = divmod(int(ratio.argmax()), ratio.shape[1])
            return Check("", "bug", 0.0, most, step.name, run, row, position)
        if most >= worst:
            worst, where = most, step.name
    return Check("", "tie" if tie else "rounding", 0.0, worst, tie or where, run)
