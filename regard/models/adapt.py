"""What fine-tuning changes in a finished model: its head, low-rank additions to its linear layers (LoRA), and the 4
bits that those layers may be held in beside them (QLoRA).

Training makes them (training/config.py), checkpoints keep them apart from the body (checkpoint/adapter.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import Count, Fraction, Positive, settings
from regard.errors import UsageError, nearest
from regard.kernels.linear import GROUP, Int4, unpacked
from regard.layers import LM, MLM, Answer, Classify, Head, LMHead, Tag, make_head
from regard.models.base import Model
from regard.models.embedding import Patches, Tokens
from regard.models.init import initialize, start_of
from regard.models.pair import Pair
from regard.models.transformer import EncoderDecoder, Transformer, TransformerConfig

# --- a new head ---------------------------------------------------------------------------------------------------

NAMES = ("id2label", "label2id", "num_labels", "_num_labels", "problem_type")  # of the old labels


def with_head(model: Model, head: Head) -> Model:
    """`model` with a new head in place of its own, and the body as it is: the same tensors, not copies.

    A Classify that says nothing but how many labels there are gets the form that suits the body, which transformers can
    read too: BERT's for an encoder, ViT's for images, GPT-2's at the last token for a causal tower. Of an
    encoder-decoder the encoder is the body, unless the head is an LM. New weights start as the family's, drawn on the
    CPU: torch.manual_seed decides them. A pooler becomes the dense layer of a head that has the same."""
    if isinstance(model, EncoderDecoder) and not isinstance(head, LM):
        # The encoder as a model of its own, with the same weights.
        c, whole = model.config, model
        with torch.device("meta"):
            model = Transformer(TransformerConfig(c.source, c.encoder, max_len=c.max_len))
        model.embedding, model.tower, model.origin = whole.source, whole.encoder, whole.origin
        model.train(whole.training)
    if not model.towers:
        kind = "pair" if isinstance(model, Pair) else "recurrent model"
        raise UsageError(f"a {kind} keeps the head it was made with; use a Transformer")
    if isinstance(model, Transformer):
        head = _suited(head, model)
    tower, words = (getattr(model.config, name) for name in [*model.towers.items()][-1])
    if isinstance(words, Tokens):
        made = make_head(head, tower.outputs, words.vocab, words.width)
    elif isinstance(head, (LM, MLM)):
        raise UsageError("an image has no vocabulary: put a Classify or Tag head on this model")
    else:
        made = make_head(head, tower.outputs, 0)
    start = getattr(model.origin, "start", None) or model.start or start_of(model.config)
    initialize(made, start, tower.layers)
    made = made.to(next(model.parameters())).train(model.training)
    if isinstance(made, LMHead):
        made.fresh = True
    if isinstance(model, Transformer):
        if isinstance(head, Classify) and head.dense and head.dense == model.config.pooler:
            made.dense = model.pooler
        # One without weights changes nothing that is stored, and the family expects it.
        if model.pooler is None or any(True for _ in model.pooler.parameters()):
            model.pooler, model.config = None, replace(model.config, pooler=None)
    changes: dict[str, Any] = {"head": head}
    model.head = made
    if isinstance(model, Transformer) and not isinstance(head, LM):
        model.mtp, changes = None, {**changes, "mtp": None}
    model.config = replace(model.config, **changes)
    if model.origin is not None:
        kept = {key: value for key, value in model.origin.config.items() if key not in NAMES}
        model.origin = replace(model.origin, architecture="", config=kept, tensors={})
    return model


def with_labels(model: Model, count: int) -> Model:
    """`model` with a head for `count` labels, more than it has, in place: its own keep their numbers and their rows,
    the new ones start as the family's do. The rest of the head stays."""
    head, start = model.head, getattr(model.origin, "start", None) or start_of(model.config)
    for name in ("out", "teacher"):
        old: nn.Linear | None = getattr(head, name)
        if old is not None:
            new = nn.Linear(old.in_features, count, bias=old.bias is not None)
            initialize(new, start)
            new.to(old.weight)
            for wide, narrow in zip(new.parameters(), old.parameters(), strict=True):
                wide.data[: len(narrow)] = narrow.data
            setattr(head, name, new)
    head.config = replace(head.config, labels=count)
    model.config = replace(model.config, head=head.config)
    return model


