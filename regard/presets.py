"""Models by name, as data, and `build`, which changes any setting of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from regard.attention import DSA, GQA, MLA
from regard.block import Tower
from regard.checkpoint.families import FAMILIES
from regard.checkpoint.hf import read_config
from regard.checkpoint.rules import Family
from regard.config import customize
from regard.errors import UsageError, nearest
from regard.layers import LM, MLM, MLP, Classify, Norm
from regard.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    Model,
    Patches,
    RecurrentConfig,
    Seq2SeqConfig,
    Tokens,
    Transformer,
    TransformerConfig,
)
from regard.models.start import initialize, start_of
from regard.moe import MoE
from regard.position import Learned, Llama3, Rope, Sinusoidal, T5Bias, Yarn

Config = TransformerConfig | EncoderDecoderConfig | RecurrentConfig | Seq2SeqConfig


# --- one tower ----------------------------------------------------------------------------------------------------


def _gpt2(dim: int, layers: int, heads: int) -> TransformerConfig:
    tower = Tower(dim, layers, GQA(heads, bias=True, out_bias=True), MLP(4 * dim, "gelu_tanh"))
    return TransformerConfig(Tokens(50257, Learned(1024)), tower, LM(), max_len=1024)


def _swiglu(ffn_dim: int) -> MLP:
    return MLP(ffn_dim, "silu", gated=True, bias=False)


def _llama(
    dim: int,
    layers: int,
    attention: GQA,
    ffn_dim: int,
    vocab: int,
    max_len: int,
    tied: bool = False,
    eps: float = 1e-5,
) -> TransformerConfig:
    tower = Tower(
        dim,
        layers,
        attention,
        _swiglu(ffn_dim),
        norm=Norm(eps, rms=True),
    )
    return TransformerConfig(Tokens(vocab), tower, LM(tied=tied), max_len=max_len)


_LLAMA31 = Rope(500000.0, scaling=Llama3(8.0))
_LLAMA32 = Rope(500000.0, scaling=Llama3(32.0))
_MISTRAL = GQA(32, 8, rope=Rope(), window=4096)
_QWEN2 = GQA(14, 2, rope=Rope(1e6), bias=True)
_QWEN3 = GQA(16, 8, 128, rope=Rope(1e6), qk_norm=1e-6)


def _mixtral() -> TransformerConfig:
    tower = Tower(4096, 32, GQA(32, 8, rope=Rope(1e6)), MoE(8, 2, 14336), norm=Norm(1e-5, rms=True))
    return TransformerConfig(Tokens(32000), tower, LM(tied=False), max_len=32768)


def _deepseek(
    dim: int, layers: int, attention: MLA | DSA, experts: MoE, dense: MLP, first: int, vocab: int
) -> TransformerConfig:
    ffn = (dense,) * first + (experts,) * (layers - first)
    tower = Tower(dim, layers, attention, ffn, norm=Norm(1e-6, rms=True))
    return TransformerConfig(Tokens(vocab), tower, LM(tied=False), max_len=163840)


_YARN_V2 = Yarn(40.0, 4096, mscale=0.707, mscale_all=0.707)
_YARN_V3 = Yarn(40.0, 4096, mscale=1.0, mscale_all=1.0)
_MLA_LITE = MLA(16, 512, 128, 64, 128, rope=Rope(scaling=_YARN_V2, layout="interleaved"))
_MLA_V3 = MLA(128, 512, 128, 64, 128, 1536, rope=Rope(scaling=_YARN_V3, layout="interleaved"))
_DSA_V32 = DSA(_MLA_V3, 64, 128, 2048, rope_dim=64)
_EXPERTS_LITE = MoE(64, 6, 1408, shared=2, normalized=False)
_EXPERTS_V3 = MoE(
    256, 8, 2048, shared=1, score="sigmoid", gain=2.5, groups=8, active_groups=4, corrected=True
)


def _bert(dim: int, layers: int, heads: int) -> TransformerConfig:
    tower = Tower(
        dim,
        layers,
        GQA(heads, bias=True, out_bias=True, dropout=0.1),
        MLP(4 * dim, "gelu"),
        norm=Norm(1e-12),
        order="post",
        final_norm=False,
        causal=False,
        dropout=0.1,
    )
    words = Tokens(30522, Learned(512), types=2, norm=Norm(1e-12), dropout=0.1)
    return TransformerConfig(words, tower, MLM(), max_len=512)


def _roberta() -> TransformerConfig:
    base = _bert(768, 12, 12)
    eps = Norm(1e-5)
    words = Tokens(50265, Learned(512, 2, 1), types=1, norm=eps, dropout=0.1)
    tower = dataclasses.replace(base.tower, norm=eps)
    return dataclasses.replace(base, embedding=words, tower=tower, head=MLM(norm_eps=1e-5))


def _distilbert() -> TransformerConfig:
    words = Tokens(30522, Learned(512), norm=Norm(1e-12), dropout=0.1)
    base = _bert(768, 6, 12)
    tower = dataclasses.replace(base.tower, attention_dropped=False)
    return dataclasses.replace(base, embedding=words, tower=tower)


def _vit(dim: int, layers: int, heads: int, extra: int = 1) -> TransformerConfig:
    attention = GQA(heads, bias=True, out_bias=True)
    tower = Tower(dim, layers, attention, MLP(4 * dim, "gelu"), norm=Norm(1e-12), causal=False)
    return TransformerConfig(Patches(extra=extra), tower, Classify(1000, None))


# --- two towers ---------------------------------------------------------------------------------------------------


def _two(
    words: Tokens,
    encoder: Tower,
    head: LM,
    max_len: int | None,
    relative: T5Bias | None = None,
    layers: int | None = None,
) -> EncoderDecoderConfig:
    """A decoder like the encoder, with cross-attention."""
    cross = encoder.attention
    assert isinstance(cross, GQA)
    decoder = dataclasses.replace(
        encoder, causal=True, cross=cross, relative=relative, layers=layers or encoder.layers
    )
    return EncoderDecoderConfig(words, encoder, words, decoder, head, max_len=max_len)


def _vaswani(dim: int, heads: int, ffn_dim: int, dropout: float) -> EncoderDecoderConfig:
    words = Tokens(37000, Sinusoidal(5000), scaled=True, dropout=dropout)
    encoder = Tower(
        dim,
        6,
        GQA(heads),
        MLP(ffn_dim),
        order="post",
        final_norm=False,
        causal=False,
        dropout=dropout,
    )
    return _two(words, encoder, LM(), 5000)


def _t5(
    dim: int, layers: int, heads: int, ffn_dim: int, v11: bool = False, head_dim: int = 64
) -> EncoderDecoderConfig:
    ffn = MLP(ffn_dim, "gelu_tanh" if v11 else "relu", gated=v11, bias=False, dropout=0.1)
    attention = GQA(heads, head_dim=head_dim, scale=1.0, dropout=0.1)
    encoder = Tower(
        dim,
        layers,
        attention,
        ffn,
        norm=Norm(1e-6, rms=True),
        causal=False,
        relative=T5Bias(heads),
        dropout=0.1,
        end_dropped=True,
    )
    head = LM(tied=not v11, scaled=not v11)
    return _two(Tokens(32128, dropout=0.1), encoder, head, None, T5Bias(heads, causal=True))


def _bart(dim: int, layers: int, heads: int) -> EncoderDecoderConfig:
    words = Tokens(50265, Learned(1024, offset=2), norm=Norm(), dropout=0.1)
    attention = GQA(heads, bias=True, out_bias=True)
    encoder = Tower(
        dim,
        layers,
        attention,
        MLP(4 * dim, "gelu", dropout=0.0),
        order="post",
        final_norm=False,
        causal=False,
        dropout=0.1,
    )
    return _two(words, encoder, LM(bias=True, trained=False), 1024)


def _marian() -> EncoderDecoderConfig:
    words = Tokens(58101, Sinusoidal(512, layout="halves"), scaled=True, dropout=0.1)
    attention = GQA(8, bias=True, out_bias=True)
    encoder = Tower(
        512,
        6,
        attention,
        MLP(2048, "silu", dropout=0.0),
        order="post",
        final_norm=False,
        causal=False,
        dropout=0.1,
    )
    return _two(words, encoder, LM(bias=True, trained=False), 512)


def _captioner() -> EncoderDecoderConfig:
    """Text that attends to image patches (features D7), from the parts of ViT and GPT-2."""
    image, text = _vit(384, 6, 6), _gpt2(384, 6, 6)
    decoder = dataclasses.replace(text.tower, cross=GQA(6, bias=True, out_bias=True))
    words = Tokens(50257, Learned(1024))
    return EncoderDecoderConfig(
        image.embedding, image.tower, words, decoder, LM(), shared=False, max_len=1024
    )


# name -> (Hugging Face's family, or "" where it has none; config)
PRESETS: dict[str, tuple[str, Callable[[], Config]]] = {
    "gpt2": ("gpt2", lambda: _gpt2(768, 12, 12)),
    "gpt2-medium": ("gpt2", lambda: _gpt2(1024, 24, 16)),
    "gpt2-large": ("gpt2", lambda: _gpt2(1280, 36, 20)),
    "gpt2-xl": ("gpt2", lambda: _gpt2(1600, 48, 25)),
    "llama": ("llama", lambda: _llama(768, 12, GQA(12, 4, rope=Rope()), 2048, 32000, 2048)),
    "llama-2-7b": ("llama", lambda: _llama(4096, 32, GQA(32, rope=Rope()), 11008, 32000, 4096)),
    "llama-3.1-8b": ("llama", lambda: _llama(4096, 32, GQA(32, 8, rope=_LLAMA31), 14336, 128256, 131072)),
    "llama-3.2-1b": ("llama", lambda: _llama(2048, 16, GQA(32, 8, rope=_LLAMA32), 8192, 128256, 131072, True)),
    "mistral-7b": ("mistral", lambda: _llama(4096, 32, _MISTRAL, 14336, 32000, 32768)),
    "mixtral-8x7b": ("mixtral", _mixtral),
    "qwen2-0.5b": ("qwen2", lambda: _llama(896, 24, _QWEN2, 4864, 151936, 32768, True, 1e-6)),
    "qwen3-0.6b": ("qwen3", lambda: _llama(1024, 28, _QWEN3, 3072, 151936, 40960, True, 1e-6)),
    "deepseek-v2-lite": (
        "deepseek_v2",
        lambda: _deepseek(2048, 27, _MLA_LITE, _EXPERTS_LITE, _swiglu(10944), 1, 102400),
    ),
    "deepseek-v3": (
        "deepseek_v3",
        lambda: _deepseek(7168, 61, _MLA_V3, _EXPERTS_V3, _swiglu(18432), 3, 129280),
    ),
    "deepseek-v3.2": (
        "deepseek_v32",
        lambda: _deepseek(7168, 61, _DSA_V32, _EXPERTS_V3, _swiglu(18432), 3, 129280),
    ),
    "bert-base": ("bert", lambda: _bert(768, 12, 12)),
    "bert-large": ("bert", lambda: _bert(1024, 24, 16)),
    "roberta-base": ("roberta", _roberta),
    "distilbert-base": ("distilbert", _distilbert),
    "vit-base": ("vit", lambda: _vit(768, 12, 12)),
    "vit-small": ("vit", lambda: _vit(384, 12, 6)),
    "deit-small": ("deit", lambda: _vit(384, 12, 6, extra=2)),
    "vaswani-base": ("", lambda: _vaswani(512, 8, 2048, 0.1)),
    "vaswani-big": ("", lambda: _vaswani(1024, 16, 4096, 0.3)),
    "t5-small": ("t5", lambda: _t5(512, 6, 8, 2048)),
    "t5-base": ("t5", lambda: _t5(768, 12, 12, 3072)),
    "t5-v1.1-small": ("t5", lambda: _t5(512, 8, 6, 1024, v11=True)),
    "bart-base": ("bart", lambda: _bart(768, 6, 12)),
    "bart-large": ("bart", lambda: _bart(1024, 12, 16)),
    "marian": ("marian", _marian),
    "captioner": ("", _captioner),
    "gru-lm": ("", lambda: RecurrentConfig(10000, 512, 2, "gru")),
    "bahdanau": ("", lambda: Seq2SeqConfig(30000, 30000, 512, 1, "gru", "additive", bidirectional=True)),
    "luong": ("", lambda: Seq2SeqConfig(30000, 30000, 512, 2, "lstm", "bilinear")),
}  # fmt: skip


def _preset(family: Family, keys: dict[str, Any]) -> Config:
    return read_config({"model_type": family.name, **keys}, family, next(iter(family.heads)))


PRESETS |= {
    name: (family.name, partial(_preset, family, keys))
    for family in FAMILIES.values()
    for name, keys in family.presets.items()
}


# --- build --------------------------------------------------------------------------------------------------------


def build(
    preset: str | Config,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> Model:
    """A new model with random weights, drawn as its family draws them: a preset (or a config), with any settings
    changed.

    build("gpt2", layers=2, dim=64, heads=4), build("t5-small", attention=GQA(8, 2)), build("bart-base",
    **{"decoder.layers": 3}). A plain name is changed in every place that has it (dropout: in attention, in the
    stream, in the embedding); a dotted one names a single place. Widths that are not said follow `dim`."""
    family = ""
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise UsageError(f"preset {preset!r} is unknown; {nearest(preset, PRESETS)}")
        family, make = PRESETS[preset]
        preset = make()
    config = customize(preset, changes)
    with torch.device(device or "cpu"):
        model = config.make()
    if not next(model.parameters()).is_meta and isinstance(model, (Transformer, EncoderDecoder)):
        model.start = FAMILIES[family].start if family else start_of(config)
        initialize(model, model.start)
    model.family = family
    return model.to(dtype=dtype).eval()
