"""The one attention: attend(q, k, v) = softmax(score(q, k) + bias) v, by whichever backend is asked for.

`reference` is the specification. `sdpa` and `flex` are torch's fused kernels, tested equal; `online` and `ordered`
have files of their own. Weights are not returned: a probe asks for the heads and rows it wants and gets them
exactly, while the fused kernel still computes the output.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UsageError, nearest
from regard.kernels.fused import by_document, fused, side_by_side
from regard.mask import Visible

Score = Callable[[Tensor, Tensor], Tensor]  # (b h t d), (b h s d) -> (b h t s)


class Probe(Protocol):
    """What `attend` shows to a probe: everything that decides the weights, heads first."""

    def see(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Visible | Tensor | None, terms: Terms
    ) -> None: ...


@dataclass(frozen=True)
class Terms:
    """How scores are made: scale * q.k (or `score`), capped softly, plus `bias` (b h t s); and the share of weights
    that training drops."""

    scale: float
    bias: Tensor | None = None
    score: Score | None = None
    softcap: float | None = None
    dropout: float = 0.0
    sinks: int = 0  # leading keys that are sinks: they take weight and stand for no token
    # (b h t 1) times the weights of each query: only probes read it, `attend` has multiplied
    times: Tensor | None = None
    # (h e c) turns values c wide into each head's own: only probes read it
    up: Tensor | None = None


# --- the reference ------------------------------------------------------------------------------------------------


def softmax(x: Tensor, visible: Tensor | None = None) -> Tensor:
    """exp(x - max) / sum exp(x - max) over the last axis, in float32 at least. A row that sees nothing gives zeros,
    and its gradient is zero too."""
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if visible is None:
        return torch.softmax(x, -1)
    some = visible.any(-1, keepdim=True)
    x = x.masked_fill(~visible, -torch.inf).masked_fill(~some, 0.0)
    return torch.softmax(x, -1) * some


def scores(q: Tensor, k: Tensor, terms: Terms) -> Tensor:
    """(b h t d), (b g s d) -> (b h t s), before the mask."""
    k = _spread(k, q.shape[1])
    s = q @ k.transpose(-1, -2) * terms.scale if terms.score is None else terms.score(q, k)
    return finish(s, terms)


def finish(s: Tensor, terms: Terms) -> Tensor:
    """Products (b h t s) become scores: capped softly, plus the bias."""
    if terms.softcap is not None:
        s = terms.softcap * torch.tanh(s / terms.softcap)
    return s if terms.bias is None else s + terms.bias


def weights(q: Tensor, k: Tensor, visible: Tensor | None, terms: Terms) -> Tensor:
    """The attention weights (b h t s): rows sum to 1 (to `times`), or are zero where nothing is visible."""
    a = softmax(scores(q, k, terms), visible)
    return a if terms.times is None else a * terms.times


def reference(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible | Tensor | None, terms: Terms
) -> Tensor:
    """softmax(q k^T * scale + bias) v, written out."""
    a = weights(q, k, _tensor(visible), terms)
    a = F.dropout(a, terms.dropout) if terms.dropout else a
    return a.to(v.dtype) @ _spread(v, q.shape[1])


# --- torch's fused kernels ----------------------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Visible | Tensor | None, terms: Terms) -> Tensor:
    """torch's scaled_dot_product_attention. Scores it cannot express go to `reference`."""
    if terms.score is not None or terms.softcap is not None:
        return reference(q, k, v, visible, terms)
    if isinstance(visible, Visible) and terms.bias is None and not terms.dropout:
        fits = visible.mask.rows == len(q) and side_by_side(q, v)
        if fits and (packed := visible.packed) is not None:
            return by_document(q, k, v, *packed, terms.scale)
    causal = terms.bias is None and isinstance(visible, Visible) and visible.causal
    seen = None if causal else _tensor(visible)
    some = None
    if seen is not None:
        some = seen.any(-1, keepdim=True)
        seen = seen | ~some  # in some kernels an empty row is 0/0 backward; it is zeroed below
    mask = seen
    if terms.bias is not None:
        mask = terms.bias.to(q.dtype)
        if seen is not None:
            mask = mask.masked_fill(~seen, -torch.inf)
    out = fused(q, k, v, mask, causal=causal, scale=terms.scale, dropout=terms.dropout)
    return out if some is None else out.masked_fill(~some, 0.0)


