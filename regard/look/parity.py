"""Bug or rounding? One model run in every way it can be run, each held against float64.

    checks = parity(model)          # a list of Check: equal, rounding or bug, and where the first bug is

Every run is recorded tensor by tensor (record.py), compared step by step with what float64 makes of the run's own
numbers (oracle.py), and judged by what rounding can do there (rounding.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.attention.latent import LatentAttention
from regard.config import UsageError
from regard.look.oracle import Given, Walk, oracle
from regard.look.record import Cells, Recorder, Trace
from regard.look.rounding import SAMPLES, Envelope, Finding, judge
from regard.models import Model, Patches, Transformer
from regard.models.embedding import Tokens, context

LEAST = 4  # tokens: a prompt, a chunk, a step
Run = Callable[[Given], Trace]


@dataclass(frozen=True)
class Check:
    """One run against another. `worst`: the largest error of both in units of the envelope; `where`: the tensor that
    has it, which for a bug is the first one outside."""

    name: str
    verdict: str  # equal, rounding, bug
    difference: float  # the largest between the answers
    worst: float
    where: str
    run: str = ""  # which of both has the bug
    row: int = 0
    position: int = 0


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


def runs_of(model: Model, size: int) -> dict[str, Run]:
    """Every way in which this model can be run."""
    half = max(1, size // 2)
    chunks = [half, 1, *([size - half - 1] if size > half + 1 else [])]

    def formed(name: str) -> Run:
        def run(given: Given) -> Trace:
            with form(model, name):
                return Played(model, given).alone()

        return run

    runs: dict[str, Run] = {
        "reference": lambda g: Played(model, g, "reference").alone(),
        "fused": lambda g: Played(model, g).alone(),
        "batch": lambda g: Played(model, g).together(),
    }
    if reads_text(model):
        runs["padded"] = lambda g: Played(model, g).together(cut=True)
    if decodes(model):
        runs["contiguous"] = lambda g: Played(model, g).cached("contiguous", chunks)
        runs["prefill"] = lambda g: Played(model, g).cached("contiguous", [size])
        runs["decode"] = lambda g: Played(model, g).cached("contiguous", [1] * size)
        runs["reordered"] = lambda g: Played(model, g).cached("contiguous", chunks, shuffled=True)
        if any(spec.token for spec in model.cache_specs()):
            runs["paged"] = lambda g: Played(model, g).cached("paged", chunks, shuffled=True)
            if None not in model.windows():
                runs["ring"] = lambda g: Played(model, g).cached("ring", [3] * (size // 3))
    if any(isinstance(m, LatentAttention) for m in model.modules()):
        runs |= {name: formed(name) for name in ("absorbed", "expanded")}
    runs["bf16"] = lambda g: Played(copy.deepcopy(model).bfloat16(), g).alone()
    if torch.cuda.is_available():
        runs["GPU"] = lambda g: on_gpu(model, g)
    return runs


def on_gpu(model: Model, given: Given) -> Trace:
    with torch.backends.cudnn.flags(allow_tf32=False):  # else convolutions are of ten bits
        return Played(copy.deepcopy(model).cuda(), given).alone()


def reads_text(model: Model) -> bool:
    """Whether rows may have different lengths: images have none."""
    return not isinstance(getattr(model.config, "embedding", None), Patches)


def decodes(model: Model) -> bool:
    return not isinstance(model, Transformer) or model.config.tower.causal


# --- the checks ---------------------------------------------------------------------------------------------------

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


class Court:
    """Runs, judged once each."""

    def __init__(self, model: Model, given: Given, runs: dict[str, Run]):
        self.model, self.given, self.runs = model, given, runs
        self.oracles: dict[torch.dtype, tuple[Model, Trace]] = {}
        self.envelopes: dict[tuple[torch.dtype, bool], Envelope] = {}
        self.done: dict[str, tuple[Trace, Finding]] = {}

    @torch.no_grad()
    def judged(self, name: str) -> tuple[Trace, Finding]:
        if name not in self.done:
            trace = self.runs[name](self.given)
            envelope = self.envelope(trace.dtype, trace.whole)
            steps = Walk(self.oracles[trace.dtype][0], self.given, trace).steps
            self.done[name] = trace, judge(steps, envelope)
        return self.done[name]

    def envelope(self, dtype: torch.dtype, whole: bool) -> Envelope:
        many = self.given.times(SAMPLES)
        if dtype not in self.oracles:
            exact = oracle(self.model, dtype)
            self.oracles[dtype] = exact, Played(exact, many, "reference").together()
        if (dtype, whole) not in self.envelopes:
            exact, trace = self.oracles[dtype]
            trace = trace.blocks() if whole else trace
            self.envelopes[dtype, whole] = Envelope(exact, many, trace, dtype)
        return self.envelopes[dtype, whole]

    def check(self, name: str, one: str, other: str) -> Check:
        (a, first), (b, second) = self.judged(one), self.judged(other)
        x, y = a.tensors["logits"], b.tensors["logits"]
        both = a.real["logits"] & b.real["logits"]
        if a.lengths is not None and not causal(self.model):
            both &= a.lengths[:, None] == x.shape[1]  # a cut text is another text
        gap = float((x - y)[both].abs().max()) if both.any() else 0.0
        found, run = (first, one) if first.bug or not second.bug else (second, other)
        if found.bug is not None:
            at = found.row, found.position
            return Check(name, "bug", gap, found.worst, found.bug, run, *at)
        worst = max(first, second, key=lambda f: f.worst)
        return Check(name, "rounding" if gap else "equal", gap, worst.worst, worst.at)


def causal(model: Model) -> bool:
    return isinstance(model, Transformer) and model.config.tower.causal


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
    given = sample(model) if given is None else given
    check_weights(sound or model)
    size = given.ids.shape[1] if given.ids.dim() == 2 else 1
    runs = runs_of(model, size) | (more or {})
    court = Court(sound or model, given, runs)
    chosen = {name: pair for name, pair in CHECKS.items() if name in only}
    return [court.check(name, *pair) for name, pair in chosen.items() if set(pair) <= set(runs)]


def check_weights(model: Model) -> None:
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or not bool(weight.isfinite().all()):
            raise UsageError(
                f"the weight {name} has numbers that are not finite; parity needs finite ones"
            )
