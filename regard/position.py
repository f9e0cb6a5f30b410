"""Where a token stands: sinusoidal and learned vectors (added to embeddings), RoPE (turns queries and keys),
T5 buckets and ALiBi (added to scores). Everything takes positions as an argument, so caches need nothing special.

Three open tables by `kind`: POSITIONS of what is added to embeddings, SCALINGS of RoPE for long texts, RELATIVE of
what is added to scores.
"""

from __future__ import annotations

import math
from typing import Annotated, Protocol

import torch
from torch import Tensor, nn

from regard.config import Amount, Choice, Count, Kinds, Positive, Real, Share, Whole, settings
from regard.errors import UsageError

# --- vectors added to the embeddings ------------------------------------------------------------------------------


class PositionConfig(Protocol):
    """What an embedding asks of the config of positions: how many places there are, if they end, and a module
    f(pos, ids) of positions (b t), -1 for padding, and ids: vectors (b t dim)."""

    @property
    def max_len(self) -> int | None: ...

    def make(self, dim: int) -> nn.Module: ...


@settings
class Learned:
    """One trained vector per position. `offset` rows stand before position 0 (BART and RoBERTa: 2); with `skip`, tokens
    equal to that id (RoBERTa's padding) do not count and get the row before position 0. Those that came before, in a
    cache, all count, as in transformers."""

    max_len: Count  # places
    offset: Whole = 0  # rows before place 0
    skip: Whole | None = None  # id that gets no place
    kind: str = "learned"

    def make(self, dim: int) -> PositionVectors:
        return PositionVectors(self, dim)


@settings
class Sinusoidal:
    """PE(p, 2i) = sin(p w_i), PE(p, 2i+1) = cos(p w_i), w_i = base^(-2i/d)   (Vaswani et al. 2017, 3.5).

    `layout`: "interleaved" as in the paper, "halves" (sines, then cosines: Marian), "fairseq" (halves with
    w_i = base^(-i/(d/2-1))). PE(p+k) is a fixed rotation of PE(p). `offset` and `skip` as for Learned, but what is
    skipped gets nothing (M2M100)."""

    max_len: Count  # places
    base: Positive = 10000.0  # the longest wave is 2 pi base
    layout: str = "interleaved"  # interleaved, halves or fairseq
    offset: Whole = 0  # what place 0 counts as
    skip: Whole | None = None  # id that gets no place
    kind: str = "sinusoidal"

    def make(self, dim: int) -> PositionVectors:
        return PositionVectors(self, dim)


def sinusoid(pos: Tensor, dim: int, base: float = 10000.0, layout: str = "interleaved") -> Tensor:
    """pos (...) -> (... dim), in float64 inside: any width, odd ones too."""
    # An odd width ends with a sine, and in fairseq with a 0.
    half = dim // 2 if layout == "fairseq" else (dim + 1) // 2
    step = 1 / max(half - 1, 1) if layout == "fairseq" else 2 / dim
    i = torch.arange(half, dtype=torch.float64, device=pos.device)
    angle = pos.double()[..., None] * torch.exp(-math.log(base) * step * i)
    sin, cos = angle.sin(), angle.cos()[..., : dim // 2]
    if layout == "fairseq":
        return torch.cat([sin, cos, sin.new_zeros(*pos.shape, dim % 2)], -1)
    if layout == "halves":
        return torch.cat([sin, cos], -1)
    if layout != "interleaved":
        raise UsageError(f"sinusoid layout {layout!r}; choose interleaved, halves or fairseq")
    out = sin.new_empty(*pos.shape, dim)
    out[..., 0::2], out[..., 1::2] = sin, cos
    return out


class PositionVectors(nn.Module):
    """pos (b t) -> vectors to add, (b t m)."""

    def __init__(self, config: Learned | Sinusoidal, dim: int):
        super().__init__()
        self.config, self.dim = config, dim
        if isinstance(config, Learned):
            self.weight = nn.Parameter(torch.empty(config.max_len + config.offset, dim))
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, pos: Tensor, ids: Tensor | None = None) -> Tensor:
        c = self.config
        if c.skip is not None and ids is not None:
            counts = (ids != c.skip) & (pos >= 0)
            before, number = pos[:, :1].clamp(min=0), counts.cumsum(-1)
            # Of packed documents each counts anew.
            earlier = torch.where(pos == 0, number - counts.long(), 0).cummax(-1).values
            pos = torch.where(counts, before + number - earlier - 1, -1)
        else:
            pos = pos.clamp(min=0)
        if isinstance(c, Learned):
            return self.weight[pos + c.offset]
        x = sinusoid(pos + c.offset, self.dim, c.base, c.layout)
        return x if c.skip is None else x * (pos >= 0)[..., None]


