"""What a decoding step does to each row besides products, on the CPU: attention of one new token over the cache,
the rotation and caching of keys and values, norms, the choice among logits.

    python bench/rows.py        times each against its torch form

Each has a plain torch form, which says what it computes, and a C form; the C form is taken for float32
rows on the CPU (a cache may be bf16) where `native.library` has one and nothing asks for a gradient. Arguments go to C
as one packed struct: ctypes takes seven times as long over them one by one.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from struct import Struct

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.c.native import library
from regard.kernels.c.tape import RECORDING, kept

HALF = {torch.float32: 0, torch.bfloat16: 1}  # what a cache may hold
ATTEND, UPDATE, NORM, CHOOSE = Struct("29qd"), Struct("27q"), Struct("7qd"), Struct("10q")
# The settings that `draw` reads, as C has them.
DRAWN_BY = {
    "mask": torch.int32,
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
}
DRAWN_BY |= {
    "min_p": torch.float32,
    "seed": torch.int64,
    "key": torch.int64,
}
DRAW = Struct("13q")
CALLS: dict[str, Callable[[bytes], int]] = {}


def call_of(name: str) -> Callable[[bytes], int] | None:
    """The C function `name`, of one packed struct; None without native code."""
    if name not in CALLS:
        found = library()
        if found is None:
            return None
        function = getattr(found, name)
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
        CALLS[name] = function
    tape = RECORDING.get()
    return CALLS[name] if tape is None else tape.recorded(name, CALLS[name])


def _readable(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether C can read x: on the CPU, the last axis without gaps."""
    return x.is_cpu and x.dtype is dtype and x.stride(-1) == 1


