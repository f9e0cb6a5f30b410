"""Regard: the whole Transformer in one small, fast, readable system.

    model = regard.load("folder")            # GPT-2, Llama, BERT, T5, BART, Marian, ViT, DeepSeek, ...
    logits = model(ids)
    tiny = regard.build("gpt2", layers=2, attention=regard.MLA(heads=4, latent=64))
    result = regard.train("story.toml")      # what the command does; evaluate, classify and embed too

Names are looked up when they are used, so that importing takes no work.
"""

from __future__ import annotations

import importlib
from typing import Any

from regard.errors import VERSION as __version__  # noqa: F401

_HOME = {
    "regard.attention": "ATTENTION BACKENDS CROSS DSA DeltaRule GQA MLA Context attend",
    "regard.block": "FEED_FORWARDS ORDERS Order Tower",
    "regard.cache": "LAYOUTS CacheSpec Contiguous Paged Ring",
    "regard.checkpoint": "from_hf load",
    "regard.checkpoint.families": "FAMILIES",
    "regard.errors": "UsageError",
    "regard.evaluate.model": "answer classify embed fill",
    "regard.labs.run": "lab",
    "regard.layers": "LM MLM MLP Answer Classify Norm Tag",
    "regard.see.probe": "Probe",
    "regard.mask": "Causal Documents Full Padding Prefix Span Visible Window",
    "regard.models": "EncoderDecoderConfig Model Patches RecurrentConfig Seq2SeqConfig Tokens TransformerConfig",
    "regard.moe": "MoE",
    "regard.position": "POSITIONS RELATIVE SCALINGS Alibi Learned Linear Llama3 Rope Sinusoidal T5Bias Yarn",
    "regard.fast.cpu": "prepare",
    "regard.decode.settings": "Request Result Settings",
    "regard.decode.engine": "Engine",
    "regard.presets": "PRESETS build",
    "regard.decode.generate": "generate stream translate",
    "regard.train.finetune": "finetune",
    "regard.train.run": "RunConfig",
    "regard.train.trainer": "Trainer",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}
# Modules that are public names; train and evaluate can be called, see regard/train/__init__.py.
_MODULES = ("evaluate", "presets", "train")
__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"regard.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