POSITIONS: dict[str, type[PositionConfig]] = {"learned": Learned, "sinusoidal": Sinusoidal}
Positions = Annotated[PositionConfig, Kinds(POSITIONS)]


# --- RoPE ---------------------------------------------------------------------------------------------------------


class Scaling:
    """What RoPE does otherwise in texts longer than those of the training; by itself nothing."""

    kind: str

    def scaled(self, freq: Tensor, base: float) -> Tensor:
        """Frequencies (r/2) of the same base for long texts."""
        return freq

    def gain(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    def softmax_gain(self) -> float:
        """What MLA multiplies its softmax scale by."""
        return 1.0


@settings
class Linear(Scaling):
    """Every frequency divided by `factor` (position interpolation)."""

    factor: Positive  # times as long
    kind: str = "linear"

    def scaled(self, freq: Tensor, base: float) -> Tensor:
        return freq / self.factor


@settings
class Llama3(Scaling):
    """Long waves divided by `factor`, short ones kept, a linear blend between (Llama 3.1)."""

    factor: Positive  # times as long
    low: Positive = 1.0  # waves fewer than this in original_len are divided
    high: Positive = 4.0  # waves more than this are kept
    original_len: Count = 8192  # context of the training
    kind: str = "llama3"

    def scaled(self, freq: Tensor, base: float) -> Tensor:
        wave = 2 * math.pi / freq
        blend = ((self.original_len / wave - self.low) / (self.high - self.low)).clamp(0, 1)
        return freq / self.factor * (1 - blend) + freq * blend


@settings
class Yarn(Scaling):
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, turn up the attention."""

    factor: Positive  # times as long
    original_len: Count  # context of the training
    fast: Positive = 32.0  # turns in it above which a pair is kept
    slow: Positive = 1.0  # turns in it below which a pair is interpolated
    # what q and k are multiplied by; none: 0.1 ln factor + 1
    attention_factor: Positive | None = None
    mscale: Amount | None = None  # with mscale_all: a factor of DeepSeek's
    mscale_all: Amount | None = None  # of MLA's softmax scale too
    truncated: bool = True  # the border pairs as whole numbers
    kind: str = "yarn"

    def gain(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all)
        return _mscale(self.factor, 1.0)

    def softmax_gain(self) -> float:
        """As DeepSeek uses `mscale_all`."""
        return _mscale(self.factor, self.mscale_all) ** 2 if self.mscale_all else 1.0

    def scaled(self, freq: Tensor, base: float) -> Tensor:
        r = 2 * len(freq)

        def dim_of(turns: float) -> float:
            return r * math.log(self.original_len / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = dim_of(self.fast), dim_of(self.slow)
        if self.truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, r - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(r // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return freq / self.factor * ramp + freq * (1 - ramp)


@settings
class Proportional(Scaling):
    """Only the first `share` of the pairs turn, each as fast as if all did (Gemma 4); every frequency divided by
    `factor`."""

    share: Share = 1.0  # of the pairs
    factor: Positive = 1.0  # times as long
    kind: str = "proportional"

    def scaled(self, freq: Tensor, base: float) -> Tensor:
        turns = torch.arange(len(freq)) < int(self.share * 2 * len(freq) // 2)
        return freq / self.factor * turns


@settings
class LongRope(Scaling):
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency divided by a number of its own, from `long` in
    rows that reach past `original_len`, else from `short`; the attention turned up where `factor` is more than 1."""

    short: tuple[Positive, ...]  # a divisor for each pair, up to original_len
    long: tuple[Positive, ...]  # the same beyond it
    original_len: Count  # context of the training
    factor: Positive = 1.0  # times as long
    attention_factor: Positive | None = None  # what q and k are multiplied by
    kind: str = "longrope"

    def __post_init__(self) -> None:
        if len(self.short) != len(self.long):
            sizes = f"short has {len(self.short)} numbers, long {len(self.long)}"
            raise UsageError(f"rope.scaling.{sizes}; give as many")

    def gain(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_len))

    def divisors(self, pos: Tensor, dtype: torch.dtype, reach: Tensor | None = None) -> Tensor:
        """Of the frequencies, by the length of each token's text, or by `reach` (b), where more of it is to come: pos
        (b t) -> (b t 1 r/2)."""
        # Packed documents, which begin at 0 each, are texts of their own.
        text = (pos == 0).long().cumsum(-1)
        longest = torch.zeros_like(pos[:, :1]).repeat(1, pos.shape[1] + 1)
        last = longest.scatter_reduce(1, text, pos, "amax").gather(1, text)
        first = pos.masked_fill(pos < 0, torch.iinfo(pos.dtype).max).amin(-1)
        n = self.original_len
        if reach is not None:
            last = torch.maximum(last, reach[:, None] - 1)
        elif bool(((first > 0) & (first <= n) & (pos.amax(-1) >= n)).any()):
            raise UsageError(
                f"this text grows past {n} tokens in a cache that holds its beginning: LongRoPE turns "
                "every token of a longer text otherwise; give the whole text in one call"
            )
        long, short = torch.tensor([self.long, self.short], dtype=dtype, device=pos.device)
        return torch.where((last >= n)[..., None, None], long, short)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


