"""Small random models of every family: random mechanisms, sizes, positions and weights, all from one seed."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import torch

from regard.attention import DSA, GQA, MLA
from regard.block import ORDERS, Tower
from regard.layers import LM, MLM, MLP, Answer, Classify, Norm, Tag
from regard.models import (
    EncoderDecoderConfig,
    Model,
    Patches,
    RecurrentConfig,
    Seq2SeqConfig,
    Tokens,
    TransformerConfig,
)
from regard.moe import MoE
from regard.position import Alibi, Learned, Linear, Llama3, Rope, Sinusoidal, T5Bias, Yarn

CLEAN = int(
    os.environ.get("REGARD_PARITY_MODELS", "20")
)  # sound models to judge; 200 is the full form
SCALINGS = (
    None,
    Linear(2.0),
    Llama3(4.0, original_len=8),
    Yarn(4.0, 8, mscale=0.7, mscale_all=0.9),
)


def random_model(seed: int) -> Model:
    draw = random.Random(seed)
    make = draw.choice((decoder,) * 6 + (encoder,) * 2 + (image,) + (pair,) * 3 + (recurrent,) * 2)
    torch.manual_seed(seed)
    return stirred(make(draw).make(), draw)


def stirred(model: Model, draw: random.Random) -> Model:
    """Weights that matter: some models loud, some quiet; no bias at 0, no gain at 1."""
    loud = draw.choice((0.5, 1.0, 2.0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=loud * p.shape[-1] ** -0.5)
            elif "correction" not in name:
                p.add_(0.3 * torch.randn_like(p))
    return model.eval()


def rope(draw: random.Random) -> Rope:
    layout = draw.choice(("half", "interleaved"))
    return Rope(draw.choice((10000.0, 5e5)), layout, draw.choice(SCALINGS), draw.choice((1.0, 0.5)))


def gqa(draw: random.Random, turned: bool) -> GQA:
    heads = draw.choice((1, 2, 3, 4, 6))
    groups = draw.choice([g for g in range(1, heads + 1) if heads % g == 0])
    return GQA(
        heads,
        groups,
        head_dim=draw.choice((4, 8)),
        value_dim=draw.choice((None, None, 6)),
        rope=rope(draw) if turned else None,
        bias=draw.random() < 0.5,
        out_bias=draw.random() < 0.5,
        qk_norm=draw.choice((None, None, 1e-6)),
        window=draw.choice((None, None, 3)),
        scale=draw.choice((None, None, 1.0)),
        softcap=draw.choice((None, None, None, 2.0)),
        sinks=draw.random() < 0.2,
    )


def mla(draw: random.Random) -> MLA:
    turned = draw.random() < 0.7
    return MLA(
        draw.choice((2, 3)),
        latent=draw.choice((6, 10)),
        head_dim=draw.choice((4, 6)),
        rope_dim=4 if turned else 0,
        value_dim=draw.choice((None, 5)),
        query_latent=draw.choice((None, 7)),
        rope=replace(rope(draw), partial=1.0) if turned else None,
        normed=draw.random() < 0.7,
        bias=draw.random() < 0.5,
        window=draw.choice((None, None, 4)),
    )


def mechanism(draw: random.Random, turned: bool) -> GQA | MLA | DSA:
    kind = draw.choice(("gqa", "gqa", "mla", "dsa"))
    if kind == "gqa":
        return gqa(draw, turned)
    if kind == "mla":
        return mla(draw)
    inner = draw.choice((gqa(draw, turned), mla(draw)))
    turns = 4 if inner.rope is not None and inner.rope.partial == 1.0 else 0
    return DSA(inner, 2, 8, draw.choice((2, 3)), turns, draw.random() < 0.3)


def ffn(draw: random.Random) -> MLP | MoE:
    act = draw.choice(("relu", "gelu", "gelu_tanh", "silu", "tanh"))
    if draw.random() < 0.3:
        groups = draw.choice((1, 2))
        return MoE(
            4, 2, 12, act, draw.choice((0, 1)), score=draw.choice(("softmax", "sigmoid")),
            normalized=draw.random() < 0.5, groups=groups, corrected=draw.random() < 0.5,
        )  # fmt: skip
    return MLP(draw.choice((16, 24)), act, draw.random() < 0.5, draw.random() < 0.5)


def words(draw: random.Random) -> Tokens:
    place = draw.choice((None, Learned(24), Sinusoidal(24), Sinusoidal(24, layout="halves")))
    norm = draw.choice((None, None, Norm()))
    return Tokens(draw.choice((19, 40)), place, scaled=draw.random() < 0.3, norm=norm)


def tower(draw: random.Random, attention: Any, **more: Any) -> Tower:
    norm = Norm(draw.choice((1e-5, 1e-6, 1e-12)), draw.random() < 0.5)
    order = draw.choice([n for n, o in ORDERS.items() if not (o.parallel and "cross" in more)])
    relative = None
    inner = attention.attention if isinstance(attention, DSA) else attention
    if draw.random() < 0.2:
        causal = more.get("causal", True)
        table = T5Bias(inner.heads, 8, 16, causal=causal)
        relative = draw.choice((Alibi(inner.heads), table))
    layers = draw.choice((1, 2))
    return Tower(
        draw.choice((12, 16)), layers, attention, ffn(draw), norm=norm, order=order,
        final_norm=order != "post" or draw.random() < 0.5, relative=relative, **more,
    )  # fmt: skip


def decoder(draw: random.Random) -> TransformerConfig:
    head = LM(draw.random() < 0.5, draw.random() < 0.3, draw.random() < 0.3)
    return TransformerConfig(words(draw), tower(draw, mechanism(draw, draw.random() < 0.7)), head)


def encoder(draw: random.Random) -> TransformerConfig:
    heads = (MLM(), Classify(3), Classify(3, None, "last"), Tag(4), Answer(), None)
    both = tower(draw, gqa(draw, draw.random() < 0.5), causal=False)
    return TransformerConfig(words(draw), both, draw.choice(heads))


def image(draw: random.Random) -> TransformerConfig:
    both = tower(draw, gqa(draw, False), causal=False)
    return TransformerConfig(Patches(8, 4, extra=draw.choice((1, 2))), both, Classify(5, None))


def pair(draw: random.Random) -> EncoderDecoderConfig:
    reads = replace(words(draw), vocab=30)
    both = tower(draw, gqa(draw, draw.random() < 0.3), causal=False)
    cross = draw.choice(
        (
            replace(gqa(draw, False), window=None),
            replace(mla(draw), rope=None, rope_dim=0, window=None),
        )
    )
    writes = replace(tower(draw, mechanism(draw, False), cross=cross), dim=both.dim)
    head = LM(True, draw.random() < 0.5, draw.random() < 0.3)
    return EncoderDecoderConfig(reads, both, replace(words(draw), vocab=30), writes, head)


def recurrent(draw: random.Random) -> RecurrentConfig | Seq2SeqConfig:
    cell, layers = draw.choice(("elman", "gru", "lstm")), draw.choice((1, 2))
    if draw.random() < 0.5:
        score = draw.choice((None, "dot", "scaled_dot", "bilinear", "additive"))
        return RecurrentConfig(19, 12, layers, cell, score, tied=draw.random() < 0.5)
    score = draw.choice((None, "bilinear", "additive"))
    return Seq2SeqConfig(19, 23, 12, layers, cell, score, bidirectional=draw.random() < 0.5)


# --- plain ones, by name ------------------------------------------------------------------------------------------


def _tower(attention: Any, ffn: Any = None, **more: Any) -> Tower:
    return Tower(16, 2, attention, ffn or MLP(24, "gelu"), **more)


def _words(attention: Any, ffn: Any = None, **more: Any) -> TransformerConfig:
    return TransformerConfig(Tokens(30, Sinusoidal(24)), _tower(attention, ffn, **more), LM())


_TURNED = GQA(4, 2, rope=Rope(), bias=True, qk_norm=1e-6)
_LATENT = MLA(2, 10, 6, 4, rope=Rope(), query_latent=7)
_ENCODER = _tower(GQA(2), causal=False, order="post", norm=Norm(rms=True))
MODELS: dict[str, Any] = {
    "gqa": _words(_TURNED),
    "window": _words(GQA(4, 2, window=3)),
    "softcap": _words(GQA(4, 2, softcap=1.0, sinks=True)),
    "mla": _words(_LATENT),
    "dsa": _words(DSA(_LATENT, 2, 8, 3, rope_dim=4)),
    "experts": _words(GQA(4), MoE(5, 2, 12)),
    "bert": TransformerConfig(Tokens(30, Learned(24)), _tower(GQA(4, bias=True), causal=False), MLM()),
    "gpt": TransformerConfig(
        Tokens(30, Learned(24), scaled=True), _tower(GQA(4)), LM(scaled=True)
    ),
    "t5": EncoderDecoderConfig(
        Tokens(30, Sinusoidal(24)), _ENCODER, Tokens(30, Sinusoidal(24)),
        replace(_ENCODER, causal=True, cross=GQA(2)), LM(),
    ),
}  # fmt: skip