def flex(q: Tensor, k: Tensor, v: Tensor, visible: Visible | Tensor | None, terms: Terms) -> Tensor:
    """torch's flex_attention, with the mask as a rule on positions. torch has no backward for it on the CPU."""
    if terms.score is not None or terms.dropout:
        return reference(q, k, v, visible, terms)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if learns and not q.is_cuda:
        why = "flex attention has no backward on the CPU"
        raise UsageError(f"{why}; use backend sdpa, or torch.no_grad()")
    from torch.nn.attention.flex_attention import create_block_mask

    b, h, t, s = *q.shape[:3], k.shape[2]
    seen = _tensor(visible)
    blocks = None
    if isinstance(visible, Visible):
        blocks = None if visible.everything else visible.blocks(b)
    elif seen is not None:
        shown = seen.expand(b, h, t, s)
        see = lambda b, h, i, j: shown[b, h, i, j]  # noqa: E731
        blocks = create_block_mask(see, b, None, t, s, device=str(q.device))
    bias = None if terms.bias is None else terms.bias.expand(b, h, t, s)
    cap = terms.softcap

    def change(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = x if cap is None else cap * torch.tanh(x / cap)
        return x if bias is None else x + bias[b, h, i, j]

    out = _flex_kernel(q.is_cuda)(
        q, k, v, score_mod=change, block_mask=blocks, scale=terms.scale, enable_gqa=h != k.shape[1]
    )
    assert isinstance(out, Tensor)
    return out if seen is None else out.masked_fill(~seen.any(-1, keepdim=True), 0.0)


@functools.cache
def _flex_kernel(compiled: bool) -> Callable[..., Any]:
    """Compiled on a GPU; as it is on the CPU, where compiling costs half a minute."""
    from torch.nn.attention import flex_attention as module

    # Without its variant for short queries, which has no float32 form for grouped heads.
    if compiled:
        options = {"FORCE_USE_FLEX_ATTENTION": True}
        return torch.compile(functools.partial(module.flex_attention, kernel_options=options))
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return module.flex_attention


def _tensor(visible: Visible | Tensor | None) -> Tensor | None:
    if isinstance(visible, Visible):
        return None if visible.everything else visible.tensor()
    return visible


def _spread(x: Tensor, heads: int) -> Tensor:
    """(b g s d) -> (b h s d): query head i reads group i // (h / g)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "reference": reference,
    "sdpa": sdpa,
    "flex": flex,
}


def check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise UsageError(f"attention backend {name!r} is unknown; {nearest(name, BACKENDS)}")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Visible | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    times: Tensor | None = None,
    dropout: float = 0.0,
    probe: Probe | None = None,
    backend: str = "sdpa",
) -> Tensor:
    """softmax(score(q, k) + bias) v.   q (b t h d), k (b s g d), v (b s g e) -> (b t h e); g divides h.

    `mask` is a bool tensor (b 1 t s), True = may be seen, or a rule bound to positions (`Visible`). Without `score` it
    is q.k * scale, scale = 1/sqrt(d). `bias` (b h t s) is added after scaling. `sinks` (h) are logits of a key that
    takes weight and gives nothing. `times` (b h t 1) multiplies the weights of each query."""
    check_backend(backend)
    if q.shape[2] % k.shape[2]:
        raise UsageError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads evenly")
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise UsageError(f"mask is {mask.dtype}; give bool (True = may be seen), or use bias=")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    terms = Terms(scale, bias, score, softcap, dropout)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if sinks is not None:
        k, v, mask, terms = _with_sink(q, k, v, mask, terms, sinks)
    if probe is not None:
        probe.see(q, k, v, mask, replace(terms, times=times))
    out = BACKENDS[backend](q, k, v, mask, terms)
    return (out if times is None else (out * times).to(out.dtype)).transpose(1, 2)


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible | Tensor | None, terms: Terms, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Terms]:
    """A sink is one more key in front, of zeros: its score is the sink's logit, its value zero, every row sees it."""
    h, t, s = *q.shape[1:3], k.shape[2]
    k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))
    seen = _tensor(visible)
    seen = torch.ones(1, 1, t, s, dtype=torch.bool, device=q.device) if seen is None else seen
    bias = q.new_zeros(1, h, t, s) if terms.bias is None else terms.bias
    column = sinks.to(bias.dtype)[None, :, None, None].expand(len(bias), h, t, 1)
    if terms.score is not None:
        # Another score than the product may give a key of zeros a number of its own.
        column = column - scores(q, k[:, :, :1], replace(terms, bias=None))
        bias = bias.expand(len(column), -1, -1, -1)
    terms = replace(terms, bias=torch.cat([column, bias], -1), sinks=1)
    return k, v, F.pad(seen, (1, 0), value=True), terms
