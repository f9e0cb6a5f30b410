"""Norms, the position-wise feed-forward and the heads: the small parts that models are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import Amount, Choice, Count, Fraction, Kinds, Needs, Positive, settings
from regard.errors import Former, Renamed, UsageError, nearest
from regard.kernels.c.train import gelu_tanh


@settings
class Norm:
    """LayerNorm: (x - mean) / sqrt(var + eps) * w + b over the features of each token, biased variance.
    RMSNorm (`rms`): x / sqrt(mean(x^2) + eps) * w. `plus_one`: they multiply by 1 + w (Gemma, Nemotron)."""

    eps: Amount = 1e-5  # inside the root
    rms: bool = False  # RMSNorm
    biased: bool = True  # a LayerNorm
    plus_one: bool = False  # by 1 + w (Gemma, Nemotron)
    weighted: bool = True  # False: multiplied by nothing (OLMo, nanochat)
    kind: str = "norm"

    def __post_init__(self) -> None:
        if self.rms and not self.biased:
            raise UsageError("norm.biased: an RMS norm has no bias; leave it out")
        if not self.weighted and (self.plus_one or (self.biased and not self.rms)):
            raise UsageError("norm.weighted: without a weight give biased=False, and no plus_one")

    def make(self, dim: int) -> nn.Module:
        if not self.weighted:
            return UnitNorm(self.eps, centred=not self.rms)
        if self.rms:
            return RMSNorm(dim, self.eps, self.plus_one)
        kind = PlusOneNorm if self.plus_one else nn.LayerNorm
        return kind(dim, self.eps, bias=self.biased)


@settings
class BatchNorm:
    """BatchNorm (Ioffe and Szegedy 2015, arXiv:1502.03167): (x - mean) / sqrt(var + eps) * w + b, each feature over all
    tokens of a batch, padding among them; in evaluation by running means of what training saw. In training a token
    thus depends on later ones and on other texts: it is here to be compared with."""

    eps: Amount = 1e-5  # inside the root
    momentum: Fraction = 0.1  # the share of a batch in the running mean
    kind: str = "batch"

    def make(self, dim: int) -> nn.Module:
        return TokenBatchNorm(dim, self.eps, self.momentum)


class TokenBatchNorm(nn.Module):
    """(b t m) -> (b t m), or any tokens (... m). The running mean and variance are weights that no gradient changes, so
    that they are kept, cast and shared like the others."""

    def __init__(self, dim: int, eps: float, momentum: float):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.mean = nn.Parameter(torch.zeros(dim), requires_grad=False)
        self.var = nn.Parameter(torch.ones(dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(
            x.flatten(0, -2),
            self.mean,
            self.var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        return y.view_as(x)


class NormConfig(Protocol):
    """What a tower asks of the config of a norm: a module of vectors of `dim` numbers, (... m) -> (... m)."""

    def make(self, dim: int) -> nn.Module: ...


NORMS: dict[str, type[NormConfig]] = {"norm": Norm, "batch": BatchNorm}
Norms = Annotated[NormConfig, Kinds(NORMS)]


def plus(x: Tensor, y: Tensor) -> Tensor:
    """x + y; without gradients in y's own memory, because fresh memory costs more than the sum."""
    return y.add_(x) if _into(x, y) else x + y


def times(x: Tensor, y: Tensor) -> Tensor:
    """x * y, likewise."""
    return y.mul_(x) if _into(x, y) else x * y


