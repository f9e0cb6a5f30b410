"""One token a row through one block over a static cache: the step that a CUDA graph holds, from plain tensors.

Matrices that read the same input are one matrix here (q|k|v, gate|up, and MLA's two down-projections). Where
`fast` is off, or off the GPU, everything is torch; gpu_model.py takes the tensors out of a model, and
test_graphs_give_the_engine_tokens holds both against the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import gpu_attention, gpu_latent
from regard.kernels.gpu_linear import linear, reference

Angles = tuple[Tensor, Tensor]  # cos and sin for every position, (s r/2) each


@dataclass
class Norm:
    """RMS norm, or LayerNorm where there is a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass
class Linear:
    """act(norm(x) W^T + b) + residual. `fast` is whether kernels may be used."""

    weight: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    act: str = ""
    gated: bool = False
    fast: bool = True

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        form = linear if self.fast else reference
        norm = None
        if self.norm is not None and self.norm.bias is None:
            norm = (self.norm.weight, self.norm.eps)
        elif self.norm is not None:
            x = self.norm(x)
        return form(
            x,
            self.weight,
            self.bias,
            norm=norm,
            act=self.act,
            gated=self.gated,
            residual=residual,
        )


def rotate(x: Tensor, angles: Angles, pos: Tensor, interleaved: bool) -> Tensor:
    """RoPE at positions (b): x (b n d), the first features of each head turn, the rest stay."""
    cos, sin = angles[0][pos][:, None], angles[1][pos][:, None]
    r = 2 * cos.shape[-1]
    if interleaved:
        a, b = x[..., 0:r:2], x[..., 1:r:2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = x[..., : r // 2], x[..., r // 2 : r]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return turned if r == x.shape[-1] else torch.cat([turned, x[..., r:]], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q (b h d) over k (b s g d), v (b s g e) where mask (b 1 1 s): (b h e). A group's heads stand side by side as
    queries of one head, so that no key is copied."""
    b, g = len(q), k.shape[2]
    o = F.scaled_dot_product_attention(
        q.view(b, g, -1, q.shape[-1]), k.transpose(1, 2), v.transpose(1, 2), mask, scale=scale
    )
    return o.reshape(b, q.shape[1], -1)


class Layer:
    """A block: attention, then its MLP. Subclasses attend."""

    def __init__(self, up: Linear, down: Linear, out: Linear, scale: float, window: int | None):
        self.up, self.down, self.out, self.scale, self.window = up, down, out, scale, window
        self.angles: Angles | None = None

    def step(self, x: Tensor, pos: Tensor, bound: int, mask: Tensor | None) -> Tensor:
        """x (b m) at positions (b); the mask (b 1 1 bound) is for layers that are not `fast`."""
        x = self.out(self.attention(x, pos, bound, mask), x)
        return self.down(self.up(x), x)

    @property
    def fast(self) -> bool:
        """Whether attention needs no mask, because a kernel does it."""
        raise NotImplementedError

    def attention(self, x: Tensor, pos: Tensor, bound: int, mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def fill(self, rows: Tensor, entries: dict[str, Tensor]) -> None:
        """Prompts' entries (n t ...) into rows (n) of the cache."""
        raise NotImplementedError

    def seen(self, mask: Tensor | None, pos: Tensor) -> Tensor:
        assert mask is not None
        if self.window is None:
            return mask
        at = torch.arange(mask.shape[-1], device=mask.device)
        return mask & (at > pos[:, None] - self.window)[:, None, None]


class Gqa(Layer):
    """Grouped-query attention; the cache is k (b s g d) and v (b s g e)."""

    def __init__(
        self,
        qkv: Linear,
        cache: tuple[Tensor, Tensor],
        heads: int,
        angles: Angles | None,
        *,
        interleaved: bool,
        norms: tuple[Norm, Norm] | None,
        rest: tuple[Linear, Linear, Linear, float, int | None],
    ):
        super().__init__(*rest)
        self.qkv, self.h, self.angles, self.interleaved = qkv, heads, angles, interleaved
        self.norms = norms
        self.k, self.v = cache
        self.g, self.d, self.e = self.k.shape[2], self.k.shape[3], self.v.shape[3]
        whole = angles is None or 2 * angles[0].shape[-1] == self.d
        self.plain_rope = norms is None and (angles is None or (whole and not interleaved))

    @property
    def fast(self) -> bool:
        same = self.d == self.e
        return self.qkv.fast and same and gpu_attention.suits(self.h, self.g, self.d, self.k)

    def attention(self, x: Tensor, pos: Tensor, bound: int, mask: Tensor | None) -> Tensor:
        qkv = self.qkv(x)
        angles = self.angles
        if not (self.fast and self.plain_rope):
            q, k, v = self.turned(qkv, pos)
            if self.fast:
                qkv, angles = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1), None
        if self.fast:
            o = gpu_attention.decode(
                qkv,
                self.k,
                self.v,
                pos,
                heads=self.h,
                scale=self.scale,
                angles=angles,
                window=self.window,
                bound=bound,
            )
        else:
            row = torch.arange(len(x), device=x.device)
            self.k[row, pos], self.v[row, pos] = k, v
            seen = self.seen(mask, pos)
            o = attend(q, self.k[:, :bound], self.v[:, :bound], seen, self.scale)
        return o.flatten(1)

    def turned(self, qkv: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (b h d), k (b g d), v (b g e), normed and turned."""
        h, g, d = self.h, self.g, self.d
        q, k, v = qkv.split([h * d, g * d, g * self.e], -1)
        q, k, v = q.unflatten(-1, (h, d)), k.unflatten(-1, (g, d)), v.unflatten(-1, (g, -1))
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.angles is not None:
            q = rotate(q, self.angles, pos, self.interleaved)
            k = rotate(k, self.angles, pos, self.interleaved)
        return q.contiguous(), k, v

    def fill(self, rows: Tensor, entries: dict[str, Tensor]) -> None:
        size = min(entries["k"].shape[1], self.k.shape[1])
        self.k[rows, :size], self.v[rows, :size] = entries["k"][:, :size], entries["v"][:, :size]


class Latent(Layer):
    """MLA, absorbed: queries meet the latents themselves; the cache is [latent | rotary key], (b s c+r)."""

    def __init__(
        self,
        first: Linear,
        second: Linear | None,
        latent_norm: Norm | None,
        up: tuple[Tensor, Tensor],
        cache: Tensor,
        angles: Angles | None,
        *,
        interleaved: bool,
        rest: tuple[Linear, Linear, Linear, float, int | None],
    ):
        """`first` gives [queries, or their latent | latent | rotary key], `second` queries from their latent; `up` is
        W_UK (h d c) and W_UV (h e c)."""
        super().__init__(*rest)
        self.first, self.second, self.latent_norm, self.cache = first, second, latent_norm, cache
        self.w_uk, self.w_uv = up
        self.h, self.d, self.c = self.w_uk.shape
        self.r = cache.shape[-1] - self.c
        self.angles, self.interleaved = angles, interleaved

    @property
    def fast(self) -> bool:
        fits = self.window is None and gpu_latent.suits(self.c, self.r, self.cache)
        return self.first.fast and fits

    def attention(self, x: Tensor, pos: Tensor, bound: int, mask: Tensor | None) -> Tensor:
        both = self.first(x)
        q, latent, key = both.split([both.shape[-1] - self.c - self.r, self.c, self.r], -1)
        if self.second is not None:
            q = self.second(q.contiguous())
        latent = latent if self.latent_norm is None else self.latent_norm(latent)
        nope, rope = q.unflatten(-1, (self.h, -1)).split([self.d, self.r], -1)
        if self.angles is not None:
            rope = rotate(rope, self.angles, pos, self.interleaved)
            key = rotate(key[:, None], self.angles, pos, self.interleaved)[:, 0]
        q = torch.cat([torch.einsum("bhd,hdc->bhc", nope, self.w_uk), rope], -1)
        entry = torch.cat([latent, key], -1)
        if self.fast:
            o = gpu_latent.decode(
                q, entry, self.cache, pos, latent=self.c, scale=self.scale, bound=bound
            )
        else:
            self.cache[torch.arange(len(x), device=x.device), pos] = entry
            kept = self.cache[:, :bound, None]
            o = attend(q, kept, kept[..., : self.c], self.seen(mask, pos), self.scale)
        return torch.einsum("bhc,hec->bhe", o, self.w_uv).flatten(1)

    def fill(self, rows: Tensor, entries: dict[str, Tensor]) -> None:
        size = min(entries["latent"].shape[1], self.cache.shape[1])
        both = [entries[n][:, :size] for n in ("latent", "k_rope") if n in entries]
        self.cache[rows, :size] = torch.cat(both, -1)
