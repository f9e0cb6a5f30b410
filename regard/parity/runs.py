"""Every way in which a model can be run, recorded."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.protocol import Mechanism
from regard.cache import Cache
from regard.errors import UsageError
from regard.fast.cpu import prepare
from regard.fast.watch import Form, watch
from regard.models import Model, Painter, Pair
from regard.models.base import border
from regard.models.inputs import random_inputs
from regard.parity.graph import GraphRun, why_unseen
from regard.parity.trace import PAGE, Cells, Given, Recorder, Trace, trace_of

# Tokens: enough for a prompt, a chunk and a step.
LEAST = 4
Run = Callable[[Given], Trace]


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
        paged = any(spec.token for spec in model.cache_specs())
        runs["shared"] = lambda g: Runner(model, g.shared()).shared()
        if paged:
            runs["paged"] = cached("paged", chunks, shuffled=True)
            if None not in model.windows():
                runs["ring"] = cached("ring", [3] * (size // 3))
    mechanisms = (m for m in model.modules() if isinstance(m, Mechanism))
    runs |= {form: formed(form) for m in mechanisms for form in m.forms}
    if next(model.parameters()).is_cpu:
        runs |= prepared_runs(model, size)
    # What is longer than the border of LongRoPE runs without a graph.
    fits = size <= (border(model) or size)
    if text and model.decodes and fits and not why_unseen(model):
        runs["graph"] = lambda g: GraphRun(model, g.shared()).run_all()
    runs["bf16"] = lambda g: Runner(copy.deepcopy(model).bfloat16(), g).alone()
    if torch.cuda.is_available():
        runs["GPU"] = lambda g: on_gpu(model, g)
    return runs


def prepared_runs(model: Model, size: int) -> dict[str, Run]:
    """As it is packed for this CPU: a prompt, and then token by token where it can."""

    @cache
    def made(precision: str = "fp32") -> Model:
        return prepare(model, precision)

    def packed(given: Given, precision: str = "fp32", watched: bool = True) -> Trace:
        runner = Runner(made(precision), given, watched=watched)
        if not model.decodes:
            # Texts of different lengths, without padding between them.
            return runner.together(cut=given.ids.dim() == 2)
        return runner.cached("contiguous", [size // 2] + [1] * (size - size // 2))

    runs: dict[str, Run] = {"packed": packed, "unwatched": lambda g: packed(g, watched=False)}
    runs["int8"] = lambda g: packed(g, "int8")
    if model.decodes:
        runs["packed pages"] = lambda g: Runner(made(), g.shared()).shared(steps=True)
        runs["int8 pages"] = lambda g: Runner(made("int8"), g.shared()).shared(steps=True)
    return runs


def on_gpu(model: Model, given: Given) -> Trace:
    # Else convolutions are of ten bits.
    with torch.backends.cudnn.flags(allow_tf32=False):
        return Runner(copy.deepcopy(model).cuda(), given).alone()


def sample(model: Model, *, rows: int = 3, tokens: int = 16, seed: int = 0) -> Given:
    """Random rows of what the model reads, `tokens` long or as long as it takes."""
    if isinstance(model, Painter):
        why = "this model draws pictures of texts, and parity compares token by token"
        raise UsageError(f"{why}; compare its pictures: regard.prepare(model)(ids) with model(ids)")
    if isinstance(model, Pair):
        why = "this model reads texts and images, and parity compares token by token"
        raise UsageError(
            f"{why}; look at its parts: regard.parity(model.text), parity(model.image)"
        )
    if rows < 2:
        raise UsageError(f"rows={rows}: to compare a batch with single rows takes at least 2")
    if tokens < LEAST:
        raise UsageError(f"tokens={tokens}: parity needs at least {LEAST} tokens a row")
    ids, source = random_inputs(model, rows, tokens, seed)
    for each in (ids, source):
        if each is not None and each.dim() == 2 and each.shape[1] < LEAST:
            size = each.shape[1]
            raise UsageError(f"the model's context is {size}; parity needs {LEAST} tokens a row")
    return Given(ids, source)


class Runner:
    """A run under way: calls of the model, and where their tokens belong."""

    def __init__(self, model: Model, given: Given, backend: str = "sdpa", *, watched: bool = True):
        """Of a model that is not `watched` only its answers are known."""
        weight = next(model.parameters())
        self.given = given
        self.backend = backend
        self.device = weight.device
        self.trace = trace_of(model, given, weight.dtype)
        self.trace.int8 = getattr(model, "precision", "") == "int8"
        self.rows, self.size = self.trace.size
        self.recorder = Recorder(self.trace)
        self.model = watch(model, self.recorder) if watched else model

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
        ids, source = self.given.ids[rows], self.given.source
        recorder = self.recorder
        recorder.cells = Cells([(row, start, n) for row, n in zip(rows, sizes, strict=True)])
        if ids.dim() == 2:
            ids = ids[:, start : start + max(sizes)]
        if len(set(sizes)) > 1:
            more["lengths"] = torch.tensor(sizes, device=self.device)
        if source is not None and sources is not None:
            each = zip(rows, sources, strict=True)
            recorder.source_cells = Cells([(row, 0, n) for row, n in each])
            more["source"] = source[rows].to(self.device)
            if source.dim() == 2:
                more["source"] = more["source"][:, : max(sources)]
            if len(set(sources)) > 1:
                more["source_lengths"] = torch.tensor(sources, device=self.device)
        if "cache" in more and border(self.model) is not None:
            more["cache"].reach = torch.full((len(rows),), self.size, device=self.device)
        y = self.model(ids.to(self.device), backend=self.backend, **more)
        self.trace.put_answer(y, recorder.cells)

    def alone(self) -> Trace:
        """Row by row."""
        for row in range(self.rows):
            self.call([row], 0, [self.size], [self.trace.source])
        return self.trace

    def together(self, cut: bool = False) -> Trace:
        """All rows in one batch, as long as each other or `cut` to different lengths."""
        trace, source = self.trace, self.given.source
        lengths = [self.size] * self.rows
        sources = [trace.source] * self.rows
        if cut:
            lengths = [max(1, n - n * i // (self.rows + 1)) for i, n in enumerate(lengths)]
            trace.lengths = torch.tensor(lengths)
        if cut and source is not None and source.dim() == 2:
            sources = [max(1, n - n * i // (self.rows + 1)) for i, n in enumerate(sources)][::-1]
            trace.source_lengths = torch.tensor(sources)
        self.call(list(range(self.rows)), 0, lengths, sources)
        return trace

    def cache(self, layout: str, rows: int, chunk: int) -> Cache:
        # No more than all rows need, so that a page that was given up too early is soon another's.
        each = -(-self.size // PAGE) + -(-self.trace.source // PAGE)
        pages = {"page": PAGE, "pages": self.rows * each}
        options = {"paged": pages, "ring": {"chunk": chunk}}.get(layout, {})
        return self.model.cache(rows, layout, **options)

    def cached(self, layout: str, chunks: list[int], shuffled: bool = False) -> Trace:
        """All rows chunk by chunk; `shuffled`: rows trade places after each, as beams do."""
        cache = self.cache(layout, self.rows, max(chunks))
        start = 0
        order = list(range(self.rows))
        trade = [*order[1:], 0]
        sources: list[int] | None = [self.trace.source] * self.rows
        for size in chunks:
            self.call(order, start, [size] * self.rows, sources, cache=cache)
            start += size
            sources = None
            if shuffled:
                cache = cache.take(torch.tensor(trade, device=self.device))
                order = [order[i] for i in trade]
        return self.trace

    def shared(self, steps: bool = False) -> Trace:
        """Rows of `Given.shared`, over pages where the model has any: what two have in common is
        fed once, and both go on with it, in full pages that they share and one that is partly
        filled. After one more token the second is lost, and goes on as a copy of the first again,
        as beams do. The rest in one chunk, or in `steps`."""
        half = self.rows // 2
        common = self.given.common
        order = list(range(self.rows))
        paged = any(spec.token for spec in self.model.cache_specs())
        cache = self.cache("paged" if paged else "contiguous", half, 1)
        copies = torch.tensor([row % half for row in order], device=self.device)
        self.call(order[:half], 0, [common - 1] * half, [self.trace.source] * half, cache=cache)
        forked = cache.fork(copies)
        cache.release()
        cache = forked
        self.recorder.all_read()
        # The lost ones read other tokens than those they are copies of.
        given = self.given
        self.given = replace(given, ids=given.ids.roll(1, 0))
        self.given.ids[:half] = given.ids[:half]
        self.call(order, common - 1, [1] * self.rows, cache=cache)
        self.given = given
        cache = cache.take(copies)
        left = self.size - common
        for size in [1] * left if steps else [1, left - 1]:
            if size:
                self.call(order, int(cache.lengths[0]), [size] * self.rows, cache=cache)
        self.trace.share()
        return self.trace


@torch.no_grad()
def record(theirs: Any, ours: Model, given: Given) -> Trace:
    """A run of a model of transformers, which is not imported here: row by row, what its blocks
    give, by hooks, under our names. A LookupError says that it has no such blocks."""
    trace = trace_of(ours, given, next(theirs.parameters()).dtype)
    row = 0
    calls: Counter[str] = Counter()

    def noting(name: str, source: bool) -> Any:
        def note(module: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
            first = args[0] if args else kwargs["hidden_states"]
            last = out[0] if isinstance(out, tuple) else out
            cells = Cells([(row, 0, last.shape[1])])
            i = calls[name]
            calls[name] += 1
            if i == 0:
                trace.put(f"{name}embedding", first, cells, source)
            trace.put(f"{name}block {i} output", last, cells, source)

        return note

    with ExitStack() as hooks:
        for tower in ours.towers:
            name = "" if tower == "tower" else f"{tower} "
            note = noting(name, source=tower == "encoder")
            for layer in blocks_of(theirs, given, name.strip(), len(getattr(ours, tower).blocks)):
                hooks.enter_context(layer.register_forward_hook(note, with_kwargs=True))
        for row in range(trace.size[0]):
            calls.clear()
            trace.put_answer(answer(theirs, given, row), Cells([(row, 0, trace.size[1])]))
    return trace


def blocks_of(theirs: Any, given: Given, tower: str, count: int) -> list[nn.Module]:
    """The modules that are its blocks: the outermost kind of those in a list, in this tower, that a
    text goes through `count` times. Layers may share one module, and one list may hold another."""
    lists = [(n, m) for n, m in theirs.named_modules() if isinstance(m, nn.ModuleList)]
    each = dict.fromkeys(m for n, layers in lists if tower in n for m in layers)
    called: Counter[type] = Counter()

    def note(module: Any, args: tuple, out: Any) -> None:
        called[type(module)] += 1

    with ExitStack() as hooks:
        for module in each:
            hooks.enter_context(module.register_forward_hook(note))
        answer(theirs, given, 0)
    kind = next((type(m) for m in each if called[type(m)] == count), None)
    if kind is None:
        name = type(theirs).__name__
        raise LookupError(f"{name} of transformers has no list of {count} blocks to watch")
    return [m for m in each if type(m) is kind]


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
