"""Regard: the whole Transformer in one small, fast, readable system.

    model = regard.load("folder")            # GPT-2, Llama, BERT, T5, BART, Marian, ViT, DeepSeek, ...
    logits = model(ids)
    tiny = regard.build("gpt2", layers=2, attention=regard.MLA(heads=4, latent=64))
    result = regard.train("story.toml")      # what the command does; evaluate, classify and embed too

Names are looked up when they are used, so that importing takes no work.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from regard.errors import VERSION as __version__  # noqa: F401

_HOME = {
    "regard.attention": "ATTENTION BACKENDS CROSS DSA DeltaRule GQA MLA SSD Context attend",
    "regard.block": "FEED_FORWARDS ORDERS Order Tower",
    "regard.cache": "LAYOUTS CacheSpec Contiguous Paged Ring",
    "regard.checkpoint": "from_hf load",
    "regard.checkpoint.families": "FAMILIES",
    "regard.errors": "UsageError",
    "regard.evaluation.model": "answer classify embed fill",
    "regard.labs.run": "lab",
    "regard.layers": "LM MLM MLP NORMS Answer BatchNorm Classify Norm Tag",
    "regard.see.look": "look",
    "regard.see.probe": "Probe",
    "regard.mask": "Causal Chunk Documents Full Padding Prefix Span Visible Window",
    "regard.models": "Canvas EncoderDecoderConfig Model PainterConfig Patches RecurrentConfig Seq2SeqConfig Tokens "
    "TransformerConfig",
    "regard.moe": "MoE",
    "regard.position": "POSITIONS RELATIVE SCALINGS Alibi Learned Linear Llama3 Rope Sinusoidal T5Bias "
    "Temperature Yarn",
    "regard.fast.cpu": "prepare",
    "regard.decode.settings": "Request Result Settings",
    "regard.decode.engine": "Engine",
    "regard.presets": "PRESETS build",
    "regard.decode.generate": "generate stream translate",
    "regard.decode.warm": "warm",
    "regard.training.finetune": "finetune",
    "regard.evaluation.run": "evaluate",
    "regard.training.run": "RunConfig train",
    "regard.training.trainer": "Trainer",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}
# Modules that are public names.
_MODULES = ("presets",)
__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"regard.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__


# Packages that had the name of a function: `from regard.train.trainer import Trainer` gives what it gave.
_FORMER = {"regard.train": "regard.training", "regard.evaluate": "regard.evaluation"}


class _Former(MetaPathFinder, Loader):
    """Finds modules by their former names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.rpartition(".")
        # One for each module: threads may import several at once.
        return ModuleSpec(name, _Former()) if package in _FORMER and rest else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package, _, rest = spec.name.rpartition(".")
        name = f"{_FORMER[package]}.{rest}"
        warnings.warn(f"{spec.name} is called {name} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import has put its own in the place.
        module.__spec__ = self.spec


def _keep_former_names() -> None:
    for package in _FORMER:
        # Known before anybody imports it, so that no import binds its name in here.
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = []
    sys.meta_path.append(_Former())


_keep_former_names()
