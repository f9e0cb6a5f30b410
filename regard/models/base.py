"""What every model can do besides its forward: check its input, make its cache, sum itself up, save itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.cache import LAYOUTS, Cache, CacheSpec
from regard.errors import UsageError, nearest
from regard.mask import Span
from regard.models.summary import table, weight_flops

WRITER = "regard.checkpoint"


class Model(nn.Module):
    """Base of all models. `origin` is what a checkpoint folder said that the model does not compute with (its
    architecture's name, token ids, files to carry along); saving writes it back."""

    # Whether an encoder reads a source, which `encode` gives the states of.
    reads_source: ClassVar[bool] = False
    # The towers of blocks, each with the embedding that it reads; cells have none.
    towers: ClassVar[dict[str, str]] = {}
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

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the head reads, (b t m)."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """What the head gives for hidden states: (... V)."""
        raise NotImplementedError

    def next_logits(
        self, ids: Tensor, lengths: Tensor | list[int] | None = None, **rest: Any
    ) -> Tensor:
        """Logits (b V) after the last real token of each row: all that decoding needs of a prompt."""
        h = self.hidden(ids, lengths, **rest)
        if lengths is None:
            return self.logits(h[:, -1])
        last = torch.as_tensor(lengths, device=h.device).clamp(min=1) - 1
        return self.logits(h[torch.arange(len(h), device=h.device), last])

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
        raise UsageError(
            f"{type(self.config).__name__} does not decode step by step: it has no cache"
        )

    def windows(self) -> list[int | None]:
        return [None] * len(self.cache_specs())

    def cache(self, batch: int, layout: str = "contiguous", **options: Any) -> Cache:
        """An empty cache for `batch` rows. Options of the layout: contiguous `capacity`; ring `window`, `chunk`;
        paged `pages`, `page`."""
        if layout not in LAYOUTS:
            raise UsageError(f"cache layout {layout!r} is unknown; {nearest(layout, LAYOUTS)}")
        weight = next(self.parameters())
        if layout == "ring" and "window" not in options:
            windows = self.windows()
            if None in windows:
                raise UsageError(
                    "a ring keeps only a window of tokens, and this model's attention sees all of "
                    "them; use layout='contiguous' or 'paged' (window=N would let every token see "
                    "the last N alone: other logits than the model's)"
                )
            options["window"] = max(w for w in windows if w is not None)
        return LAYOUTS[layout](
            self.cache_specs(), batch, device=weight.device, dtype=weight.dtype, **options
        )

    def flops_per_token(self, context: int) -> int:
        """Multiply-adds count two: every weight once a token, and scores and values over `context` keys."""
        raise NotImplementedError

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
        """Layers, parameters, cache bytes per token and FLOPs per token, as a table."""
        return table(self, context)


def positions(
    ids: Tensor, lengths: Tensor | list[int] | None, max_len: int | None, cache: Cache | None = None
) -> Span:
    """Positions of the new tokens, after all that a user can get wrong about them was checked."""
    b, t = ids.shape[:2]
    if b == 0 or t == 0:
        raise UsageError(
            f"empty batch: ids have shape {tuple(ids.shape)}; give at least one row and one token"
        )
    if lengths is not None:
        lengths = torch.as_tensor(lengths, device=ids.device)
        if lengths.shape != (b,) or bool((lengths < 0).any()) or bool((lengths > t).any()):
            raise UsageError(
                f"lengths must be {b} numbers between 0 and {t}, got {lengths.tolist()}"
            )
        if bool((lengths == t).all()):
            lengths = None
    if cache is not None and cache.batch != b:
        raise UsageError(
            f"ids have {b} rows, the cache {cache.batch}; make it with model.cache({b})"
        )
    size = t
    if cache is not None and cache.even is not None and lengths is None:
        size = cache.even + t
    elif cache is not None:
        size = int((cache.lengths + (t if lengths is None else lengths)).max())
    if max_len is not None and size > max_len:
        raise UsageError(f"{size} tokens, but the model's context is {max_len}; shorten the input")
    if cache is not None:
        return cache.begin(t, lengths)
    return Span.run(0, t, ids.device) if lengths is None else Span.ragged(lengths, t)


def check_ids(ids: Tensor, vocab: int, name: str = "ids") -> None:
    """Whole numbers (b t) inside the vocabulary."""
    if not isinstance(ids, Tensor):
        raise UsageError(
            f"{name} must be a tensor of whole numbers of shape (b, t), got {type(ids).__name__}; "
            f"such as torch.tensor([[1, 2]]); regard.generate takes text and lists"
        )
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise UsageError(
            f"{name} must be whole numbers of shape (b, t), got {ids.dtype} {tuple(ids.shape)}"
        )
    # On a GPU the look-up itself checks; reading the result here would wait for it.
    if ids.numel() and not ids.is_cuda:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab:
            raise UsageError(
                f"{name} must be between 0 and {vocab - 1} (the vocabulary), got {low if low < 0 else high}"
            )


def check_source(ids: Tensor, source: Tensor | None, cache: Cache | None) -> bool:
    """Whether a source is to be encoded now: on the first call, and never again with a cache that keeps it."""
    if cache is not None and cache.cross is not None:
        if source is not None:
            raise UsageError(
                "this cache already holds a source; leave `source` out, or make a new cache"
            )
        return False
    if source is None:
        raise UsageError("an encoder-decoder needs its source: model(ids, source=source_ids)")
    if len(source) != len(ids):
        raise UsageError(f"source has {len(source)} rows, ids {len(ids)}; they must agree")
    return True
