"""Models by name, as data, and `build`, which changes any setting of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from regard import models
from regard.attention import GQA
from regard.block import Tower
from regard.checkpoint.families import FAMILIES
from regard.checkpoint.family import Family
from regard.checkpoint.hf import read_config
from regard.checkpoint.rules import Key, put
from regard.config import customize, from_dict, to_dict
from regard.errors import UsageError, nearest
from regard.layers import LM, MLP
from regard.models import Tokens
from regard.models.init import initialize, start_of
from regard.position import Learned, Sinusoidal

Recurrent = models.RecurrentConfig | models.Seq2SeqConfig
Config = models.TransformerConfig | models.EncoderDecoderConfig | models.PainterConfig | Recurrent


def _preset(family: Family, keys: dict[str, Any]) -> Any:
    """Their keys as a config of ours. Widths that follow others stay open, so that they follow a change too."""
    theirs = {"model_type": family.name, **keys}
    config = read_config(theirs, family, next(iter(family.heads)))
    ours = to_dict(config)
    derived = {n: r for n, r in family.config.items() if isinstance(r, Key) and callable(r.default)}
    for name, rule in derived.items():
        if name not in keys and rule.places.endswith((".kv_heads", ".head_dim")):
            put(ours, rule.places, None)
    for place in (key for key in keys if "." in key):
        put(ours, place, keys[place])
    return from_dict(type(config), ours)


def _vaswani(dim: int, heads: int, ffn_dim: int, dropout: float) -> models.EncoderDecoderConfig:
    words = Tokens(37000, Sinusoidal(5000), scaled=True, dropout=dropout)
    tower = Tower(dim, 6, GQA(heads), MLP(ffn_dim), order="post", final_norm=False, dropout=dropout)
    encoder, decoder = replace(tower, causal=False), replace(tower, cross=GQA(heads))
    return models.EncoderDecoderConfig(words, encoder, words, decoder, LM(), max_len=5000)


def _captioner() -> models.EncoderDecoderConfig:
    """Text that attends to image patches (features D7), from the parts of ViT and GPT-2."""
    shape = dict(dim=384, layers=6, heads=6)
    image, text = (customize(PRESETS[name][1](), shape) for name in ("vit-small", "gpt2"))
    assert isinstance(image, models.TransformerConfig)
    assert isinstance(text, models.TransformerConfig)
    decoder = replace(text.tower, cross=GQA(6, bias=True, out_bias=True))
    parts = (image.embedding, image.tower, Tokens(50257, Learned(1024)), decoder)
    return models.EncoderDecoderConfig(*parts, LM(), shared=False, max_len=1024)


def _painter() -> models.PainterConfig:
    """The mirror of the captioner: patches that attend to a text."""
    shape = dict(dim=384, layers=6, heads=6)
    text, image = (customize(PRESETS[name][1](), shape) for name in ("gpt2", "vit-small"))
    assert isinstance(text, models.TransformerConfig)
    assert isinstance(image, models.TransformerConfig)
    encoder = replace(text.tower, causal=False)
    decoder = replace(image.tower, cross=GQA(6, bias=True, out_bias=True))
    words = Tokens(50257, Learned(1024))
    return models.PainterConfig(words, encoder, models.Canvas(224, 16, 3), decoder, max_len=1024)


def presets_of(family: Family) -> dict[str, tuple[str, Callable[[], Config]]]:
    """The rows of PRESETS that a family gives."""
    return {name: (family.name, partial(_preset, family, x)) for name, x in family.presets.items()}


# name -> (Hugging Face's family, or "" where it has none; config). A family that was made from
# another has the other's presets too: they are the first one's.
PRESETS: dict[str, tuple[str, Callable[[], Config]]] = {}
for _family in FAMILIES.values():
    PRESETS |= {name: row for name, row in presets_of(_family).items() if name not in PRESETS}
PRESETS |= {
    "vaswani-base": ("", lambda: _vaswani(512, 8, 2048, 0.1)),
    "vaswani-big": ("", lambda: _vaswani(1024, 16, 4096, 0.3)),
    "captioner": ("", _captioner),
    "painter": ("", _painter),
    "gru-lm": ("", lambda: models.RecurrentConfig(10000, 512, 2, "gru")),
    "bahdanau": ("", lambda: models.Seq2SeqConfig(30000, 30000, 512, 1, "gru", "additive", bidirectional=True)),
    "luong": ("", lambda: models.Seq2SeqConfig(30000, 30000, 512, 2, "lstm", "bilinear")),
}  # fmt: skip


def build(
    preset: str | Config,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> models.Model:
    """A new model with random weights, drawn as its family draws them: a preset (or a config), with any settings
    changed.

    build("gpt2", layers=2, dim=64, heads=4), build("t5-small", attention=GQA(8, 2)), build("bart-base",
    **{"decoder.layers": 3}). A plain name is changed in every place that has it (dropout: in attention, in the
    stream, in the embedding, and inside the feed-forward where the family drops there, as T5 does; GPT-2 does so with
    **{"ffn.dropout": 0.1} beside it); a dotted one names a single place. Widths that are not said follow `dim`. Without
    `device` it lies on torch's default one, as `with torch.device("meta"):` sets it."""
    family = ""
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise UsageError(f"preset {preset!r} is unknown; {nearest(preset, PRESETS)}")
        family, make = PRESETS[preset]
        preset = make()
    config = customize(preset, changes)
    with torch.device(device or torch.get_default_device()):
        model = config.make()
    if model.towers and not next(model.parameters()).is_meta:
        model.start = FAMILIES[family].start if family else start_of(config)
        initialize(model, model.start)
    model.family = family
    return model.to(dtype=dtype).eval()
