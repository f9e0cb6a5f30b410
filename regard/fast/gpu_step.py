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

from regard.kernels.triton import attention as gpu_attention
from regard.kernels.triton import latent as gpu_latent
from regard.kernels.triton import linear as gpu_linear
from regard.kernels.triton import prompt as gpu_prompt
from regard.kernels.triton.linear import ACTIVATIONS, linear, reference
from regard.kernels.triton.prompt import Pack
from regard.kernels.triton.wide import add_norm, gated, product, summed

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

    def settle(self, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream x + more, and what this layer reads of it."""
        if self.norm is not None and self.norm.bias is None:
            return add_norm(x, more, self.norm.weight, self.norm.eps, self.fast)
        x = summed(x, more)
        return x, x if self.norm is None else self.norm(x)

    def wide(self, x: Tensor, split: bool = False) -> Tensor:
        """act(x W^T + b) of many rows that `settle` gave; with `split` perhaps in parts (s m n)."""
        if self.gated:
            return gated(x, self.weight, self.bias, self.act, self.fast)
        return ACTIVATIONS[self.act](product(x, self.weight, self.bias, self.fast, split))


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
    """A block: attention, then its MLP. Subclasses attend, from the product of their first matrix."""

    def __init__(
        self,
        first: Linear,
        up: Linear,
        down: Linear,
        out: Linear,
        scale: float,
        window: int | None,
    ):
        self.first, self.up, self.down, self.out = first, up, down, out
        self.scale, self.window = scale, window
        self.angles: Angles | None = None

    def step(
        self, x: Tensor, more: Tensor | None, pos: Tensor, bound: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """x + more (b m) at positions (b), and as such back: a sum is left to the norm that reads it. The mask
        (b 1 1 bound) is for layers that are not `fast`."""
        if self.up.fast and len(x) > gpu_linear.MOST:
            x, y = self.first.settle(x, more)
            qkv = self.first.wide(y, split=self.parted)
            return self.tail(x, self.attention(qkv, pos, bound, mask))
        x = self.out(self.attention(self.first(x), pos, bound, mask), x)
        return self.down(self.up(x), x), None

    def prompt(self, x: Tensor, more: Tensor | None, pack: Pack) -> tuple[Tensor, Tensor]:
        """The same for prompts laid end to end (t m); fills the cache."""
        x, y = self.first.settle(x, more)
        return self.tail(x, self.read(self.first.wide(y), pack))

    def tail(self, x: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
        """What comes after attention, for many rows."""
        x, y = self.up.settle(x, self.out.wide(o, split=True))
        return x, self.down.wide(self.up.wide(y), split=True)

    @property
    def fast(self) -> bool:
        """Whether attention needs no mask, because a kernel does it."""
        raise NotImplementedError

    @property
    def parted(self) -> bool:
        """Whether attention adds up parts of the first product itself."""
        return False

    def clear(self, rows: Tensor) -> None:
        """Zeros for what an earlier request left in these rows of the cache: a mask weighs it with 0, and 0 * NaN is
        NaN. A kernel does not read it."""
        for cache in self.caches:
            cache.index_fill_(0, rows, 0)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def attention(self, x: Tensor, pos: Tensor, bound: int, mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def read(self, x: Tensor, pack: Pack) -> Tensor:
        """Attention among each prompt's own tokens, their entries stored."""
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
        super().__init__(qkv, *rest)
        self.h, self.angles, self.interleaved = heads, angles, interleaved
        self.norms = norms
        self.k, self.v = cache
        self.g, self.d, self.e = self.k.shape[2], self.k.shape[3], self.v.shape[3]
        whole = angles is None or 2 * angles[0].shape[-1] == self.d
        self.plain_rope = norms is None and (angles is None or (whole and not interleaved))

    @property
    def fast(self) -> bool:
        same = self.d == self.e
        return self.first.fast and same and gpu_attention.suits(self.h, self.g, self.d, self.k)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        return self.k, self.v

    @property
    def parted(self) -> bool:
        return self.fast and self.plain_rope

    def attention(self, qkv: Tensor, pos: Tensor, bound: int, mask: Tensor | None) -> Tensor:
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
            row = torch.arange(len(q), device=q.device)
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

    def read(self, qkv: Tensor, pack: Pack) -> Tensor:
        if self.fast and self.plain_rope:
            laid = gpu_prompt.lay_qkv(qkv, pack, self.k, self.v, self.h, self.angles)
        else:
            q, k, v = self.turned(qkv, pack.pos)
            self.k[pack.row, pack.pos], self.v[pack.row, pack.pos] = k, v
            laid = gpu_prompt.lay(pack, q, k, v)
        return gpu_prompt.attend(laid, pack, self.scale, self.window)


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
        super().__init__(first, *rest)
        self.second, self.latent_norm, self.cache = second, latent_norm, cache
        self.w_uk, self.w_uv = up
        self.h, self.d, self.c = self.w_uk.shape
        self.r = cache.shape[-1] - self.c
        self.angles, self.interleaved = angles, interleaved

    @property
    def fast(self) -> bool:
        fits = self.window is None and gpu_latent.suits(self.c, self.r, self.cache)
        return self.first.fast and fits

    @property
    def caches(self) -> tuple[Tensor, ...]:
        return (self.cache,)

    def queries(self, both: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each token the heads' (b h d) and turned (b h r) features, its latent (b c) and its rotary key (b r)."""
        q, latent, key = both.split([both.shape[-1] - self.c - self.r, self.c, self.r], -1)
        if self.second is not None:
            q = self.second(q.contiguous())
        latent = latent if self.latent_norm is None else self.latent_norm(latent)
        nope, rope = q.unflatten(-1, (self.h, -1)).split([self.d, self.r], -1)
        if self.angles is not None:
            rope = rotate(rope, self.angles, pos, self.interleaved)
            key = rotate(key[:, None], self.angles, pos, self.interleaved)[:, 0]
        return nope, rope, latent, key

    def attention(self, both: Tensor, pos: Tensor, bound: int, mask: Tensor | None) -> Tensor:
        nope, rope, latent, key = self.queries(both, pos)
        q = torch.cat([torch.einsum("bhd,hdc->bhc", nope, self.w_uk), rope], -1)
        entry = torch.cat([latent, key], -1)
        if self.fast:
            o = gpu_latent.decode(
                q, entry, self.cache, pos, latent=self.c, scale=self.scale, bound=bound
            )
        else:
            self.cache[torch.arange(len(q), device=q.device), pos] = entry
            kept = self.cache[:, :bound, None]
            o = attend(q, kept, kept[..., : self.c], self.seen(mask, pos), self.scale)
        return torch.einsum("bhc,hec->bhe", o, self.w_uv).flatten(1)

    def read(self, both: Tensor, pack: Pack) -> Tensor:
        """Heads of their own, from the latents: cheaper than to attend c wide."""
        nope, rope, latent, key = self.queries(both, pack.pos)
        self.cache[pack.row, pack.pos] = torch.cat([latent, key], -1)
        k = torch.einsum("tc,hdc->thd", latent, self.w_uk)
        k = torch.cat([k, key[:, None].expand(-1, self.h, -1)], -1)
        v = torch.einsum("tc,hec->the", latent, self.w_uv)
        laid = gpu_prompt.lay(pack, torch.cat([nope, rope], -1), k, v)
        return gpu_prompt.attend(laid, pack, self.scale, self.window)