def with_image_size(model: Model, size: int) -> Model:
    """`model` for images of size x size, in place: its learned grid of positions is scaled by bicubic interpolation, as
    transformers' `interpolate_pos_encoding` does it; those of the tokens in front stay."""
    places = [n for n in model.towers.values() if isinstance(getattr(model.config, n), Patches)]
    if not places:
        raise UsageError("this model reads no images: leave their size out")
    part = getattr(model, places[0])
    old, new = part.config, replace(part.config, size=size)
    front, grid = part.position.detach().split([old.extra, old.count])
    grid = grid.T.unflatten(1, (old.size // old.patch, -1))[None].float()  # 1 m side side
    grid = F.interpolate(grid, (size // new.patch,) * 2, mode="bicubic", align_corners=False)
    part.position = nn.Parameter(torch.cat([front, grid[0].flatten(1).T.to(front)]))
    part.config, model.config = new, replace(model.config, **{places[0]: new})
    name, files = "preprocessor_config.json", getattr(model.origin, "files", {})
    if name in files:
        both = json.loads(files[name])
        sides, crop = {"height": size, "width": size}, both.get("crop_size")
        if both.get("do_center_crop") and crop:
            # The shorter side in proportion: as large a part is cut out.
            short, part = (
                x if isinstance(x, int) else max(x.values()) for x in (both["size"], crop)
            )
            both |= {"size": {"shortest_edge": round(short * size / part)}, "crop_size": sides}
        else:
            both["size"] = sides
        model.origin.files = {**files, name: json.dumps(both, indent=2).encode()}
    return model


def _suited(head: Head, model: Transformer) -> Head:
    """The form and the dropout of a head for this body, where only its labels are said: those of its folder, or its
    family's."""
    tower = model.config.tower
    if isinstance(head, (LM, MLM)):
        return head
    if head != type(head)(head.labels):
        if isinstance(head, Classify) and tower.causal and head.token == "first":
            why = "the first token of a causal tower has seen nothing else"
            raise UsageError(f"{why}; say Classify(labels, token='last')")
        return head
    family = getattr(model.origin, "family", "") or model.family
    known = getattr(model.origin, "heads", {}).get(head.kind)
    if known is not None:
        return replace(known, labels=head.labels)
    if isinstance(head, Answer):
        return replace(head, dropout=0.1) if family == "distilbert" else head
    if isinstance(head, Tag):
        return replace(head, dropout=0.1 if tower.causal else tower.dropout)
    if tower.causal:
        return Classify(head.labels, None, "last", bias=False)
    if not isinstance(model.config.embedding, Tokens):
        return Classify(head.labels, None)
    if family == "distilbert":
        return replace(head, dense="relu", dropout=0.2)
    return replace(head, dropout=tower.dropout, dropped_twice=family == "roberta")


def labels(classes: Iterable[str]) -> dict[str, Any]:
    """The names of labels as config.json has them, for `model.origin.config`; nothing where there are none."""
    pairs = list(enumerate(classes))
    both = {"id2label": {str(i): n for i, n in pairs}, "label2id": {n: i for i, n in pairs}}
    return both if pairs else {}


def classes_of(model: Any) -> list[str]:
    """The names of a model's labels, in order; [] where its folder says none."""
    found = model.origin.config.get("id2label") if model.origin is not None else None
    return [found[key] for key in sorted(found, key=int)] if found else []


def class_names(model: Any) -> list[str]:
    """The names of a classifier's classes; numbers, where its folder names none."""
    numbers = range(model.config.head.labels)
    names = [str(name) for name in classes_of(model)]
    nameless = len(names) != len(numbers) or names == [f"LABEL_{i}" for i in numbers]
    return [str(i) for i in numbers] if nameless else names


# --- LoRA ---------------------------------------------------------------------------------------------------------


@settings
class LoRA:
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685).   y = W x + (alpha / rank) B A x,  A (r in), B (out r)

    B starts as 0, so that nothing changes at first; `dropout` acts on the x that A reads. `rslora`: alpha / sqrt(rank)
    (Kalajdzievski 2023, arXiv:2312.03732)."""

    rank: Count = 8
    alpha: Positive = 16.0
    dropout: Fraction = 0.0
    rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class LowRank(nn.Module):
    """A linear layer `base` with what LoRA adds. A and B are float32 at least, whatever the base is."""

    def __init__(self, base: nn.Linear | Int4Linear, config: LoRA):
        super().__init__()
        self.base, self.config = base, config
        held = base.weight if isinstance(base, nn.Linear) else base.scales
        dtype = torch.promote_types(held.dtype, torch.float32)
        rank, bound, device = config.rank, base.in_features**-0.5, held.device
        a = torch.empty(rank, base.in_features, dtype=dtype).uniform_(-bound, bound)
        self.a = nn.Parameter(a.to(device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype, device=device))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y, x = self.base(x), self.dropout(x)
        # Autocast narrows x, A and B by itself.
        x = x if torch.is_autocast_enabled(x.device.type) else x.to(self.a.dtype)
        low = F.linear(F.linear(x, self.a), self.b)
        return y + (self.config.scale * low).to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """W + (alpha / rank) B A, for those who multiply by the weight themselves."""
        w = self.base.weight
        return w + (self.config.scale * (self.b @ self.a)).to(w.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The base with W + (alpha / rank) B A as its weight: summed in float64 and rounded once."""
        base = self.base if isinstance(self.base, nn.Linear) else self.base.plain()
        w = base.weight
        w.copy_(rounded(w.double() + self.config.scale * (self.b.double() @ self.a.double()), w))
        return base


def low_ranks(model: nn.Module) -> dict[str, LowRank]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LowRank)}


def plain_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Parameters and their shapes as they are without LoRA and in no fewer bits."""
    low, packed = low_ranks(model), {}
    for name, m in model.named_modules():
        if isinstance(m, Int4Linear):
            packed[f"{name}.weight"] = torch.Size((m.out_features, m.in_features))
    own = {n: p.shape for n, p in model.named_parameters() if n.rpartition(".")[0] not in low}
    return {n.replace(".base.", "."): shape for n, shape in (own | packed).items()}


def inject(model: nn.Module, names: Iterable[str], config: LoRA) -> None:
    """Put LoRA on the linear layers of these full names."""
    known = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Int4Linear)}
    for name in names:
        if name not in known:
            raise UsageError(f"the model has no linear layer {name!r}; {nearest(name, known)}")
        _set(model, name, LowRank(known[name], config))


def merge(model: Model) -> Model:
    """The model with LoRA's products added to the weights, in place, and no layer in 4 bits any more; what was frozen
    stays so."""
    for name, low in low_ranks(model).items():
        _set(model, name, low.merged())
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Int4Linear):
            _set(model, name, layer.plain())
    return model


def _set(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Inside, the model is the one that LoRA was put on, in evaluation mode."""
    layers, training = low_ranks(model), model.training
    try:
        model.eval()
        for name, low in layers.items():
            _set(model, name, low.base)
        yield
    finally:
        for name, low in layers.items():
            _set(model, name, low)
        model.train(training)


def without_dropout(model: Model) -> bool:
    """Take dropout out of the body, in place; its config, which is saved, still says it. LoRA's own, which was asked
    for, stays. Whether there was any."""
    kept, there = {id(low.dropout) for low in low_ranks(model).values()}, False
    for part in model.modules():
        if isinstance(part, nn.Dropout) and id(part) not in kept:
            there, part.p = there or part.p > 0, 0.0
        # Between layers torch's cells have their own.
        if isinstance(part, nn.RNNBase):
            there, part.dropout = there or part.dropout > 0, 0.0
        config: Any = getattr(part, "config", None)
        drops = {n: 0.0 for n in ("dropout", "layer_drop") if getattr(config, n, None)}
        if drops and part is not model and not isinstance(part, LowRank):
            there, part.config = True, replace(config, **drops)
    return there


# --- QLoRA: the base in 4 bits -------------------------------------------------------------------------------------


class Int4Linear(nn.Module):
    """A frozen linear layer whose weight is held in 4 bits alone (`Int4`), and turned back for each product, on the way
    back too. Only x has a gradient. `dtype` is of the weight it was made of."""

    q: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, device: torch.device | str | None = None):
        super().__init__()
        packed = Int4(linear.weight.to(device), None, None)
        self.register_buffer("q", packed.q)
        self.register_buffer("scales", packed.scales)
        self.bias, self.dtype = linear.bias, linear.weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        x = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
        y = _Int4Product.apply(x, self.q, self.scales, self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """W (out in), turned back."""
        return unpacked(self.q, self.scales)[:, : self.out_features].t().to(self.dtype)

    def plain(self) -> nn.Linear:
        """The layer with its weight turned back."""
        linear = nn.Linear(self.in_features, self.out_features, device="meta")
        linear.weight = nn.Parameter(self.weight.contiguous(), requires_grad=False)
        linear.bias = self.bias
        return linear


class _Int4Product(torch.autograd.Function):
    """x W^T, of which nothing is kept but the 4 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, scales: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(q, scales)
        return x @ unpacked(q, scales)[:, :n].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        w = unpacked(*ctx.saved_tensors)[:, : dy.shape[-1]].to(dy.dtype)
        return dy @ w.t(), None, None, None


def quantize(model: Model, device: torch.device | str | None = None) -> Model:
    """The model with the linear layers of its body in 4 bits, in place and one after the other, on `device` (default:
    where they are). Those that choose experts, and whose inputs groups do not divide, stay as they are."""
    for name, layer in body_linears(model).items():
        fits = layer.in_features % GROUP == 0 and not chooses(name)
        if isinstance(layer, nn.Linear) and fits:
            _set(model, name, Int4Linear(layer, device))
    return model


def body_linears(model: nn.Module) -> dict[str, nn.Linear | Int4Linear]:
    """Linear layers by full name, without those of the head, of MTP layers, of indexers, and of a pooler's attention,
    where PEFT's matrices have no effect: torch's own module reads the weights alone."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Int4Linear)
        and not {"head", "mtp", "indexer"} & set(name.split("."))
        and "pooler.attention." not in name
    }


def chooses(name: str) -> bool:
    """Whether a layer of this name chooses or weighs experts."""
    return name.rpartition(".")[2] in ("router", "shared_gate")


def rounded(x: Tensor, like: Tensor) -> Tensor:
    """x (float64) in the type of `like`, rounded once. torch goes to half precision by way of float32, and what is
    rounded twice may be off by one bit; a float32 that is made odd where it is not exact keeps on which side x lies."""
    if like.dtype.itemsize >= 4:
        return x.to(like.dtype)
    y = x.float()
    off, even = x - y.double(), y.view(torch.int32) & 1 == 0
    odd = torch.nextafter(y, off.sign().float() * torch.inf)
    return torch.where(even & (off != 0), odd, y).to(like.dtype)
