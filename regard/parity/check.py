"""Bug or rounding? One model run in every way it can be run, each held against float64.

    checks = parity(model)  # a list of Check: equal, rounding, tie or bug, and where the first bug is

Every run (alone, together, padded, chunk by chunk through a cache, by transformers) is recorded tensor by tensor and
compared step by step with what float64 makes of the run's own numbers (record.py), and judged by what rounding can do
there (`Envelope`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from regard.attention.protocol import Mechanism
from regard.errors import UsageError
from regard.fast.watch import Form, watch
from regard.models import Model, Patches
from regard.models.embedding import Tokens, context
from regard.parity.record import NOTHING, Cells, Given, Recorder, Step, Trace, oracle, rms, steps

LEAST = 4  # tokens: a prompt, a chunk, a step
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
Run = Callable[[Given], Trace]


@dataclass(frozen=True)
class Check:
    """One run against another. `worst`: the largest error of both in units of the envelope; `where`: the tensor that
    has it, which for a bug or a tie is the first one outside. A tie: scores of an indexer are equal, and the runs chose
    different keys among them; neither is wrong."""

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
    def judged(name: str) -> tuple[Trace, Finding]:
        trace = runs[name](rows)
        found = steps(exact(trace.dtype)[0], rows, trace)
        return trace, judge(found, envelope(trace.dtype, trace.whole))

    def check(name: str, one: str, other: str) -> Check:
        (a, first), (b, second) = judged(one), judged(other)
        x, y = a.tensors["logits"], b.tensors["logits"]
        both = a.real["logits"] & b.real["logits"]
        if a.lengths is not None and (truth.reads_source or not truth.decodes):
            # A cut text is another text to what sees all of it.
            both &= a.lengths[:, None] == x.shape[1]
        gap = float((x - y)[both].abs().max()) if both.any() else 0.0
        grave = ("rounding", "tie", "bug").index
        finding, run = max((first, one), (second, other), key=lambda pair: grave(pair[0].verdict))
        if finding.verdict == "bug":
            at = finding.row, finding.position
            return Check(name, "bug", gap, finding.worst, finding.where, run, *at)
        worst = max(first, second, key=lambda f: f.worst)
        if finding.verdict == "tie":
            return Check(name, "tie", gap, worst.worst, finding.where, run)
        return Check(name, "rounding" if gap else "equal", gap, worst.worst, worst.where)

    chosen = {name: pair for name, pair in CHECKS.items() if name in only}
    return [check(name, *pair) for name, pair in chosen.items() if set(pair) <= set(runs)]


def check_weights(model: Model) -> None:
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or not bool(weight.isfinite().all()):
            raise UsageError(
                f"the weight {name} has numbers that are not finite; parity needs finite ones"
            )


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


@dataclass(frozen=True)
class Finding:
    """What a run is worth: "rounding" and the place nearest to its envelope, or the first one outside: a "bug", or a
    "tie", where it chose other keys of the same score."""

    verdict: str
    worst: float
    where: str
    row: int = 0
    position: int = 0


def judge(steps: list[Step], envelope: Envelope) -> Finding:
    worst, where, tie = 0.0, "", None
    for step in steps:
        ratio = envelope.ratio(step)
        if step.tied is not None and bool((ratio[step.tied] > 1).any()):
            tie = tie or step.name
            ratio = ratio.masked_fill(step.tied, 0.0)
        most = float(ratio.max())
        if most > 1:
            row, position = divmod(int(ratio.argmax()), ratio.shape[1])
            return Finding("bug", most, step.name, row, position)
        if most >= worst:
            worst, where = most, step.name
    return Finding("tie", worst, tie) if tie else Finding("rounding", worst, where)
