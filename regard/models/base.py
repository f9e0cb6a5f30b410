"""What every model can do besides its forward: check its input, make its cache, say what it costs, save itself."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.block import Stack
from regard.cache import LAYOUTS, Cache, CacheSpec, Contiguous, OutOfPages, Paged, alike
from regard.errors import UsageError, nearest
from regard.mask import Span
from regard.moe import MixtureOfExperts
from regard.position import LongRope

WRITER = "regard.checkpoint"
Lengths = Tensor | list[int] | None  # of the rows of a ragged batch, (b)


class Model(nn.Module):
    """Base of all models. `origin` is what a checkpoint folder said that the model does not compute with (its
    architecture's name, token ids, files to carry along); saving writes it back."""

    # Whether an encoder reads a source, which `encode` gives the states of.
    reads_source: ClassVar[bool] = False
    # The towers of blocks, each with the embedding that it reads; cells have none.
    towers: ClassVar[dict[str, str]] = {}
    # The part that writes the answer, and the embedding whose table a tied head multiplies by.
    writer: ClassVar[str]
    words: ClassVar[str]
    head: Any
    # What gives the probe of a call without one, from its ids: see Probe.on.
    watch: Callable[[Tensor], Any] | None = None

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.origin: Any = None
        # Hugging Face's name for what it was built as, if it has one, and how its weights were drawn.
        self.family = ""
        self.start: Any = None
        # What regard.fast put in the place of how many parts: (plain, fast or why not) -> how many.
        self.parts: dict[tuple[str, str], int] = {}

    def save(self, path: str | Path) -> Path:
        """Write a folder that `regard.load`, and transformers where it knows the family, can read."""
        # By name: models are below checkpoints and import nothing of them.
        return importlib.import_module(WRITER).save(self, path)

    def forward(self, ids: Tensor, lengths: Lengths = None, **options: Any) -> Tensor:
        """ids (b t) -> logits (b t V). The options are those of `hidden`."""
        return self.logits(self.hidden(ids, lengths, **options))

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the head reads, (b t m)."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head gives for hidden states: (... V); without a head, these."""
        if self.head is None:
            return hidden
        return self.head(hidden, getattr(getattr(self, self.words), "weight", None))

    def next_logits(self, ids: Tensor, lengths: Lengths = None, **rest: Any) -> Tensor:
        """Logits (b V) after the last real token of each row: all that decoding needs of a prompt."""
        return self.logits(last_real(self.hidden(ids, lengths, **rest), lengths))

    def probe_of(self, ids: Tensor, probe: Any) -> Any:
        """The probe of a call: the one it was given, or else that of `watch`."""
        return self.watch(ids) if probe is None and self.watch is not None else probe

    @property
    def decodes(self) -> bool:
        """Whether it writes step by step, with a cache."""
        return True

    @property
    def shares_source(self) -> bool:
        """Whether several rows of a cache may read one row of its source."""
        return False

    def cache_specs(self) -> list[CacheSpec]:
        if not self.decodes:
            name = type(self.config).__name__
            raise UsageError(f"{name} does not decode step by step: it has no cache")
        return getattr(self, self.writer).cache_specs()

    def source_specs(self) -> list[CacheSpec]:
        """What is kept of each token of a source."""
        return []

    def windows(self) -> list[int | None]:
        part = getattr(self, self.writer)
        if isinstance(part, Stack):
            return [attention.window for attention in part.config.each("attention")]
        return [None] * len(self.cache_specs())

    def cache(self, batch: int, layout: str = "contiguous", **options: Any) -> Cache:
        """An empty cache for `batch` rows. Options of the layout: contiguous `capacity`; ring `window`, `chunk`;
        paged `pages`, `page`."""
        if layout not in LAYOUTS:
            raise UsageError(f"cache layout {layout!r} is unknown; {nearest(layout, LAYOUTS)}")
        if layout == "ring" and "window" not in options:
            windows = self.windows()
            if None in windows:
                raise UsageError(
                    "a ring keeps only a window of tokens, and this model's attention sees all; use layout="
                    "'contiguous' or 'paged' (window=N would show the last N alone: other logits)"
                )
            options["window"] = max(w for w in windows if w is not None)
        weight, specs = next(self.parameters()), self.cache_specs()
        return LAYOUTS[layout](specs, batch, device=weight.device, dtype=weight.dtype, **options)

    def flops_per_token(self, context: int) -> int:
        """Multiply-adds count two: every weight once per token, and scores and values over `context` keys, of a source
        too; encoding is paid once a source token."""
        part, words = getattr(self, self.writer), getattr(self, self.words)
        return weight_flops(part) + pair_flops(part, context) + self.head_flops(self.head, words)

    @staticmethod
    def head_flops(head: nn.Module | None, embedding: nn.Module) -> int:
        """A tied head multiplies by the embedding; any other by its own weights."""
        if head is None:
            return 0
        tied = getattr(head.config, "tied", False)
        return weight_flops(head) + (2 * embedding.weight.numel() if tied else 0)  # type: ignore[operator]

    def explain(self) -> str:
        """Which parts are fast, which are not, and why."""
        if not self.parts:
            return "every part is plain"
        width = max(len(plain) for plain, _ in self.parts)
        rows = self.parts.items()
        return "\n".join(f"{n:4} x {plain:<{width}}  {fast}" for (plain, fast), n in rows)

    def summary(self, context: int | None = None) -> str:
        """Layers, parameters, cache bytes per token and FLOPs per token at `context` keys (default: the longest)."""
        context = context or getattr(self.config, "max_len", None) or 1024
        lines = [f"{'part':<12} {'layers':>6} {'parameters':>16}"]
        for name, part in self.named_children():
            layers = len(part.blocks) if isinstance(part, Stack) else ""
            lines.append(f"{name:<12} {layers:>6} {parameters(part):>16,}")
        lines.append(f"{'all':<12} {'':>6} {parameters(self):>16,}")
        if self.decodes:
            states = state_bytes(self)
            lines.append(f"cache per token      {cache_bytes(self):>14,} bytes")
            lines += [f"state per row        {states:>14,} bytes"] if states else []
        else:
            lines.append("cache per token                none (it does not decode step by step)")
        flops = self.flops_per_token(context)
        lines.append(f"FLOPs per token      {flops:>14,} at {context:,} keys")
        return "\n".join(lines)


# --- what a model costs, counted from its parts -------------------------------------------------------------------


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def weight_flops(module: nn.Module) -> int:
    """2 for each weight of a matrix that a token meets, once per layer; of the experts only the chosen ones."""
    # All names of a block that layers share, not the first alone.
    weights = module.named_parameters(remove_duplicate=False)
    matrices = sum(p.numel() for n, p in weights if p.dim() > 1 and not n.endswith("_bias"))
    parts = module.named_modules(remove_duplicate=False)
    for moe in (m for _, m in parts if isinstance(m, MixtureOfExperts)):
        experts = sum(w.numel() for w in (moe.gate, moe.up, moe.down))
        matrices -= experts * (moe.config.experts - moe.config.active) // moe.config.experts
    return 2 * matrices


def pair_flops(tower: nn.Module, context: int) -> int:
    """Of the scores and sums of every attention for one query over `context` keys (a window or top-k bounds them).
    A recurrent network may have one, or none."""
    blocks: Any = tower.blocks if isinstance(tower, Stack) else [tower]
    parts = (getattr(block, name, None) for block in blocks for name in ("attention", "cross"))
    return sum(part.flops(context) for part in parts if part is not None)


def cache_bytes(model: Any) -> int:
    """Bytes that one more token adds to the cache, all layers together."""
    size = next(model.parameters()).element_size()
    return size * sum(spec.numbers() for spec in model.cache_specs())


def state_bytes(model: Any) -> int:
    """Bytes of a row's states in the model's type, however long the row is."""
    shapes = [s for spec in model.cache_specs() for s in spec.state.values()]
    return next(model.parameters()).element_size() * sum(map(math.prod, shapes))


# --- input --------------------------------------------------------------------------------------------------------


def last_real(h: Tensor, lengths: Lengths) -> Tensor:
    """The state of each row's last real token: (b t m) -> (b m)."""
    if lengths is None:
        return h[:, -1]
    last = torch.as_tensor(lengths, device=h.device).clamp(min=1) - 1
    return h[torch.arange(len(h), device=h.device), last]


def positions(
    ids: Tensor, lengths: Lengths, max_len: int | None, cache: Cache | None = None
) -> Span:
    """Positions of the new tokens, after all that a user can get wrong about them was checked."""
    (b, t), size = ids.shape[:2], ids.shape[1]
    if b == 0 or t == 0:
        raise UsageError(f"empty batch: ids have shape {tuple(ids.shape)}; give at least one token")
    if lengths is not None:
        lengths = torch.as_tensor(lengths, device=ids.device)
        if lengths.shape != (b,) or bool((lengths < 0).any()) or bool((lengths > t).any()):
            given = lengths.tolist()
            raise UsageError(f"lengths must be {b} numbers between 0 and {t}, got {given}")
        if bool((lengths == t).all()):
            lengths = None
    if cache is not None:
        if cache.batch != b:
            made = f"the cache {cache.batch}; make it with model.cache({b})"
            raise UsageError(f"ids have {b} rows, {made}")
        if cache.even is not None and lengths is None:
            size = cache.even + t
        else:
            size = int((cache.lengths + (t if lengths is None else lengths)).max())
    if max_len is not None and size > max_len and not (cache is not None and cache.endless):
        raise UsageError(f"{size} tokens, but the model's context is {max_len}; shorten the input")
    if cache is not None:
        return cache.begin(t, lengths)
    return Span.run(0, t, ids.device) if lengths is None else Span.ragged(lengths, t)


def border(model: Any) -> int | None:
    """The longest text whose tokens are turned as a short one's: in a longer one LongRoPE turns all of them otherwise.
    None if there is none."""
    tower: Any = getattr(getattr(model, model.writer), "config", None)
    # Recurrent ones have none.
    each = tower.each("attention") if hasattr(tower, "each") else ()
    found = [getattr(a, "attention", a) for a in each]
    scalings = [rope.scaling for a in found if (rope := getattr(a, "rope", None)) is not None]
    long = (scaling.original_len for scaling in scalings if isinstance(scaling, LongRope))
    return min(long, default=None)


def check_ids(ids: Tensor, vocab: int, name: str = "ids") -> None:
    """Whole numbers (b t) inside the vocabulary."""
    if not isinstance(ids, Tensor):
        what = "a tensor of whole numbers (b, t) such as torch.tensor([[1, 2]])"
        raise UsageError(f"{name} must be {what}, got {type(ids).__name__}; generate takes text")
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        given = f"{ids.dtype} {tuple(ids.shape)}"
        raise UsageError(f"{name} must be whole numbers of shape (b, t), got {given}")
    # On a GPU the look-up itself checks; reading the result here would wait for it.
    if ids.numel() and not ids.is_cuda:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab:
            worst, most = low if low < 0 else high, vocab - 1
            raise UsageError(f"{name} must be between 0 and {most} (the vocabulary), got {worst}")


# --- an encoder's states, and the cache that keeps them -----------------------------------------------------------


def new_source(ids: Tensor, source: Tensor | None, cache: Cache | None) -> Tensor | None:
    """The source that is to be encoded now: that of the first call, and none with a cache that keeps it."""
    if cache is not None and cache.cross is not None:
        if source is not None:
            raise UsageError("this cache already holds a source; leave `source` out")
        return None
    if source is None:
        raise UsageError("an encoder-decoder needs its source: model(ids, source=source_ids)")
    if len(source) != len(ids):
        raise UsageError(f"source has {len(source)} rows, ids {len(ids)}; they must agree")
    return source


def cross_cache(cache: Cache, specs: list[CacheSpec], memory: Tensor, pos: Span) -> Cache:
    """A new memory's part of the cache, ready to be written once: in pages of the same pool, if it fits them."""
    b, s = memory.shape[:2]
    where: Any = {"device": cache.device, "dtype": cache.dtype or memory.dtype}
    cross: Cache
    if isinstance(cache, Paged) and alike(specs, cache.specs):
        cross = Paged(specs, b, pool=cache.pool, **where)
    else:
        cross = Contiguous(specs, b, capacity=s, **where)
    try:
        cross.begin(s, None if pos.start == 0 else (pos.index >= 0).sum(-1))
    except OutOfPages:
        # Without a source the text is not read either.
        cache.free()
        raise
    cache.cross = cross
    return cross