SCALINGS: dict[str, type[Scaling]] = {
    "linear": Linear,
    "llama3": Llama3,
    "yarn": Yarn,
    "longrope": LongRope,
    "proportional": Proportional,
}


@settings
class Rope:
    """Rotary positions (Su et al. 2021): pair i of a query or key at position p turns by p w_i, w_i = base^(-2i/r).

    Scores then depend on distance alone. `layout`: pairs are (i, i + r/2) in "half" (Llama), (2i, 2i+1) in
    "interleaved" (GPT-J, DeepSeek); one is a permutation of the other. `partial`: share of the width that turns.
    `wide`: it is turned in float32 whatever the dtype (OLMo, ModernBERT)."""

    base: Positive = 10000.0  # the longest wave is about 2 pi base
    layout: Annotated[str, Choice(("half", "interleaved"))] = "half"  # half or interleaved
    # for texts longer than those of the training
    scaling: Annotated[Scaling, Kinds(SCALINGS)] | None = None
    partial: Share = 1.0  # share of the width that turns
    wide: bool = False  # turned in float32 whatever the dtype
    kind: str = "rope"

    def __post_init__(self) -> None:
        if isinstance(self.scaling, Yarn) and self.base <= 1:
            raise UsageError(f"rope.base is {self.base}; YaRN needs waves that grow: more than 1")

    def width(self, dim: int) -> int:
        """How many of `dim` features turn."""
        width = int(dim * self.partial)
        if width % 2:
            raise UsageError(f"RoPE turns pairs, but {width} of {dim} features; make it even")
        return width

    def frequencies(self, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """w_i (r/2)."""
        r = self.width(dim)
        freq = 1.0 / (self.base ** (torch.arange(0, r, 2, dtype=dtype) / r))
        return freq if self.scaling is None else self.scaling.scaled(freq, self.base)

    def angles(
        self, pos: Tensor, dim: int, dtype: torch.dtype, reach: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of p w_i, (b t 1 r/2), computed in float32 at least. `reach`: see Span."""
        wide = torch.promote_types(dtype, torch.float32)
        freq = self.frequencies(dim, wide).to(pos.device)
        if isinstance(self.scaling, LongRope):
            given, pairs = len(self.scaling.short), len(freq)
            if given != pairs:
                raise UsageError(f"rope.scaling.short has {given} numbers for {pairs} pairs")
            freq = freq / self.scaling.divisors(pos, wide, reach)
        angle = pos.clamp(min=0).to(wide)[..., None, None] * freq
        gain = 1.0 if self.scaling is None else self.scaling.gain()
        return (angle.cos() * gain).to(dtype), (angle.sin() * gain).to(dtype)

    def shift(self, x: Tensor, by: Tensor) -> Tensor:
        """x (b n h d) that was turned to some positions, as if they were greater by so many (b)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        freq = self.frequencies(x.shape[-1], wide).to(x.device)
        angle = by.to(wide)[:, None, None, None] * freq
        return rotate(x.to(wide), angle.cos(), angle.sin(), self.layout).to(x.dtype)

    def softmax_gain(self) -> float:
        """What MLA multiplies its softmax scale by."""
        return 1.0 if self.scaling is None else self.scaling.softmax_gain()


def turned(name: str, rope: Rope | None) -> dict[str, Rope] | None:
    """What a cache is told of an entry that this RoPE turns. LongRoPE's angles depend on the length of the text."""
    if rope is None:
        return {}
    return None if isinstance(rope.scaling, LongRope) else {name: rope}


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Turn the first 2 * cos.shape[-1] features of x (b t h d) in pairs: (a, b) -> (a cos - b sin, b cos + a sin)."""
    if not torch.is_grad_enabled():
        return _rotate_into(torch.empty_like(x), x, cos, sin, layout)
    a, b, rest = _pairs(x, 2 * cos.shape[-1], layout)
    c, d = a * cos - b * sin, b * cos + a * sin
    parts = [c, d] if layout == "half" else [torch.stack([c, d], -1).flatten(-2)]
    return torch.cat([*parts, rest], -1)


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Equals `rotate` without its temporaries, which cost more than the sums."""
    a, b, rest = _pairs(x, 2 * cos.shape[-1], layout)
    c, d, kept = _pairs(out, 2 * cos.shape[-1], layout)
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=d).addcmul_(a, sin)
    kept.copy_(rest)
    return out


def _pairs(x: Tensor, r: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the first and second of each pair, and of what does not turn."""
    if layout == "half":
        return x[..., : r // 2], x[..., r // 2 : r], x[..., r:]
    return x[..., 0:r:2], x[..., 1:r:2], x[..., r:]


@settings
class Temperature:
    """Queries at position p times 1 + scale ln(1 + floor((p + offset) / length)): in a longer text weights stay as
    sharp (arXiv:2501.19399)."""

    length: Count  # positions that share a factor
    scale: Real  # how much sharper
    offset: Whole = 0  # 1: positions are counted from 1 (Llama 4)
    kind: str = "temperature"

    def gain(self, pos: Tensor, dtype: torch.dtype) -> Tensor:
        """The factors of positions (b t): (b t 1 1)."""
        steps = (pos.clamp(min=0) + self.offset) // self.length
        return (1 + self.scale * torch.log1p(steps.to(dtype)))[..., None, None]


# --- biases added to the scores -----------------------------------------------------------------------------------


class RelativeConfig(Protocol):
    """What a tower asks of the config of a bias on scores: the attention's heads, and a module f(q, k) of positions of
    queries (b t) and keys (b s): what is added to the scores (b h t s)."""

    @property
    def heads(self) -> int: ...

    def make(self) -> nn.Module: ...


@settings
class T5Bias:
    """A trained number for each head and bucket of distance; near distances have a bucket each, far ones share by
    logarithm (Raffel et al. 2020). All layers share one table."""

    heads: Count  # of the attention
    buckets: Count = 32  # numbers for each head
    max_distance: Count = 128  # beyond it all share one bucket
    causal: bool = False  # buckets for the past alone
    kind: str = "t5"

    def make(self) -> RelativeBias:
        return RelativeBias(self)


@settings
class Alibi:
    """score - scale slope_h |q - k| (Press et al. 2022): slopes are a geometric series. `coarse`, for causal towers:
    slopes, and what they make of a key's position, are rounded to bfloat16 (Falcon), so that far from the beginning
    keys in a row have the same bias."""

    heads: Count  # a slope for each
    scale: Positive = 1.0  # of all slopes
    coarse: bool = False  # rounded to bfloat16
    kind: str = "alibi"

    def make(self) -> RelativeBias:
        return RelativeBias(self)


class RelativeBias(nn.Module):
    """Positions of queries (b t) and keys (b s) -> what is added to the scores, (b h t s)."""

    def __init__(self, config: T5Bias | Alibi):
        super().__init__()
        self.config = config
        if isinstance(config, T5Bias):
            self.weight = nn.Parameter(torch.empty(config.buckets, config.heads))
            nn.init.normal_(self.weight, std=0.02)

    @property
    def by_distance(self) -> bool:
        """Whether it depends on distance alone."""
        return not (isinstance(self.config, Alibi) and self.config.coarse)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        distance = k[:, None, :] - q[:, :, None]  # b t s
        if isinstance(self.config, Alibi):
            c = self.config
            slopes = alibi_slopes(c.heads).to(q.device)
            if c.coarse:
                narrow = slopes.bfloat16()[:, None]
                heights = (narrow * k.clamp(min=0)[:, None]).float()  # b h s
                return c.scale * (heights[:, :, None] - (narrow.float() * q[:, None])[..., None])
            slopes = c.scale * slopes
            return -slopes[:, None, None] * distance.abs()[:, None]
        bucket = t5_bucket(distance, self.config)
        return self.weight[bucket].permute(0, 3, 1, 2)


RELATIVE: dict[str, type[RelativeConfig]] = {"t5": T5Bias, "alibi": Alibi}
Relative = Annotated[RelativeConfig, Kinds(RELATIVE)]


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8i/n) for n a power of two; for other counts the odd places of the next series fill up."""
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]
    return torch.tensor(slopes)


def t5_bucket(distance: Tensor, c: T5Bias) -> Tensor:
    """Signed distance key - query -> bucket number."""
    buckets, offset = c.buckets, torch.zeros_like(distance)
    if c.causal:
        distance = (-distance).clamp(min=0)
    else:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    exact = buckets // 2
    log = torch.log(distance.float().clamp(min=1) / exact) / math.log(c.max_distance / exact)
    far = (exact + (log * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
