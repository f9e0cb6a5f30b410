"""Ways of running a model on the same rows: alone, together, padded, chunk by chunk through a cache; all recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.attention.latent import LatentAttention
from regard.errors import UsageError
from regard.models import Model, Patches
from regard.models.embedding import Tokens, context
from regard.parity.cells import Cells, Trace
from regard.parity.oracle import Given
from regard.parity.record import Recorder

LEAST = 4  # tokens: a prompt, a chunk, a step


# --- what is read -------------------------------------------------------------------------------------------------


def sample(model: Model, *, rows: int = 3, tokens: int = 16, seed: int = 0) -> Given:
    """Random rows of what the model reads, `tokens` long or as long as it takes."""
    if rows < 2:
        raise UsageError(f"rows={rows}: to compare a batch with single rows takes at least 2")
    if tokens < LEAST:
        raise UsageError(f"tokens={tokens}: parity needs at least {LEAST} tokens a row")
    draw, c = torch.Generator().manual_seed(seed), model.config
    two = hasattr(model, "encode")
    reads = getattr(c, "source", None) if two else getattr(c, "embedding", None)

    def words(vocab: int, part: Tokens | None, size: int) -> Tensor:
        most = None if part is None else context(c.max_len, part)
        size = size if most is None else min(size, most)
        if size < LEAST:
            raise UsageError(f"the model's context is {size}; parity needs {LEAST} tokens a row")
        return torch.randint(vocab, (rows, size), generator=draw)

    given: Tensor
    if isinstance(reads, Patches):
        given = torch.randn(rows, reads.channels, reads.size, reads.size, generator=draw)
    elif two:
        vocab = getattr(c, "source_vocab", None) or c.source.vocab
        given = words(vocab, reads, max(tokens - 3, LEAST))
    else:
        given = words(reads.vocab if reads else c.vocab, reads, tokens)
    if not two:
        return Given(given)
    target = getattr(c, "target", None)
    return Given(words(target.vocab if target else c.vocab, target, tokens), given)


# --- ways of running ----------------------------------------------------------------------------------------------


class Played:
    """A run under way: calls of the model, and where their tokens belong."""

    def __init__(self, model: Model, given: Given, backend: str = "sdpa"):
        self.model, self.given, self.backend = model, given, backend
        weight = next(model.parameters())
        self.device = weight.device
        rows, size = given.ids.shape[:2]
        if given.ids.dim() == 4:
            patches: Any = model.config
            size = patches.embedding.count + patches.embedding.extra
        self.rows, self.size = rows, size
        self.trace = Trace((rows, size), self._source_size(), weight.dtype)
        self.recorder = Recorder(model, self.trace)

    def _source_size(self) -> int:
        source = self.given.source
        if source is None or source.dim() == 2:
            return 0 if source is None else source.shape[1]
        patches: Any = self.model.config
        return patches.source.count + patches.source.extra

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
        recorder.answer(self.model(ids.to(self.device), backend=self.backend, **more))

    def alone(self) -> Trace:
        """Row by row."""
        with self.recorder:
            for row in range(self.rows):
                self.call([row], 0, [self.size], [self.trace.source])
        return self.trace

    def together(self, cut: bool = False) -> Trace:
        """All rows in one batch, as long as each other or `cut` to different lengths."""
        rows, n, m = list(range(self.rows)), self.size, self.trace.source
        lengths = [max(1, n - (n * i) // (self.rows + 1)) if cut else n for i in rows]
        sources = [max(1, m - (m * i) // (self.rows + 1)) if cut else m for i in reversed(rows)]
        if cut:
            self.trace.lengths = torch.tensor(lengths)
            fixed = self.given.source is not None and self.given.source.dim() == 4
            sources = [m] * self.rows if fixed else sources
            self.trace.source_lengths = torch.tensor(sources) if m and not fixed else None
        with self.recorder:
            self.call(rows, 0, lengths, sources)
        return self.trace

    def cached(self, layout: str, chunks: list[int], shuffled: bool = False) -> Trace:
        """All rows chunk by chunk; `shuffled`: rows trade places after each, as beams do."""
        options: dict[str, Any] = {}
        if layout == "paged":
            options = {"page": 4, "pages": 2 * self.rows * (self.size // 4 + 2)}
        elif layout == "ring":
            options = {"chunk": max(chunks)}
        cache, start = self.model.cache(self.rows, layout, **options), 0
        order = list(range(self.rows))
        sources: list[int] | None = [self.trace.source] * self.rows
        with self.recorder:
            for size in chunks:
                self.call(order, start, [size] * self.rows, sources, cache=cache)
                start, sources = start + size, None
                if shuffled:
                    trade = [*range(1, self.rows), 0]
                    cache = cache.take(torch.tensor(trade, device=self.device))
                    order = [order[i] for i in trade]
        return self.trace


@contextmanager
def form(model: Model, name: str) -> Iterator[None]:
    """Latent attention in its `absorbed` or its `expanded` form."""
    layers = [m for m in model.modules() if isinstance(m, LatentAttention)]
    for layer in layers:
        layer.__dict__["mix"] = getattr(layer, name)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["mix"]
