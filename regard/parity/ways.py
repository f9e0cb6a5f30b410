"""Ways of running a model on the same rows: alone, together, padded, chunk by chunk through a cache, by transformers;
all recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UsageError
from regard.fast.watch import watch
from regard.models import Model, Patches
from regard.models.embedding import Tokens, context
from regard.parity.record import Cells, Given, Recorder, Trace

LEAST = 4  # tokens: a prompt, a chunk, a step


# --- what is read -------------------------------------------------------------------------------------------------


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


# --- ours ---------------------------------------------------------------------------------------------------------


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


# --- theirs -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def record(theirs: Any, ours: Model, given: Given) -> Trace:
    """The same of a model of transformers, which is not imported here: row by row, what its blocks give, by hooks,
    under our names."""
    trace = trace_of(ours, given, next(theirs.parameters()).dtype)
    hooks, row = [], 0

    def noting(name: str, source: bool, first: bool) -> Any:
        def note(module: Any, args: tuple, kwargs: dict[str, Any], out: Any = None) -> None:
            x = (args[0] if args else kwargs["hidden_states"]) if first else out
            x = x[0] if isinstance(x, tuple) else x
            trace.put(name, x, Cells([row], [0], [x.shape[1]]), source)

        return note

    lists = [(n, m) for n, m in theirs.named_modules() if isinstance(m, nn.ModuleList)]
    for tower in ours.towers:
        name, source = "" if tower == "tower" else f"{tower} ", tower == "encoder"
        count = len(getattr(ours, tower).blocks)
        # The outermost list of that length, of an encoder-decoder within its tower.
        layers = next((m for n, m in lists if len(m) == count and name.strip() in n), None)
        if layers is None:
            kind = type(theirs).__name__
            raise UsageError(f"{kind} of transformers has no list of {count} blocks to watch")
        note = noting(f"{name}embedding", source, True)
        hooks.append(layers[0].register_forward_pre_hook(note, with_kwargs=True))
        for i, layer in enumerate(layers):
            note = noting(f"{name}block {i} output", source, False)
            hooks.append(layer.register_forward_hook(note, with_kwargs=True))
    try:
        for row in range(trace.size[0]):
            trace.put_answer(answer(theirs, given, row), Cells([row], [0], [trace.size[1]]))
    finally:
        for hook in hooks:
            hook.remove()
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