def learns(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, *, scale: float, place: Tensor | None = None, page: int = 0,
    share: int = 1, window: int | None = None, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """o_ij = sum over p of softmax_p(scale q_ij . k_p + bias_ijp) v_p, for one new token a row.

    q (r h d), k (R S g d), v (R S g e), pos (r) int64, bias (1 or r, h, > pos) -> (r h e) float32. Row i sees the slots
    p with pos - window < p <= pos (none at -1: zeros). They lie in row i // share of k and v, or, with n = i // share,
    in the rows place[n, p], place (r / share, S) int32; in pages of `page` slots, at p % page of the row
    place[n, p // page]. Query head j reads head j // (h / g); a group's query heads read a key together.
    """
    call, half = call_of("attend_one"), HALF.get(k.dtype)
    by_q, by_k, by_v = q.stride(), k.stride(), v.stride()
    r, h, d = q.shape
    if (
        call is None
        or half is None
        or not (q.is_cpu and q.dtype is torch.float32 and v.dtype is k.dtype)
        or not (by_q[2] == by_k[3] == by_v[3] == 1)
        or not (_readable(pos, torch.int64) and pos.shape[0] == r)
        or not (place is None or (_readable(place, torch.int32) and len(place) * share == r))
        or not (bias is None or (_readable(bias) and bias.shape[0] in (1, r)))
        or learns(q, k, v)
    ):
        return plain_attend_one(
            q, k, v, pos, scale=scale, place=place, page=page, share=share, window=window, bias=bias
        )
    stored, slots, g, _ = k.shape
    e = v.shape[3]
    out = kept(q.new_empty((r, h, e)))
    extra, places = (0, 0, 0), (0, 0)
    if place is not None:
        slots = place.shape[1] * page if page else min(slots, place.shape[1])
        places = (place.data_ptr(), place.stride(0))
    if bias is not None:
        slots = min(slots, bias.shape[2])
        extra = (bias.data_ptr(), bias.stride(0) if len(bias) > 1 else 0, bias.stride(1))
    sizes = (r, h, g, d, e, half, stored, slots, share, slots if window is None else window, page)
    queries, pointers = (q.data_ptr(), *by_q[:2]), (pos.data_ptr(), *places, *extra)
    keys, values = (k.data_ptr(), *by_k[:3]), (v.data_ptr(), *by_v[:3])
    outside = call(ATTEND.pack(*sizes, *queries, *keys, *values, *pointers, out.data_ptr(), scale))
    if outside:
        raise IndexError("attend_one: a position or a place lies outside of the cache")
    return out


def plain_attend_one(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, *, scale: float, place: Tensor | None = None, page: int = 0,
    share: int = 1, window: int | None = None, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """What `attend_one` computes."""
    (r, h, _), s = q.shape, max(pos.tolist(), default=-1) + 1
    slot = torch.arange(s, device=q.device)
    seen = slot <= pos[:, None]  # r s
    if window is not None:
        seen = seen & (slot > pos[:, None] - window)
    own = torch.arange(r, device=q.device)[:, None] // share
    where = slot // page if page else slot
    row = torch.where(seen, own if place is None else place[own, where].long(), 0)
    group = torch.arange(h, device=q.device) // (h // k.shape[2])
    within = slot % page if page else slot
    k, v = (x[row, within][:, :, group].float() for x in (k, v))  # r s h d
    scores = torch.einsum("rhd,rshd->rhs", q.float(), k) * scale
    if bias is not None:
        scores = scores + bias[..., :s]
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
    return torch.einsum("rhs,rshe->rhe", weights, v.masked_fill(~seen[..., None, None], 0))


def update_cache(
    qkv: Tensor, heads: int, groups: int, width: int, value_width: int, cos: Tensor | None, sin: Tensor | None,
    layout: str, k_store: Tensor, v_store: Tensor, pos: Tensor, place: Tensor | None = None, page: int = 0
) -> None:  # fmt: skip
    """Turns q and k of qkv (r, (h + g) d + g e) where they are, as `position.rotate` does by `Rope.angles` cos and sin
    (r or 1, 1, 1, n), and writes k to k_store[i, pos_i] (R S g d), v to v_store (R S g e); nothing where pos_i is -1.
    In pages of `page` slots it is the row place[i, pos_i // page] of the stores, slot pos_i % page; place (r n) int32.

    n = cos.shape[-1] pairs of each head turn, none without cos; `layout` is "half" or "interleaved"."""
    call, r = call_of("update_cache"), qkv.shape[0]
    half = HALF.get(k_store.dtype)
    if (
        call is None
        or half is None
        or not (_readable(qkv) and _readable(pos, torch.int64) and pos.shape[0] == r)
        or not (place is None or (_readable(place, torch.int32) and len(place) == r))
        or not (_readable(k_store, k_store.dtype) and _readable(v_store, k_store.dtype))
        or not (cos is None or (_readable(cos) and cos.is_contiguous()))
        or not (sin is None or (_readable(sin) and sin.is_contiguous()))
    ):
        where: tuple = (k_store, v_store, pos, place, page)
        return plain_update_cache(qkv, heads, groups, width, value_width, cos, sin, layout, *where)
    angles = (0, 0, 0, 0)
    if cos is not None and sin is not None:
        n = cos.shape[-1]
        angles = (n, cos.data_ptr(), sin.data_ptr(), n if cos.numel() > n else 0)
    sizes = (r, heads, groups, width, value_width, layout == "interleaved", half)
    stored, slots = k_store.shape[:2]
    places = (pos.data_ptr(), 0, 0, 0)
    if place is not None:
        slots = place.shape[1] * page
        places = (pos.data_ptr(), place.data_ptr(), place.stride(0), page)
    given = (stored, slots, *angles, qkv.data_ptr(), qkv.stride(0))
    stores = [n for x in (k_store, v_store) for n in (x.data_ptr(), *x.stride()[:3])]
    if call(UPDATE.pack(*sizes, *given, *stores, *places)):
        raise IndexError("update_cache: a position lies outside of the cache")
    return None


def plain_update_cache(
    qkv: Tensor, heads: int, groups: int, width: int, value_width: int, cos: Tensor | None, sin: Tensor | None,
    layout: str, k_store: Tensor, v_store: Tensor, pos: Tensor, place: Tensor | None = None, page: int = 0
) -> None:  # fmt: skip
    """What `update_cache` does."""
    qk, v = qkv.split(((heads + groups) * width, groups * value_width), -1)
    qk = qk.unflatten(-1, (heads + groups, width))  # r (h + g) d
    if cos is not None and sin is not None:
        n = cos.shape[-1]
        cos, sin = cos.reshape(-1, 1, n), sin.reshape(-1, 1, n)
        pair = (slice(n), slice(n, 2 * n))
        if layout == "interleaved":
            pair = (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
        a, b = (qk[..., x] for x in pair)
        c, d = a * cos - b * sin, b * cos + a * sin
        a.copy_(c)
        b.copy_(d)
    row = (pos >= 0).nonzero()[:, 0]
    at, slot = row, pos[row]
    if place is not None:
        at, slot = place[row, slot // page].long(), slot % page
    k_store[at, slot] = qk[row, heads:].to(k_store.dtype)
    v_store[at, slot] = v[row].unflatten(-1, (groups, value_width)).to(v_store.dtype)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """x (... m) over its last axis, statistics in float32. "layer": (x - mean) / sqrt(var + eps) * weight + bias;
    "rms": x / sqrt(mean(x^2) + eps) * weight."""
    call = call_of("norm")
    if (
        call is None
        or not (x.is_cpu and x.dtype is weight.dtype is torch.float32 and x.is_contiguous())
        or not (bias is None or bias.dtype is torch.float32)
        or learns(x, weight)
    ):
        return plain_norm(x, weight, bias, eps, kind)
    m = x.shape[-1]
    out = kept(torch.empty_like(x))
    given = 0 if bias is None else bias.data_ptr()
    pointers = (x.data_ptr(), weight.data_ptr(), given, out.data_ptr())
    call(NORM.pack(x.numel() // m, m, kind == "rms", *pointers, eps))
    return out


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """What `norm` computes."""
    if kind == "rms":
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def lse_and_topk(
    logits: Tensor, k: int, banned: Sequence[int] = (), left: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """log sum exp of each row of logits (r V), and its k largest with their ids, largest first and of equals the
    smaller id, without the banned ids: (r), (r k), (r k). `left`: the sum too is of what bans leave.

    A row with NaN has the norm NaN and some k ids."""
    r, vocab = logits.shape
    assert 0 < k <= vocab - len(banned), f"{k} of {vocab} logits, {len(banned)} of them banned"
    if left and banned:
        logits = logits.index_fill(1, torch.tensor(banned, device=logits.device), -torch.inf)
    call = call_of("choose")
    if call is None or not _readable(logits) or learns(logits):
        return plain_lse_and_topk(logits, k, banned)
    lse, values = logits.new_empty(r), logits.new_empty(r, k)
    ids = torch.empty(r, k, dtype=torch.int64)
    bans = array("q", banned)
    given = (logits.stride(0), logits.data_ptr(), bans.buffer_info()[0])
    found = (lse.data_ptr(), values.data_ptr(), ids.data_ptr())
    call(CHOOSE.pack(r, vocab, k, len(bans), *given, *found))
    return lse, values, ids


def plain_lse_and_topk(
    logits: Tensor, k: int, banned: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """What `lse_and_topk` computes. A stable sort keeps equals in order; top-k is faster where there are none."""
    scores, free = logits, torch.arange(logits.shape[1], device=logits.device)
    if banned:
        free = free[~torch.isin(free, torch.tensor(banned, device=logits.device))]
        scores = logits[:, free]
    values, order = scores.topk(min(k + 1, len(free)))
    if bool((values[:, 1:] == values[:, :-1]).any()):
        values, order = scores.sort(dim=-1, descending=True, stable=True)
    return logits.logsumexp(-1), values[:, :k], free[order[:, :k]]


def draw(logits: Tensor, columns: dict[str, Tensor], count: Tensor) -> Tensor | None:
    """The next token (n) from logits (n V) by columns (n 1), the largest without them, among those that columns["mask"]
    (n, V / 32) allows: -1 where none is left. None where C cannot; decode/sampling.py has the plain form."""
    call = call_of("draw")
    if call is None or not (_readable(logits) and _readable(count, torch.int64)):
        return None
    given = [columns.get(name) for name in DRAWN_BY]
    each = [None if x is None else x.to(t).contiguous() for x, t in zip(given, DRAWN_BY.values())]
    tokens = torch.empty(len(logits), dtype=torch.int64)
    sizes = (*logits.shape, logits.stride(0), logits.data_ptr())
    pointers = [0 if x is None else x.data_ptr() for x in (*each, count, tokens)]
    return None if call(DRAW.pack(*sizes, *pointers)) else tokens