def _into(x: Tensor, y: Tensor) -> bool:
    """No gradient needs y, and its type is wide enough (under autocast y is bf16 and the stream float32)."""
    return not torch.is_grad_enabled() and torch.result_type(x, y) == y.dtype


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w, the mean in float32 (Zhang and Sennrich 2019). With `plus_one` the weight is what
    is added to 1: near 0 a narrow dtype keeps more of it. That form multiplies in float32 too, as Gemma does."""

    def __init__(self, dim: int, eps: float, plus_one: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim) if plus_one else torch.ones(dim))
        self.eps, self.plus_one = eps, plus_one

    @property
    def gain(self) -> Tensor:
        """What is multiplied by: the weight, or 1 + the weight in float32 at least."""
        w = self.weight
        return 1 + w.to(torch.promote_types(w.dtype, torch.float32)) if self.plus_one else w

    def forward(self, x: Tensor) -> Tensor:
        if not self.plus_one:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.weight.shape, self.gain, self.eps).to(x.dtype)


class PlusOneNorm(nn.LayerNorm):
    """A LayerNorm that multiplies by 1 + w, in float32 as its RMS form. w starts at 1, as in transformers' Nemotron."""

    def forward(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        gain = 1 + self.weight.to(wide)
        x = F.layer_norm(input.to(wide), self.normalized_shape, gain, bias, self.eps)
        return x.to(input.dtype)


class UnitNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps): an RMSNorm without a weight, the mean in float32 (Llama 4, Gemma 4); `centred`: the
    mean is taken from x first, as a LayerNorm without a weight does (OLMo)."""

    def __init__(self, eps: float, centred: bool = False):
        super().__init__()
        self.eps, self.centred = eps, centred

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = F.layer_norm if self.centred else F.rms_norm
        return norm(wide, x.shape[-1:], eps=self.eps).to(x.dtype)


class HeadNorm(nn.Module):
    """A LayerNorm of each head (b t h d), by a weight of its own and without a bias, in float32 (Cohere)."""

    def __init__(self, heads: int, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(heads, dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = F.layer_norm(x.to(wide), x.shape[-1:], eps=self.eps)
        return (normed * self.weight.to(wide)).to(x.dtype)


class Gain(nn.Module):
    """x times one number, which is loaded and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class LayerScale(nn.Module):
    """Each feature times a trained number (Touvron et al. 2021, arXiv:2103.17239)."""

    def __init__(self, dim: int, start: float):
        super().__init__()
        self.start, self.weight = start, nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Add(nn.Module):
    """What a part of a block adds to the stream: residual + dropout(y), y normed or scaled first where the tower says
    so. `path`: the share of rows for which a step of training adds nothing (Huang et al. 2016, arXiv:1603.09382)."""

    def __init__(self, dropout: float = 0.0, norm: nn.Module | None = None, path: float = 0.0):
        super().__init__()
        self.dropout, self.norm, self.path = nn.Dropout(dropout), norm, path

    def forward(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.dropout(y if self.norm is None else self.norm(y))
        if self.path and self.training:
            kept = torch.rand(len(y), *[1] * (y.dim() - 1), device=y.device) >= self.path
            y = y * kept / (1 - self.path)
        return y if residual is None else plus(residual, y)


class ScaledAdd(Add):
    """Times `gain` before it is added (Granite)."""

    def __init__(
        self,
        gain: float,
        dropout: float = 0.0,
        norm: nn.Module | None = None,
        path: float = 0.0,
    ):
        super().__init__(dropout, norm, path)
        self.gain = gain

    def forward(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        y = super().forward(y) * self.gain
        return y if residual is None else plus(residual, y)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),
}


class Xielu(nn.Module):
    """xIELU (Huang and Schlag 2025, arXiv:2411.13010): a x^2 + b x above 0, c (e^x - 1 - x) + b x below, with trained
    a = softplus(alpha_p) and c = b + softplus(alpha_n). b and the x next to 0 at which e^x - 1 stops are kept with the
    weights, and no gradient changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.empty(1)) for _ in "pn")
        self.beta = nn.Parameter(torch.empty(()), requires_grad=False)
        self.eps = nn.Parameter(torch.empty(()), requires_grad=False)
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """a and c are 0.8."""
        for weight, value in ((self.alpha_p, 0.8), (self.alpha_n, 0.3)):
            nn.init.constant_(weight, math.log(math.expm1(value)))
        nn.init.constant_(self.beta, 0.5)
        nn.init.constant_(self.eps, -1e-6)

    def forward(self, x: Tensor) -> Tensor:
        a, c = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        below = (torch.expm1(torch.minimum(x, self.eps)) - x) * c
        return torch.where(x > 0, a * x * x, below) + self.beta * x


# Activations with weights of their own, for feed-forwards alone.
TRAINED: dict[str, type[nn.Module]] = {"xielu": Xielu}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise UsageError(f"activation {name!r} is unknown; {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


@settings
class MLP:
    """down(act(up x)), or down(act(gate x) * up x) when `gated` (GLU, Shazeer 2020); the same for every position."""

    ffn_dim: Count  # width inside
    activation: str = "relu"  # relu, gelu, gelu_tanh, silu, ...
    gated: bool = False  # SwiGLU and its kin
    bias: bool = True  # of its linear layers
    # after the activation; None: this family has none there, and `build(dropout=)` adds none
    dropout: Fraction | None = None
    # of a gated one: its gate stays below it, up within it (DeepSeek-V4)
    limit: Annotated[Positive, Needs("gated", such="true")] | None = None
    kind: str = "mlp"

    def make(self, dim: int, add: Add | None = None) -> FeedForward:
        return FeedForward(self, dim, add)


class FeedForward(Renamed, nn.Module):
    """x (b t m) -> (b t f) -> residual + (b t m)."""

    def __init__(self, config: MLP, dim: int, add: Add | None = None):
        super().__init__()
        c = config
        trained = TRAINED.get(c.activation)
        self.config, self.act = c, trained() if trained else activation(c.activation)
        self.gate = nn.Linear(dim, c.ffn_dim, bias=c.bias) if c.gated else None
        self.up = nn.Linear(dim, c.ffn_dim, bias=c.bias)
        self.down = nn.Linear(c.ffn_dim, dim, bias=c.bias)
        self.dropout, self.add = nn.Dropout(c.dropout or 0.0), add or Add()

    @property
    def special(self) -> str:
        """Why no fast part can stand for this one, or nothing."""
        return "" if self.config.limit is None else "its gate has a limit"

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.project_down(self.project_up(x), residual)

    def project_up(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.act(self.up(x))
        limit = self.config.limit
        if limit is not None:
            return self.act(self.gate(x).clamp(max=limit)) * self.up(x).clamp(-limit, limit)
        return times(self.up(x), self.act(self.gate(x)))

    def project_down(self, h: Tensor, residual: Tensor | None) -> Tensor:
        return self.add(self.down(self.dropout(h)), residual)

    widen = Former("project_up")
    leave = Former("project_down")


# --- heads: what turns hidden states into an answer ---------------------------------------------------------------


@settings
class LM:
    """Logits over the vocabulary: hidden W^T, W the embedding itself when `tied`."""

    tied: bool = True  # the embedding is the head's matrix
    bias: bool = False  # on the logits
    scaled: bool = False  # hidden times dim^-0.5 first (T5 v1.0)
    trained: bool = True  # the bias; BART and Marian keep theirs as it was loaded
    logit_softcap: Positive | None = None  # logits are c tanh(z / c)
    logit_gain: Positive = 1.0  # hidden times it first (Granite)
    kind: str = "lm"


@settings
class MLM:
    """Masked language model: norm(act(W h)), or h if not `transformed`, then the vocabulary with a bias (BERT)."""

    tied: bool = True  # the embedding is the head's matrix
    activation: str = "gelu"  # after the dense layer
    norm_eps: Amount = 1e-12  # of the norm behind it
    norm_bias: bool = True  # of that norm
    dense_bias: bool = True  # of the dense layer
    vocab_bias: bool = True  # on the logits
    transformed: bool = True  # False: the vocabulary reads hidden states as they are (EuroBERT)
    kind: str = "mlm"


DenseNorm = Annotated[Norm, Needs("dense", such="gelu")]


@settings
class Classify:
    """One label for the whole: out(act(dense h)) of one token, or out(h) without `dense`. An encoder is read at its
    first token, as the mean of all, or as "both": the first token beside the mean of the others (DINOv2); a causal
    tower at its last real one, which alone has seen all; "each": every token is labelled, and the mean of that counts
    (EuroBERT). `distilled`: the mean of that and of a second `out` on the second token, which learned from a teacher
    (DeiT)."""

    labels: Count  # classes
    dense: str | None = "tanh"  # activation of a layer before `out`; none: no such layer
    # which one is read
    token: Annotated[str, Choice(("first", "last", "mean", "both", "each"))] = "first"
    bias: bool = True  # of `out`
    distilled: bool = False  # a second `out` (DeiT)
    dropout: Fraction | None = None  # before `out`; None as for MLP
    dropped_twice: bool = False  # `dropout` before `dense` too (RoBERTa)
    dense_bias: bool = True  # of the layer before `out`
    norm: DenseNorm | None = None  # after `dense` (ModernBERT)
    dense_dropout: Fraction = 0.0  # before `dense` (DeBERTa)
    kind: str = "classify"

    def __post_init__(self) -> None:
        if self.distilled and (self.dense or self.token != "first"):
            raise UsageError("head.distilled reads the first two tokens: dense=None, token='first'")
        if self.token == "both" and self.dense:
            raise UsageError("head.token='both' is read by `out` itself: dense=None")


@settings
class Project:
    """One vector for the whole: the pooled one times a matrix (CLIP). The tower has to say how it is pooled."""

    width: Count  # of the vector
    kind: str = "project"


@settings
class Tag:
    """A label for each token: out(h), or out(norm(act(dense h)))."""

    labels: Count  # classes
    dropout: Fraction | None = None  # before `out`
    dense: str | None = None  # activation of a layer before `out` (ModernBERT); none: no such layer
    dense_bias: bool = True  # of that layer
    norm: DenseNorm | None = None  # after it
    kind: str = "tag"


@settings
class Answer:
    """Start and end of a span: two logits for each token, stacked on the last axis; otherwise as Tag."""

    labels: Count = 2  # start and end
    dropout: Fraction | None = None  # before `out`
    dense: str | None = None  # as in Tag
    dense_bias: bool = True  # as in Tag
    norm: DenseNorm | None = None  # as in Tag
    kind: str = "answer"


class Projection(nn.Module):
    """pooled (b m) -> (b width)."""

    def __init__(self, config: Project, dim: int):
        super().__init__()
        self.config, self.out = config, nn.Linear(dim, config.width, bias=False)

    def forward(self, h: Tensor, embedding: Tensor | None = None) -> Tensor:
        return self.out(h)


class LMHead(nn.Module):
    """hidden (b t m) -> logits (b t V). A tied head holds no weight: it is given the embedding's, which may be of
    another `width` than the tower."""

    def __init__(self, config: LM | MLM, dim: int, vocab: int, width: int | None = None):
        super().__init__()
        c, width = config, width or dim
        self.config = c
        if width != dim and not (isinstance(c, MLM) and c.transformed):
            why = f"embedding.width={width} is not dim={dim}: this head has no layer between them"
            raise UsageError(f"{why}; leave embedding.width out, or choose an MLM head")
        self.dense, self.act, self.norm = None, None, None
        if isinstance(c, MLM) and c.transformed:
            self.dense, self.act = (
                nn.Linear(dim, width, bias=c.dense_bias),
                activation(c.activation),
            )
            self.norm = Norm(c.norm_eps, biased=c.norm_bias).make(width)
        self.weight = None if c.tied else nn.Parameter(torch.empty(vocab, width))
        if self.weight is not None:
            nn.init.normal_(self.weight, std=0.02)
        biased, trained = (c.vocab_bias, True) if isinstance(c, MLM) else (c.bias, c.trained)
        self.bias = nn.Parameter(torch.zeros(vocab), requires_grad=trained) if biased else None
        self.fresh = False  # put on a trained body, still to be learnt: see with_head

    def features(self, h: Tensor) -> Tensor:
        """What the vocabulary's weights are multiplied by."""
        if self.dense is not None and self.act is not None and self.norm is not None:
            return self.norm(self.act(self.dense(h)))
        gain = 1.0 if isinstance(self.config, MLM) else self.config.logit_gain
        gain = gain * h.shape[-1] ** -0.5 if getattr(self.config, "scaled", False) else gain
        return h if gain == 1.0 else h * gain

    def forward(self, h: Tensor, embedding: Tensor) -> Tensor:
        weight = embedding if self.weight is None else self.weight
        return self.capped(self.project(self.features(h), weight))

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)

    @property
    def softcap(self) -> float | None:
        return self.config.logit_softcap if isinstance(self.config, LM) else None

    def capped(self, logits: Tensor) -> Tensor:
        cap = self.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class LabelHead(nn.Module):
    """hidden (b t m) -> (b labels) for Classify, (b t labels) for Tag and Answer. What is given ends where the text
    does: of a ragged batch, Transformer gives the last real tokens alone, or the mean of the real ones."""

    def __init__(self, config: Classify | Tag | Answer, dim: int):
        super().__init__()
        self.config = c = config
        self.dense = nn.Linear(dim, dim, bias=c.dense_bias) if c.dense else None
        self.act = activation(c.dense) if c.dense else None
        self.norm = c.norm.make(dim) if c.norm else None
        bias = c.bias if isinstance(c, Classify) else True
        read = 2 * dim if isinstance(c, Classify) and c.token == "both" else dim
        self.out = nn.Linear(read, config.labels, bias=bias)
        distilled = isinstance(c, Classify) and c.distilled
        self.teacher = nn.Linear(dim, config.labels, bias=bias) if distilled else None
        self.dropout = nn.Dropout(config.dropout or 0.0)

    def forward(self, h: Tensor, embedding: Tensor | None = None) -> Tensor:
        if self.teacher is not None:
            return (self.out(h[:, 0]) + self.teacher(h[:, 1])) / 2
        if isinstance(self.config, Classify):
            token = self.config.token
            if token == "both":
                h = torch.cat([h[:, 0], h[:, 1:].mean(1)], -1)
            elif token != "each":
                h = h.mean(1) if token == "mean" else h[:, 0 if token == "first" else -1]
            h = self.dropout(h) if self.config.dropped_twice else h
            h = F.dropout(h, self.config.dense_dropout, self.training)
        if self.dense is not None and self.act is not None:
            h = self.act(self.dense(h))
        h = h if self.norm is None else self.norm(h)
        return self.out(self.dropout(h))


Head = LM | MLM | Classify | Tag | Answer


def make_head(
    config: Head | Project, dim: int, vocab: int, width: int | None = None
) -> LMHead | LabelHead | Projection:
    """`width`: of the embedding, where it is not `dim`."""
    if isinstance(config, Project):
        return Projection(config, dim)
    if isinstance(config, (LM, MLM)):
        return LMHead(config, dim, vocab, width)
    return LabelHead(config, dim)
